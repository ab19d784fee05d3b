"""Libraries that users run: on the device as on the CPU, and where they refuse.

The scripts are those that the guide shows. `make ecosystem` installs the
libraries; what is not there is skipped. Each run has a process of its own,
because accelerate and the registries of Lightning keep what they are told.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import needs
import processes
import pytest
import torch

import openreg  # noqa: F401 - before the chapter `autoload`

pytestmark = needs.operators
SCRIPTS = Path(processes.__file__).parent / "scripts" / "ecosystem"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
# The script of each library, what it imports, and how many losses it prints.
PRINTED = {
    "accelerate_train": ("accelerate", 12),
    "lightning_train": ("lightning.pytorch", 8),
    "safetensors_files": ("safetensors.torch", 8),
    "transformers_train": ("transformers.trainer", 8),
}
DEVICES = ["cpu", "openreg", "openreg:1"]


def require(library):
    """Skip without the library; it is not imported here, which takes long."""
    if not find_spec(library):
        pytest.skip(f"{library} is in the extra `ecosystem`: make ecosystem")


def run(code, **environment):
    """What a program prints; it must end well."""
    settings = {"OPENREG_FALLBACK": "off"} | OFFLINE | environment
    process = processes.run(code, os.environ | settings)
    assert process.returncode == 0, process.stderr
    return process.stdout


def script(name, module):
    """What a script prints on each device, by the first word of each line.

    The module is imported once, which takes longer than what the script does.
    """
    path = str(SCRIPTS / f"{name}.py")
    lines = run(
        f"import os, runpy, sys, {module}\n"
        f"for device in {DEVICES}:\n"
        f"    print('run', device, flush=True)\n"
        f"    if not os.fork():\n"
        f"        sys.argv = [{path!r}, device]\n"
        f"        runpy.run_path({path!r}, run_name='__main__')\n"
        f"        break\n"
        f"    assert os.wait()[1] == 0\n"
    ).splitlines()
    printed = {}
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "run":
            device = printed[rest] = {}
        else:
            device.setdefault(word, []).append(rest)
    return printed


def numbers(printed):
    """The numbers of a script, by the first word of their lines."""
    words = printed.keys() & {"loss", "accuracy", "tokens"}
    return {w: [float(x) for x in " ".join(printed[w]).split()] for w in words}


def facts(setup, **asked):
    """The values of expressions in a new process; of an error, its message."""
    lines = [setup, "import json", "def ask(expression):", "    try:"]
    lines += [
        "        return eval(expression)",
        "    except Exception as error:",
    ]
    lines += ["        return f'{type(error).__name__}: {error}'"]
    lines += [f"found = {{k: ask(v) for k, v in {asked!r}.items()}}"]
    lines += ["print('facts', json.dumps(found, default=str))"]
    return json.loads(run("\n".join(lines)).rpartition("facts ")[2])


@pytest.mark.parametrize("name", PRINTED)
def test_a_script_trains_on_the_device_as_on_the_cpu(name):
    module, count = PRINTED[name]
    require(module.partition(".")[0])
    printed = script(name, module)
    expected = numbers(printed["cpu"])
    assert len(expected["loss"]) == count
    assert sum(expected["loss"][-4:]) < sum(expected["loss"][:4])
    for device in DEVICES:
        place = str(torch.ones(1).to(device).device)
        assert set(printed[device]["device"]) == {place}
        assert numbers(printed[device]) == {
            word: pytest.approx(values, rel=1e-5)
            for word, values in expected.items()
        }


# ------------------------------------------------------------------ accelerate

ACCELERATE = """
import os, tempfile, torch
from pathlib import Path
import torch.testing._internal.distributed.fake_pg
from accelerate import Accelerator
from accelerate.state import AcceleratorState
def accelerator(device="openreg", **options):
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    if device:
        os.environ["ACCELERATE_TORCH_DEVICE"] = device
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(**options)
def random_states():
    folder = Path(tempfile.mkdtemp())
    accelerator().save_state(folder)
    file = folder / "random_states_0.pkl"
    return [*torch.load(file, weights_only=False)]
def world():
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    found = accelerator().num_processes
    return torch.distributed.get_world_size(), found
"""


def test_what_accelerate_takes_and_refuses(tmp_path, monkeypatch):
    require("accelerate")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = facts(
        ACCELERATE,
        told="accelerator('openreg:1').device",
        untold="accelerator(None).device",
        float16="accelerator(mixed_precision='fp16')",
        bfloat16="accelerator(mixed_precision='bf16').native_amp",
        states="random_states()",
        processes="world()",
    )
    assert found["told"] == "openreg:1"
    assert found["untold"] == "cpu"
    assert "fp16 mixed precision requires a device in" in found["float16"]
    assert found["bfloat16"] is True
    assert "torch_manual_seed" in found["states"]
    assert not [name for name in found["states"] if "openreg" in name]
    # Two processes are there, and each would train alone.
    assert found["processes"] == [2, 1]


# ---------------------------------------------------------------- transformers

TRANSFORMERS = """
import os, tempfile, torch
from transformers import (
    AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, logging
)
logging.set_verbosity_error()
os.environ["ACCELERATE_TORCH_DEVICE"] = "openreg:1"
folder = tempfile.mkdtemp()
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, eos_token_id=None,
)
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
def load(places, **options):
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, **options
    )
def places(places):
    return sorted({str(p.device) for p in load(places).parameters()})
def logits(places, **options):
    model = load(places, **options)
    tokens = torch.arange(8, device=model.device)[None]
    return model(tokens).logits.flatten()[:99].tolist()
def arguments(**options):
    options |= {"report_to": "none", "disable_tqdm": True, "max_steps": 1}
    return TrainingArguments(tempfile.mkdtemp(), **options)
def random_states():
    tokens = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}]
    trainer = Trainer(load("cpu"), arguments(), train_dataset=tokens)
    trainer.train()
    file = trainer.args.output_dir + "/checkpoint-1/rng_state.pth"
    return [*torch.load(file, weights_only=False)]
SPLIT = {"model.embed_tokens": "openreg:0", "model.rotary_emb": "openreg:0",
         "model.layers.0": "openreg:0", "model.layers.1": "openreg:1",
         "model.norm": "openreg:1", "lm_head": "openreg:1"}
"""


def test_what_transformers_takes_and_refuses(tmp_path, monkeypatch):
    require("transformers")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = facts(
        TRANSFORMERS,
        name="places('openreg:1')",
        index="places(1)",
        whole="places({'': 'openreg:1'})",
        split="places(SPLIT)",
        auto="places('auto')",
        cpu="logits('cpu')",
        sdpa="logits('openreg')",
        eager="logits('openreg', attn_implementation='eager')",
        halves="logits(SPLIT)",
        trainer="arguments().device",
        float16="Trainer(load('cpu'), arguments(fp16=True))",
        bfloat16="arguments(bf16=True)",
        states="random_states()",
    )
    assert found["name"] == found["index"] == found["whole"] == ["openreg:1"]
    assert found["split"] == ["openreg:0", "openreg:1"]
    assert found["auto"] == ["cpu"]
    for way in ("sdpa", "eager", "halves"):
        assert found[way] == pytest.approx(found["cpu"], rel=1e-4, abs=1e-6)
    assert found["trainer"] == "openreg:1"
    assert "fp16 mixed precision requires a device in" in found["float16"]
    assert "doesn't support bf16/gpu" in found["bfloat16"]
    assert "cpu" in found["states"]
    assert not [name for name in found["states"] if "openreg" in name]


# ------------------------------------------------------------------- Lightning

LIGHTNING = f"""
import sys; sys.path.insert(0, {str(SCRIPTS)!r})
import torch
import lightning_train as script
from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy as OnOneDevice
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
def trainer(device=None, **options):
    if device:
        options["strategy"] = script.SingleDeviceStrategy(device)
    options = {{"accelerator": "openreg", "devices": 1}} | options
    return Trainer(logger=False, enable_checkpointing=False, **options)
def amp(**options):
    return trainer("openreg", **options).precision_plugin.device
"""


def test_what_lightning_takes_and_refuses():
    require("lightning")
    found = facts(
        LIGHTNING,
        named="trainer('openreg:1').strategy.root_device",
        unnamed="trainer().strategy.root_device",
        auto="trainer(accelerator='auto').accelerator.name()",
        several="type(trainer(devices=2).strategy).__name__",
        amp="amp(precision='bf16-mixed')",
        amp_named="amp(plugins=MixedPrecision('bf16-mixed', device='openreg'))",
        fabric="Fabric(accelerator='openreg')",
        placed="Fabric(strategy=OnOneDevice(torch.device('openreg:1'))).device",
    )
    assert found["named"] == "openreg:1"
    assert found["unnamed"] == "cpu"
    assert found["auto"] == "cpu"
    assert found["several"] == "DDPStrategy"
    assert found["amp"] == "cuda"
    assert found["amp_named"] == "openreg"
    assert "invalid accelerator name" in found["fabric"]
    assert found["placed"] == "openreg:1"


# ----------------------------------------------------------------- safetensors

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
DTYPES += [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture
def safetensors():
    require("safetensors")
    import safetensors.torch

    return safetensors


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 2)], ids=str)
def test_safetensors_writes_the_same_file_and_reads_it(
    safetensors, tmp_path, dtype, shape
):
    tensor = torch.randint(-4, 5, shape).to(dtype)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    safetensors.torch.save_file({"x": tensor.to("openreg")}, ours)
    safetensors.torch.save_file({"x": tensor}, theirs)
    assert ours.read_bytes() == theirs.read_bytes()
    for index in (0, 1):
        read = safetensors.torch.load_file(theirs, device=index)["x"]
        assert read.device == torch.device("openreg", index)
        assert read.dtype == dtype
        assert read.shape == tensor.shape
        raw = read.cpu().reshape(-1).view(torch.uint8)
        assert torch.equal(raw, tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("device", ["openreg", "openreg:1"])
def test_safetensors_refuses_the_name_of_the_device(
    safetensors, tmp_path, device
):
    path = tmp_path / "file"
    safetensors.torch.save_file({"x": torch.ones(2)}, path)
    with pytest.raises(safetensors.SafetensorError, match="is invalid"):
        safetensors.torch.load_file(path, device=device)
    with (
        pytest.raises(safetensors.SafetensorError, match="is invalid"),
        safetensors.safe_open(path, "pt", device=device),
    ):
        pass


@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_safetensors_refuses_shared_and_strided_memory(
    safetensors, tmp_path, device
):
    x = torch.ones(2, 3).to(device)
    with pytest.raises(RuntimeError, match="Some tensors share memory"):
        safetensors.torch.save_file({"a": x, "b": x[0]}, tmp_path / "file")
    with pytest.raises(ValueError, match="non contiguous tensor"):
        safetensors.torch.save_file({"a": x.t()}, tmp_path / "file")
