"""A small network learns y = sin(x), however often its device is taken away.

``sublet train examples/preemptible_training.py`` trains it: any number of times, it goes on from where it stopped.
``python examples/preemptible_training.py`` plays the operator who takes the device away behind each of twenty epochs,
and then trains it once more, undisturbed: the weights are the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import sublet

PREEMPTIONS = int(sys.argv[3]) if len(sys.argv) > 3 else 20
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else PREEMPTIONS + 10
PAUSE_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


def train() -> None:
    """An ordinary loop. Nothing in it knows of leases but ``device`` and the trainer."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from sublet.training import PreemptibleTrainer

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
            for inputs, targets in trainer.batches(loader):
                loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
                trainer.step(loss)
                time.sleep(PAUSE_S)
            scheduler.step()
            print(f"epoch {epoch}: loss {loss.item():.6f}")
    digest = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    print(f"done: {trainer.steps} steps, weights {digest:.12f}")


def run(name: str, preemptions: int = 0) -> str:
    """`sublet train`, with an operator who takes its lease away; what it says at its end."""
    words = ["train", "--gpu", "64MiB", "--state", "64MiB", "--name", name, __file__, *sys.argv[1:]]
    command = [sys.executable, "-m", "sublet", *words]
    last, taken = "", set[str]()
    with (
        sublet.connect() as fabric,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job,
    ):
        assert job.stdout is not None
        for line in job.stdout:
            print(f"{name}: {line}", end="")
            last = line if line.startswith("done") else last
            if line.startswith("epoch") and len(taken) < preemptions:
                for view in fabric.leases():
                    if view.labels == {"train": name} and view.name is None and view.end is None:
                        fabric.request("POST", f"/v1/leases/{view.id}/revoke", {"detail": "an example"}, shape=dict)
                        taken.add(view.id)
        assert job.wait() == 0
        assert len(taken) == preemptions
        while fabric.volume(f"train-{name}").state == "live":  # the lease has it, or it is being put away after it
            time.sleep(0.1)
        fabric.remove_volume(f"train-{name}")  # otherwise it would stay for seven days, and the next run go on from it
    return last


def main() -> None:
    """The operator's part."""
    often, alone = run("often", PREEMPTIONS), run("alone")
    assert often == alone != "", "not the same"
    print("The weights are the same, to the last bit.")


if __name__ == "__main__":
    train() if os.environ.get("SUBLET_LEASE") else main()
