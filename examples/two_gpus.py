"""A small network learns y = sin(x) on two GPUs at once, and may lose both at any moment.

``sublet train --gpus 2 examples/two_gpus.py`` runs it as two processes, one for each GPU: an ordinary program for
``torchrun``, with a ``PreemptibleTrainer`` around its loop. Host devices do as well: ``sublet up --host-gpus 2x4GiB``.
``python examples/two_gpus.py`` is one process, on the CPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sublet
from sublet.training import PreemptibleTrainer

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
PAUSE_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


def main() -> None:
    """One of the processes."""
    is_leased = "SUBLET_LEASE" in os.environ
    device = sublet.device() if is_leased else "cpu"
    others = {} if "RANK" in os.environ else {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group("gloo" if device == "cpu" else "nccl", **others)  # joins the others
    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = nn.Sequential(nn.Linear(1, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    model = DistributedDataParallel(layers.to(device))
    torch.manual_seed(1 + distributed.get_rank())  # from here on each draws numbers of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.linspace(-3, 3, 512).unsqueeze(1)
    data = TensorDataset(x, x.sin())
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))  # half of the data for each

    place = None if is_leased else tempfile.mkdtemp()
    with PreemptibleTrainer(model, optimizer, place=place) as trainer:
        for epoch in trainer.epochs(EPOCHS):
            for inputs, targets in trainer.batches(loader):
                loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
                trainer.step(loss)
                time.sleep(PAUSE_S)
            if distributed.get_rank() == 0:
                print(f"epoch {epoch}: loss {loss.item():.6f}")
    digest = sum(value.detach().double().sum().item() for value in model.state_dict().values())
    os.write(1, f"rank {distributed.get_rank()}: {trainer.steps} steps, weights {digest:.12f}\n".encode())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
