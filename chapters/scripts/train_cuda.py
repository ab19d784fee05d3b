"""Train a small classifier on CUDA: what train.py was before its port."""

import io

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    inputs = torch.randn(256, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=64, pin_memory=True)

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    for _ in range(4):
        total = torch.zeros((), device="cuda")
        for x, y in loader:
            x = x.cuda(non_blocking=True)
            y = y.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        torch.cuda.synchronize()
        print(f"loss {total.item() / len(loader):.4f}")

    with torch.random.fork_rng():
        noise = torch.randn(64, 16, device="cuda")
    print("outputs", model(noise).shape[1])

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location=lambda storage, _: storage.cuda())
    model.load_state_dict(state)

    peak = torch.cuda.max_memory_allocated()
    print("memory counted", peak > 0)


if __name__ == "__main__":
    main()
