"""Starts an office in stages: supervisor and journal first, before the rest is imported.

The supervisor takes as long to come up as the office, so both do it at once; and the program that started the office
may have wished for a warm interpreter (``Warm``), which takes longer than anything else and is begun by the supervisor
as its first act. Whose supervisor it is the journal knows, which also says whether we may run at all: if not, the
supervisor has done nothing yet, and ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sublet import __version__
from sublet.client.home import make_private_dir, runtime_dir
from sublet.clock import Clock
from sublet.lazy_dataclass import dataclass
from sublet.node.agent.starting import FindOrStart, package_folder
from sublet.wire.program_files import check_program
from sublet.wire.settings import SupervisorSettings

if TYPE_CHECKING:
    from sublet.office.journal.disk_room import DiskRoom
    from sublet.office.journal.journal import Journal


@dataclass(frozen=True, slots=True)
class Beginning:
    """What there is before the rest."""

    journal: Journal
    room: DiskRoom
    """On the journal's disk."""
    supervisor: FindOrStart | None
    """None: the office does without."""


@contextlib.contextmanager
def begun(home: Path, clock: Clock, *, supervised: bool = True) -> Iterator[Beginning]:
    """For as long as the office lives. If it does not come to that, nothing is left of it."""
    check_program()
    make_private_dir(home)
    make_private_dir(runtime_dir(home))
    with contextlib.ExitStack() as stack:
        from sublet.office.journal.disk_room import DiskRoom

        room = DiskRoom(home, now_ns=clock.now_ns)
        room.before_opening()  # a supervisor needs some, too
        supervisor = _supervisor(home) if supervised else None
        if supervisor is not None:
            stack.callback(supervisor.abandon)
            with contextlib.suppress(OSError):  # what is wrong with the folder is said by the journal
                supervisor.begin()
        from sublet.office.journal.journal import Journal  # meanwhile

        journal = stack.enter_context(Journal.open(home, wall_ns=clock.wall_ns(), room=room))
        if supervisor is not None:
            supervisor.whose(journal.id)
        yield Beginning(journal, room, supervisor)


def _supervisor(home: Path) -> FindOrStart:
    runtime = str(runtime_dir(home))
    return FindOrStart(
        SupervisorSettings(office="", runtime=runtime, state=str(home), package=package_folder(), version=__version__)
    )
