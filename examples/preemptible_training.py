"""A small network that learns y = sin(x), however often its device is taken away.

Run it: ``sublet train examples/preemptible_training.py`` (any number of times: it goes on from where it stopped).
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sublet
from sublet.training import PreemptibleTrainer

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
PAUSE_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


def main() -> None:
    """Nothing in here knows of leases but ``device`` and the trainer."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    device = sublet.device()
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    x = torch.linspace(-3, 3, 512).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, x.sin()), batch_size=64, shuffle=True)

    with PreemptibleTrainer(model, optimizer, scheduler=scheduler) as trainer:
        for epoch in trainer.epochs(EPOCHS):
            for batch, target in trainer.batches(loader):
                loss = nn.functional.mse_loss(model(batch.to(device)), target.to(device))
                trainer.step(loss)
                time.sleep(PAUSE_S)
            scheduler.step()
            print(f"epoch {epoch}: loss {loss.item():.6f}")
    digest = sum(p.detach().double().sum().item() for p in model.parameters())
    print(f"done: {trainer.steps} steps, weights {digest:.12f}")


if __name__ == "__main__":
    main()
