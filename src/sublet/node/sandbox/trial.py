"""Runs Python code where a guest of a tenant would run: behind as many of the walls as this machine can build.

    python -m sublet.node.sandbox.trial /dev/nvidiactl,/dev/nvidia-uvm,/dev/nvidia0 "print('inside')"

The code is ours: a trial of what such guests are offered. It sees the device files that are named, and no folder of the
office.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from sublet.node.sandbox.abilities import SandboxPart
from sublet.node.sandbox.enter import enter
from sublet.node.sandbox.plan import Ids, SandboxPlan, SandboxPolicy, SandboxProfile, SandboxRefusal, Wish, plan
from sublet.node.sandbox.probe import probe_abilities
from sublet.node.sandbox.walls import LIBRARY_PATH, PACKAGE, driver_folder

UNPRIVILEGED: Final = 65_534
HOME: Final = "/tmp/trial"
ANYTHING_LESS: Final = frozenset(part.value for part in SandboxPart)
"""Whether guests may do without a part is decided where they are started; one that may not is refused there."""


def plan_for(nodes: Sequence[str]) -> SandboxPlan:
    """The steps for such a process. Raises ``Unsupported``."""
    folder = driver_folder(os.environ.get(LIBRARY_PATH, ""), ())
    wish = Wish(
        folder=HOME,
        tenant="trial",
        ids=Ids(UNPRIVILEGED, UNPRIVILEGED),
        readable=(sys.prefix, sys.base_prefix, PACKAGE, *filter(None, (folder,))),
        devices=tuple(nodes),
    )
    found = plan(SandboxProfile.TENANT, probe_abilities(), wish, SandboxPolicy(allow_missing=ANYTHING_LESS))
    if isinstance(found, SandboxRefusal):
        raise found.error()
    return found


def main(arguments: Sequence[str]) -> NoReturn:
    """The program: device files, and what to run. ``Unsupported`` where the walls cannot be planned."""
    nodes, code = arguments
    enter(plan_for(nodes.split(",")), parent=os.getppid())
    os.execv(sys.executable, (sys.executable, "-c", code))


if __name__ == "__main__":
    main(sys.argv[1:])
