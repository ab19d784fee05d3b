"""Train a small classifier on whatever device there is.

    python train.py [DEVICE]

Without a device it takes this machine's accelerator, or its CPU.
"""

import io
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    device = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(sys.argv[1] if sys.argv[1:] else device or "cpu")
    accelerated = device.type != "cpu"
    if device.index is not None and accelerated:
        torch.accelerator.set_device_index(device.index)

    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=64, pin_memory=accelerated)

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    for _ in range(4):
        total = torch.zeros((), device=device)
        for x, y in loader:
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        print(f"loss {total.item() / len(loader):.4f}")

    forked = [torch.accelerator.current_device_index()] if accelerated else []
    with torch.random.fork_rng(forked, device_type=device.type):
        noise = torch.randn(64, 16, device=device)
    print("outputs", model(noise).shape[1])

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location=device)
    model.load_state_dict(state)

    if accelerated:
        peak = torch.accelerator.max_memory_allocated()
        print("memory counted", peak > 0)


if __name__ == "__main__":
    main()
