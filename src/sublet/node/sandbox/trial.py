"""Runs Python code where a guest of a tenant would run: behind as many of the walls as this machine can build.

    python -m sublet.node.sandbox.trial GPU-1b4e28ba-… nvidia0 "print('inside')"

The code is ours: a trial of what such guests are offered. It has one card, with these device files of its own, and sees
what such a guest sees; no folder of an office.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from sublet.errors import Unsupported
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.sandbox.abilities import SandboxPart
from sublet.node.sandbox.plan import Ids, SandboxPolicy
from sublet.node.sandbox.walls import SandboxRoom, Walls
from sublet.values import Epoch, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.cards import card_environment
from sublet.wire.guests import GuestSpec
from sublet.wire.orders import Part

UNPRIVILEGED: Final = 65_534
HOME: Final = "/tmp/trial"
NOWHERE: Final = "/tmp/trial-office"
"""In the place of an office's folders, which are hidden from guests."""
TENANT: Final = TenantId("trial")
PYTHONPATH: Final = "PYTHONPATH"
ANYTHING_LESS: Final = frozenset(part.value for part in SandboxPart)
"""Whether guests may do without a part is decided where they are started; one that may not is refused there."""


class _TrialWalls(Walls):
    """Of a tenant that has no user number of its own, since it has no office."""

    def ids(self, tenant: TenantId) -> Ids | None:
        return Ids(UNPRIVILEGED, UNPRIVILEGED)


class _TrialLease(LeaseRuntime):
    """A lease of one card, which leaves nothing on the disk."""

    def make_home(self, ids: Ids | None) -> tuple[str, str]:
        return HOME, ""


def room_with(card: str, nodes: Sequence[str]) -> SandboxRoom:
    """The room of a guest with this card, which has these device files. Raises ``Unsupported``."""
    resource = ResourceId(f"trial/{card}")
    walls = _TrialWalls(runtime=NOWHERE, state=NOWHERE, policy=SandboxPolicy(allow_missing=ANYTHING_LESS))
    walls.card_nodes = {resource: tuple(nodes)}
    lease = _TrialLease(
        lease=LeaseId("trial"),
        tenant=TENANT,
        epoch=Epoch(1, 1),
        parts=(Part(resource=resource, kind=Kind.GPU, amount=1),),
        deadline_ns=0,
        office="trial",
    )
    lease.folder = HOME
    spec = walls.with_driver(GuestSpec(entry=f"{__name__}:main"), lease)
    room = walls.behind(TENANT).room(lease, spec, counted=False)
    room.env.update(card_environment({card: 1}, room.env))
    if PYTHONPATH in os.environ:  # where our own modules may lie, which the code may use
        room.env[PYTHONPATH] = os.environ[PYTHONPATH]
    return room


def main(arguments: Sequence[str]) -> NoReturn:
    """The program: a card, its device files, what to run, and its arguments. It becomes that; where such a guest could
    not be started, it says why, and its status is 1."""
    card, nodes, code, *words = arguments
    try:
        room = room_with(card, nodes.split(","))
    except Unsupported as error:
        sys.stdout.write(f"{error.message}\n")
        sys.exit(1)
    room.enter(os.getppid())
    os.chdir(room.cwd)
    os.execve(sys.executable, (sys.executable, "-c", code, *words), room.env)


if __name__ == "__main__":
    main(sys.argv[1:])
