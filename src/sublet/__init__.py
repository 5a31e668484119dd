"""Sublet lends scarce hardware for minutes at a time.

A lease is a time-bounded grant. When it ends, everything that hung on it is torn down, and that is checked before
the hardware is lent again::

    import sublet

    fabric = sublet.connect()
    with fabric.gpu(min_vram="2GiB", ttl="5m") as lease:
        ...

Importing this package loads nothing but this file; each public name is fetched when it is first used.
"""

# General layout. Imports point up this list, never down (tests/unit/test_map.py holds that):
#
#   values, errors, clock   ids, enums, sizes, durations, epochs · the tree of errors · time as something handed in
#   lease_end               why and when a lease ended
#   background              how threads and tasks are started, and what happens when one fails
#   invocation              how a command is typed here: `sublet`, or its path; for messages
#   settings                files that an operator writes: tables, keys, and what is wrong with them
#   wire/                   messages between client, office, node and guest; nothing else is shared by them
#   lease/                  the law: state tables, the lease, renewal. Pure, standard library
#   logs, metrics           log lines and Prometheus metrics, as every process writes them
#   state/                  values that survive: transfer/ (as bytes), checkpoints/ (packs, stores, Durable),
#                           replicated/ (a register on a quorum; checkpoints and reservations on it)
#   durable/                functions that checkpoints call by name, under the name that is written there
#   replicated              the public face of state/replicated/
#   office/                 who gets what: ledger/ decides, journal/ keeps it, api/ serves it; the driver carries it out
#   node/                   what a machine does: supervisor/, which puts processes/, sandbox/ and storage/ together
#   devices/                host devices and CUDA devices behind one interface: memory, modules, launches
#   node/agent/             the hardware of a machine: inventory, health, cards, the door for holders
#   supervisor/, agent/     old names, which a supervisor of the version before still uses
#   guest/                  what runs inside: where a program stands, how it is begun, warm interpreters
#   client/                 what programs hold: connect, leases, renewal, transport
#   aio                     the same for asyncio
#   studio/                 sessions: a person's GPU work that outlives its leases
#   jobs/                   bursts: many chunks over many leases; results that outlive them
#   engines/                where office and nodes are put together
#   simulate/               the planner: workloads, their replay on the real ledger, models beside it
#   testing/                public: a clock to hold, an agent without hardware, faults by name, conformance suites
#   cli/                    the `sublet` command

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # so that not even ``typing`` is loaded
if TYPE_CHECKING:  # what a type checker sees; the tables below are what happens, and a test compares them
    from typing import Final

    from sublet import aio, errors, jobs, replicated, training
    from sublet.client.fabric import Fabric, connect
    from sublet.client.guests import Guest
    from sublet.client.handle import DroppedLease
    from sublet.client.lease import Lease
    from sublet.client.many import Leases
    from sublet.client.model import LeaseChange, LeasedDevice, Notice, Offer, Place
    from sublet.client.volumes import Volume
    from sublet.compute.arguments import f32, f64, i32, i64, u32, u64
    from sublet.compute.decorator import GpuFunction, gpu
    from sublet.compute.session import GpuSession
    from sublet.errors import (
        CallTimeout,
        CapacityExceeded,
        Disconnected,
        GpuError,
        GpuSessionEnded,
        InvalidRequest,
        LeaseEnded,
        LeaseExpired,
        LeaseInterrupt,
        LeaseNotActive,
        LeaseRevoked,
        NotFound,
        OutOfMemory,
        Quarantined,
        QuotaExceeded,
        RemoteError,
        StaleEpoch,
        SubletError,
        Unauthorized,
        Unpicklable,
        Unsupported,
        WorkerLost,
    )
    from sublet.guest.current import current, device
    from sublet.lease.policy import RenewalPolicy
    from sublet.lease.renewal import RenewalManager
    from sublet.lease.states import LeaseStatus
    from sublet.lease_end import EndReason, LeaseEnd
    from sublet.state.checkpoints.durable import Durable
    from sublet.values import Epoch, Exclusivity, Kind, RenewMode, Tier

__version__ = "0.1.0.dev0"

__all__ = [
    "CallTimeout",
    "CapacityExceeded",
    "Disconnected",
    "DroppedLease",
    "Durable",
    "EndReason",
    "Epoch",
    "Exclusivity",
    "Fabric",
    "GpuError",
    "GpuFunction",
    "GpuSession",
    "GpuSessionEnded",
    "Guest",
    "InvalidRequest",
    "Kind",
    "Lease",
    "LeaseChange",
    "LeaseEnd",
    "LeaseEnded",
    "LeaseExpired",
    "LeaseInterrupt",
    "LeaseNotActive",
    "LeaseRevoked",
    "LeaseStatus",
    "LeasedDevice",
    "Leases",
    "NotFound",
    "Notice",
    "Offer",
    "OutOfMemory",
    "Place",
    "Quarantined",
    "QuotaExceeded",
    "RemoteError",
    "RenewMode",
    "RenewalManager",
    "RenewalPolicy",
    "StaleEpoch",
    "SubletError",
    "Tier",
    "Unauthorized",
    "Unpicklable",
    "Unsupported",
    "Volume",
    "WorkerLost",
    "__version__",
    "aio",
    "connect",
    "current",
    "device",
    "errors",
    "f32",
    "f64",
    "gpu",
    "i32",
    "i64",
    "jobs",
    "replicated",
    "training",
    "u32",
    "u64",
]

_LAZY: Final[dict[str, str]] = {
    "CallTimeout": "sublet.errors",
    "CapacityExceeded": "sublet.errors",
    "Disconnected": "sublet.errors",
    "DroppedLease": "sublet.client.handle",
    "Durable": "sublet.state.checkpoints.durable",
    "EndReason": "sublet.lease_end",
    "Epoch": "sublet.values",
    "Exclusivity": "sublet.values",
    "Fabric": "sublet.client.fabric",
    "GpuError": "sublet.errors",
    "GpuFunction": "sublet.compute.decorator",
    "GpuSession": "sublet.compute.session",
    "GpuSessionEnded": "sublet.errors",
    "Guest": "sublet.client.guests",
    "InvalidRequest": "sublet.errors",
    "Kind": "sublet.values",
    "Lease": "sublet.client.lease",
    "LeaseChange": "sublet.client.model",
    "LeaseEnd": "sublet.lease_end",
    "LeaseEnded": "sublet.errors",
    "LeaseExpired": "sublet.errors",
    "LeaseInterrupt": "sublet.errors",
    "LeaseNotActive": "sublet.errors",
    "LeaseRevoked": "sublet.errors",
    "LeaseStatus": "sublet.lease.states",
    "LeasedDevice": "sublet.client.model",
    "Leases": "sublet.client.many",
    "NotFound": "sublet.errors",
    "Notice": "sublet.client.model",
    "Offer": "sublet.client.model",
    "OutOfMemory": "sublet.errors",
    "Place": "sublet.client.model",
    "Quarantined": "sublet.errors",
    "QuotaExceeded": "sublet.errors",
    "RemoteError": "sublet.errors",
    "RenewMode": "sublet.values",
    "RenewalManager": "sublet.lease.renewal",
    "RenewalPolicy": "sublet.lease.policy",
    "StaleEpoch": "sublet.errors",
    "SubletError": "sublet.errors",
    "Tier": "sublet.values",
    "Unauthorized": "sublet.errors",
    "Unpicklable": "sublet.errors",
    "Unsupported": "sublet.errors",
    "Volume": "sublet.client.volumes",
    "WorkerLost": "sublet.errors",
    "connect": "sublet.client.fabric",
    "current": "sublet.guest.current",
    "device": "sublet.guest.current",
    "f32": "sublet.compute.arguments",
    "f64": "sublet.compute.arguments",
    "gpu": "sublet.compute.decorator",
    "i32": "sublet.compute.arguments",
    "i64": "sublet.compute.arguments",
    "u32": "sublet.compute.arguments",
    "u64": "sublet.compute.arguments",
}
"""Public name → the module that defines it. Each also stands in ``__all__``."""

_LAZY_MODULES: Final[dict[str, str]] = {
    "aio": "sublet.aio",
    "errors": "sublet.errors",
    "jobs": "sublet.jobs",
    "replicated": "sublet.replicated",
    "training": "sublet.training",
}
"""Public name → the module it stands for, as in ``sublet.aio``."""


def load_ipython_extension(shell: object) -> None:
    """For ``%load_ext sublet``."""
    from sublet.notebook import warming

    warming.begin()  # before anything else is loaded: it is what takes longest
    from sublet.notebook.magic import load

    print(load(shell))  # noqa: T201 - the one line that says where cells run


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
