"""Encodes an isolation plan for a zygote, whose copy then isolates itself.

A guest that starts plainly has them built by a copy of the supervisor, before the exec. In a copy of a warm interpreter
there is no exec, and nothing of the supervisor's to hide either; so the copy builds them itself, as the first thing it
does, and what the supervisor decided comes with the request for it. ``TASK`` is how the warm interpreter, which knows
nothing of walls, finds ``enter_carried``: it has the module loaded, which behind the walls may be out of sight.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Final

from sublet.node.sandbox import syscalls, system_calls
from sublet.node.sandbox.abilities import SandboxPart
from sublet.node.sandbox.enter import enter
from sublet.node.sandbox.plan import Bind, Ids, SandboxPlan, SandboxPolicy, SandboxProfile, SandboxStep

TASK: Final = f"{__name__}:enter_carried"


with contextlib.suppress(OSError):  # on a machine that is not known no plan asks for it
    system_calls.program(os.uname().machine)  # made once, in the warm interpreter, and not in each of its copies


def to_text(plan: SandboxPlan) -> str:
    """What ``from_text`` makes the same plan of."""
    policy = plan.policy
    return json.dumps(
        {
            "profile": plan.profile.value,
            "steps": [step.value for step in plan.steps],
            "namespaces": sorted(part.value for part in plan.namespaces),
            "ids": plan.ids,
            "policy": {
                "allow_missing": sorted(policy.allow_missing),
                "network": policy.network,
                "tmp_bytes": policy.tmp_bytes,
                "shm_bytes": policy.shm_bytes,
                "home_bytes": policy.home_bytes,
                "files_max": policy.files_max,
                "file_bytes": policy.file_bytes,
                "processes_max": policy.processes_max,
            },
            "binds": plan.binds,
            "covers": plan.covers,
            "home": plan.home,
            "landlock_abi": plan.landlock_abi,
            "landlock_tcp": plan.landlock_tcp,
            "reads": plan.reads,
            "writes": plan.writes,
            "nodes": plan.nodes,
            "processes_max": plan.processes_max,
            "missing": [part.value for part in plan.missing],
        }
    )


def from_text(text: str) -> SandboxPlan:
    """Whole, or not at all: a name that is missing or unknown raises."""
    values: dict[str, Any] = json.loads(text)
    policy = values.pop("policy")
    lists: dict[str, Any] = {name: tuple(values.pop(name)) for name in ("covers", "reads", "writes", "nodes")}
    return SandboxPlan(
        profile=SandboxProfile(values.pop("profile")),
        steps=tuple(map(SandboxStep, values.pop("steps"))),
        namespaces=frozenset(map(SandboxPart, values.pop("namespaces"))),
        ids=None if (ids := values.pop("ids")) is None else Ids(*ids),
        policy=SandboxPolicy(**{**policy, "allow_missing": frozenset(policy["allow_missing"])}),
        binds=tuple(Bind(*bind) for bind in values.pop("binds")),
        missing=tuple(map(SandboxPart, values.pop("missing"))),
        **lists,
        **values,
    )


def enter_carried(text: str, parent: int) -> int:
    """Build them around this process, once; the pid of its parent, as it is seen from inside. See ``enter``."""
    above = enter(from_text(text), parent=parent)
    syscalls.set_dumpable(True)  # as after an exec: what is in this memory is the guest's
    return above
