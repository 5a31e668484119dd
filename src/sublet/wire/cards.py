"""Messages about cards: what was found between two leases, memory per process, and what a guest is told.

Standard library only: the supervisor reads these.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.wire.caps import LeaseCaps
from sublet.wire.compat import later

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
NVML: Final = "pynvml"
"""The binding of NVML, which what looks at cards needs."""
OWN_DEVICE: Final = "SUBLET_DEVICE"
"""Set for a guest, or a process of one, that has one of the lease's devices for its own: its number."""
COUNT_VARIABLE: Final = "SUBLET_COUNT_LAUNCHES"
"""1: a guest with cards counts the kernels that frameworks launch in it, if it can."""
OF_CARDS: Final = (VISIBLE, "XLA_PYTHON_CLIENT_PREALLOCATE", "TF_FORCE_GPU_ALLOW_GROWTH", "CUPY_GPU_MEMORY_LIMIT")
"""Variables that a guest with a card is given."""
_MIG: Final = "MIG-"
KNOWN: Final = "/proc/driver/nvidia/gpus"
"""Where the driver lists the cards of the machine."""
_WSL: Final = "dxg"
_SHARED: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", _WSL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFound:
    """One look at a card that no process should use."""

    left: str = ""
    """What is still there and may go by itself, in words."""
    failed: str = ""
    """Why it cannot be had clean, in words."""
    is_hard: bool = False
    """Whether looking again would not mend it."""
    settings: str = ""
    """What it is set to: text that the program understands again."""
    note: str = ""
    """What an operator may want to know, and does not keep the card from being lent."""
    scrubbed_bytes: int = 0
    scrub_ns: int = 0
    in_use: int = later(0)
    """Bytes in use when nothing was left there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestTrial:
    """Asks for a guest that runs some Python code, to try out what guests are offered."""

    profile: str
    card: str
    nodes: tuple[str, ...]
    """The card's own device files below /dev."""
    code: str
    words: tuple[str, ...]
    """Its arguments."""
    caps: LeaseCaps = LeaseCaps()
    """Those that leases have."""


UNSEEN: Final = 0
"""In the place of a pid: by processes that cannot be told apart from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """So much of a card is used by one process, as the driver says; or by ``UNSEEN``."""

    card: str
    pid: int
    bytes: int


def card_environment(shares: Mapping[str, int], given: Mapping[str, str], own: str = "") -> dict[str, str]:
    """Variables of a guest whose lease has so many bytes of these cards, over what the holder sent (``given``).
    ``own``: the card that it is to find first, whatever the holder sent.

    A holder's own choice of cards holds only within the lease: its environment is that of another process, which may
    have been kept off all cards, or have one of its own. Frameworks that would take most of a card at their first line
    are told to grow as they need, unless the holder says how.
    """
    if not shares:
        return {}
    wanted = [name for name in given.get(VISIBLE, "").split(",") if name]
    if own:
        visible = prefer_cards([own, *(card for card in shares if card != own)])
    else:
        visible = ",".join(wanted) if wanted and shares.keys() >= set(wanted) else prefer_cards(list(shares))
    grows = dict(zip(OF_CARDS[1:], ("false", "true", str(min(shares.values()))), strict=True))
    return {VISIBLE: visible} | {name: value for name, value in grows.items() if name not in given}


def prefer_cards(leased: Sequence[str], known: str = KNOWN) -> str:
    """What ``CUDA_VISIBLE_DEVICES`` is to be, so that the leased cards come first: "cuda" without a number is then one
    of them. The others stay visible behind them (a card can be taken from a process and given back only while it sees
    all that it saw before); whether it may use them is not decided by this. Empty where no card is leased."""
    if not leased or any(uuid.startswith(_MIG) for uuid in leased):
        return ",".join(leased[:1])
    others = [listed["GPU UUID"] for listed in _listed(known) if "GPU UUID" in listed]
    # The driver has not looked at every card yet; CUDA would see nothing that stands behind such a name.
    return ",".join([*leased, *(uuid for uuid in others if uuid not in leased and "?" not in uuid)])


def device_nodes(leased: Sequence[Sequence[str]], dev: str = "/dev") -> tuple[str, ...]:
    """The device files that a program needs for cards with these files of their own, and for no others. Empty where one
    of them cannot be found."""
    always = [path for name in _SHARED if os.path.exists(path := os.path.join(dev, name))]
    if os.path.join(dev, _WSL) in always:
        return tuple(always)
    own = tuple(os.path.join(dev, name) for names in leased for name in names)
    return (*always, *own) if always and all(leased) and all(map(os.path.exists, own)) else ()


def _listed(known: str) -> Iterator[dict[str, str]]:
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(known)):
            with open(os.path.join(known, name, "information"), encoding="utf-8") as file:
                pairs = (line.partition(":") for line in file)
                yield {key.strip(): value.strip() for key, _, value in pairs}
