"""Hints for words and options that Sublet does not have: other tools' names, and own names in the wrong place."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Final

_STATUS: Final = "`sublet status` shows the devices and what is free."
_QUEUE: Final = "`sublet lease ls` shows leases and the queue, `sublet ps` the commands that run under leases."
_CANCEL: Final = (
    "`sublet stop GUEST` ends a command, `sublet lease release LEASE` gives a lease back or leaves the queue, "
    "`sublet nb stop JOB` stops a notebook."
)
_RUN: Final = "`sublet run --gpu 8GiB -- COMMAND` runs a command, `sublet nb submit NOTEBOOK` a notebook."
_ACQUIRE: Final = "`sublet lease acquire --gpu 8GiB` takes a lease, `sublet run --gpu 8GiB -- bash` a shell under one."

ELSEWHERE: Final[dict[str, str]] = {
    **dict.fromkeys(("gpus", "gpu", "devices", "nodes", "info", "sinfo", "free", "nvidia-smi"), _STATUS),
    **dict.fromkeys(("ls", "list", "leases", "queue", "jobs", "squeue", "qstat", "who"), _QUEUE),
    **dict.fromkeys(("kill", "cancel", "scancel", "qdel", "rm", "delete"), _CANCEL),
    **dict.fromkeys(("srun", "sbatch", "qsub", "launch"), _RUN),
    **dict.fromkeys(("salloc", "alloc", "get", "request", "reserve"), _ACQUIRE),
    **dict.fromkeys(("shell", "ssh", "attach", "bash"), "`sublet run --gpu 8GiB -- bash` opens a shell on a GPU."),
    **dict.fromkeys(("start", "serve", "init"), "`sublet up` starts the office."),
    **dict.fromkeys(("shutdown", "quit"), "`sublet down` ends the office."),
    **dict.fromkeys(("notebook", "jupyter", "jupyterlab"), "`sublet lab NOTEBOOK` opens JupyterLab."),
    **dict.fromkeys(("sacct", "cost", "billing", "usage"), "`sublet bill` shows what was used and what it costs."),
    **dict.fromkeys(("monitor", "watch", "htop"), "`sublet top` shows devices, leases and the queue live."),
    **dict.fromkeys(("check", "health", "diagnose"), "`sublet doctor` checks this machine."),
    **dict.fromkeys(("login", "auth"), "Set SUBLET_URL to the office's address and SUBLET_TOKEN to your access token."),
    **dict.fromkeys(("uninstall", "reset", "clean", "prune"), "`sublet purge` removes the office and its state."),
    **dict.fromkeys(("configure", "settings", "set"), "`sublet config set KEY VALUE` sets a default."),
    "version": "`sublet --version` prints the version.",
    "help": "`sublet --help` lists the commands.",
}
"""First words of other tools, and of habit → which command does it here."""

SYNONYMS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("--time", "--timeout", "--duration", "--walltime"), ("--ttl",)),
    **dict.fromkeys(("-g", "-G", "--gres", "--gpu-memory", "--gpu-mem", "--min-vram", "--mem-per-gpu"), ("--gpu",)),
    **dict.fromkeys(("--num-gpus", "--gpu-count", "--count", "--gpus-per-node", "--nproc", "-n", "-N"), ("--gpus",)),
    **dict.fromkeys(("--mem", "--ram", "-m"), ("--memory",)),
    **dict.fromkeys(("--cpus", "--cores", "--cpus-per-task", "--ncpus", "-c"), ("--cpu", "--cores")),
    **dict.fromkeys(("--disk", "--storage", "--volume"), ("--block",)),
    **dict.fromkeys(("--partition", "--queue", "--priority", "--qos", "-p"), ("--tier",)),
    **dict.fromkeys(("--preemptible", "--interruptible"), ("--spot",)),
    **dict.fromkeys(("--job-name", "-J"), ("--name",)),
    **dict.fromkeys(("--max-wait", "--queue-time"), ("--wait",)),
    **dict.fromkeys(("--immediate", "--now", "-I"), ("--no-wait",)),
    **dict.fromkeys(("--interactive", "--pty", "-it", "-i"), ("--tty",)),
    **dict.fromkeys(("--force", "-f"), ("--now", "--yes")),
    **dict.fromkeys(("--environment", "-e"), ("--env",)),
    **dict.fromkeys(("--interpreter",), ("--python",)),
}
"""Options of other tools → the options that may be meant, in order; the first that the command has is named."""

ALIKE: Final = 0.75
FIRST_WORD_BONUS: Final = 0.15
"""A first word is more likely meant than the second word of a group: `rum` is `run`, not `volume rm`."""


def command_hint(words: Sequence[str], commands: Collection[str], groups: Collection[str]) -> str:
    """What to use in place of a command that does not exist; empty if nothing is known."""
    if not words:
        return ""
    if words[0] in groups:
        wanted = words[1] if len(words) > 1 else ""
        if wanted == "list" and f"{words[0]} ls" in commands:
            return f"Write `sublet {words[0]} ls`."
        return ELSEWHERE.get(wanted, "") if words[0] == "lease" else ""
    if words[0] in ELSEWHERE:
        return ELSEWHERE[words[0]]
    names = [(path.split()[-1], path) for path in commands] + [(group, group) for group in groups]
    likeness = {
        path: difflib.SequenceMatcher(None, words[0], name).ratio() + FIRST_WORD_BONUS * (name == path)
        for name, path in names
    }
    best = max(likeness.values())
    found = [path for path, ratio in likeness.items() if ratio == best]
    return f"Did you mean {' or '.join(f'`sublet {path}`' for path in found)}?" if best >= ALIKE else ""


def option_hint(option: str, has: Iterable[str], *, alike: float = 0.0, foreign: bool = True) -> str:
    """The option that may be meant, of those that the command has; empty if nothing is known.

    ``foreign``: also by what other tools call it; ``alike``: also by its spelling, down to this likeness.
    """
    known = sorted(set(has))
    candidates = (*(SYNONYMS.get(option, ()) if foreign else ()), f"-{option}")  # "-gpu" for "--gpu"
    meant = next((one for one in candidates if one in known and len(one) > 2), "")
    if not meant and alike:
        meant = next(iter(difflib.get_close_matches(option, known, n=1, cutoff=alike)), "")
    return f"Did you mean {meant}?" if meant else ""
