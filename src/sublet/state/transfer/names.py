"""Names under which functions and classes are pickled: which another process finds, and where those that moved are."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any, Final

MAINS: Final = frozenset(("__main__", "__mp_main__"))
"""Modules that another process does not have under that name: what they define travels by value."""

MOVED: Final[dict[tuple[str, str], str]] = {
    **{
        (f"sublet.replicated.{module}", name): f"sublet.state.replicated.{module}"
        for module, names in (
            ("checkpoint", ("Checkpoint",)),
            ("checkpoint_record", ("Effect", "Save")),
            ("group", ("ReplicaRole", "ReplicaView")),
            ("idempotency_record", ("Completed", "Conflict", "New", "Pending")),
            ("policy", ("Placement", "ReplicaPolicy")),
            ("replica", ("ReplicaHealth",)),
        )
        for name in names
    },
    ("sublet.replicated.policy", "FailureDomain"): "sublet.state.replicated.replica",
    ("sublet.values", "EndReason"): "sublet.lease_end",
    ("sublet.lease.value", "LeaseEnd"): "sublet.lease_end",
    ("sublet.training.law", "Act"): "sublet.training.step_protocol",
    ("sublet.training.telling", "Account"): "sublet.training.progress_events",
}
"""Public classes of which values were saved: the module and name that they were saved under → their module now."""


def found_by_name(value: Any) -> bool:
    """Whether another process finds this very function or class under its module and name."""
    name = getattr(value, "__module__", None)
    if name is None or name in MAINS or _registered_by_value(name):
        return False
    found: Any = sys.modules.get(name)
    if found is None and name.partition(".")[0] in sys.modules:  # its library imports this part when it is asked for
        with contextlib.suppress(Exception):
            found = importlib.import_module(name)
    try:
        for part in value.__qualname__.split("."):
            found = getattr(found, part)
    except AttributeError:
        return False
    return found is value


def _registered_by_value(module: str) -> bool:
    """The program has asked cloudpickle to send this module's functions by value."""
    cloudpickle = sys.modules.get("cloudpickle")
    return cloudpickle is not None and module in cloudpickle.list_registry_pickle_by_value()
