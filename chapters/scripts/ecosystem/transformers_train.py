"""Train a small Llama with the Trainer of transformers, and generate with it.

    python transformers_train.py openreg

No weights are downloaded: the model is made from a configuration. The Trainer
takes the device from accelerate, so that `ACCELERATE_TORCH_DEVICE` says which.
A model takes one as any module does, and `from_pretrained` takes it as
`device_map`.
"""

import os
import sys
import tempfile

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

device = os.environ["ACCELERATE_TORCH_DEVICE"] = sys.argv[1]
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=True,
)
# Sequences that count: 5 6 7 8 ...
COUNTS = [torch.arange(i, i + 16) % 63 + 1 for i in range(32)]


class Printing(Trainer):
    def log(self, logs, *args, **kwargs):
        super().log(logs, *args, **kwargs)
        if "loss" in logs:
            print("loss", logs["loss"])


def trainer(folder: str, steps: int) -> Trainer:
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=4,
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_config(CONFIG)
    data = [{"input_ids": count, "labels": count} for count in COUNTS]
    return Printing(model, arguments, train_dataset=data)


set_seed(0)
with tempfile.TemporaryDirectory() as folder:
    trainer(folder, steps=4).train()
    # A checkpoint holds the optimizer's state, too.
    resumed = trainer(folder, steps=8)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device)

assert model.device == resumed.model.device
print("device", model.device)
start = torch.tensor([[5, 6, 7, 8]], device=device)
tokens = model.generate(start, max_new_tokens=8, do_sample=False)
print("tokens", *tokens[0].tolist())
