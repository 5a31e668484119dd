"""Sublet lends scarce hardware for minutes at a time.

A lease is a time-bounded grant. When it ends, everything that hung on it is torn down, and that is checked before
anybody else gets the hardware::

    import sublet

    fabric = sublet.connect()
    with fabric.gpu(min_vram="2GiB", ttl="5m") as lease:
        ...

Importing this package loads nothing but this file; each public name is fetched when it is first used.
"""

# General layout. Imports point up this list, never down (tests/unit/test_map.py holds that):
#
#   values, errors, clock   ids, enums, sizes, durations, epochs · the tree of errors · time as something handed in
#   wire/                   messages between client, broker, agent, supervisor and guest; nothing else is shared by them
#   lease/                  the law: state tables, the lease, renewal. Pure, standard library
#   observe/                events once; metrics, bills and the audit chain folded from them
#   broker/                 who gets what: the pure ledger, and around it journal, service, signing
#   agent/                  the hardware of a machine; memory.py keeps every rule without any hardware
#   client/                 what programs hold: connect, leases, renewal, transport
#   engines/                where broker and agents are put together
#   sim/                    workloads, replay, reports
#   testing/                public: a clock to hold, faults by name, conformance suites
#   cli/                    the `sublet` command

from __future__ import annotations

import importlib
from typing import Final

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]

_LAZY: Final[dict[str, str]] = {}
"""Public name → the module that defines it. Each also stands in ``__all__``."""

_LAZY_MODULES: Final[dict[str, str]] = {}
"""Public name → the module it stands for, as in ``sublet.aio``."""


def __getattr__(name: str) -> object:
    """Fetch a public name on first use (PEP 562), and keep it."""
    value: object
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    elif name in _LAZY_MODULES:
        value = importlib.import_module(_LAZY_MODULES[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
