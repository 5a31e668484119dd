"""Runs in a job's kernel between its cells: called by name, answers in JSON.

The variables are saved with the rules of the notebook (``home``): functions and classes live in the namespace they
came from, so two functions that share a counter still do when they are restored. A variable that cannot be saved is
named with the reason, never left out in silence; and beside the variables goes what a program would miss without
asking for it by name: random states and settings (``surroundings``), and which extensions were loaded.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from sublet.client.fabric import connect
from sublet.errors import CheckpointFailed, InvalidRequest, LeaseEnded, NotFound, SubletError, Unpicklable
from sublet.notebook.environment import CellEnvironment
from sublet.notebook.home import HomeRules
from sublet.notebook.namespace import HIDDEN
from sublet.notebook.namespace_sync import NOTEBOOK, Space
from sublet.notebook.ownership import Owner
from sublet.state.checkpoints.durable import store_of
from sublet.state.checkpoints.object_groups import ObjectGroup, encode_roots
from sublet.state.checkpoints.save_size import needed_bytes
from sublet.state.checkpoints.store import CheckpointStore, FolderStore
from sublet.state.checkpoints.writer import Saver

KEEP: Final = 3
"""Checkpoints that stay when another one is about to be written; the newest of them is the one the record names."""
SCHEMA: Final = "notebook"
BESIDE: Final = "\0beside"
"""The name of what is saved beside the variables; no variable can have it."""
PR_SET_PDEATHSIG: Final = 1

_saver: Saver | None = None
_store: CheckpointStore | None = None
_has_saved = False


def begin(folder: str, checkpoint: int, cell_options: str, label: str, parent: int, bound: bool) -> str:
    """Before the first cell of a run: the magics are there, what an earlier run saved is restored. ``folder``: where it
    is saved; empty: in the volume that this guest was given. ``bound``: whether the leases of its cells end with it."""
    global _saver, _store
    if parent:
        _end_with(parent)
    shell = _shell()
    if "GpuMagics" not in shell.magics_manager.registry:
        from sublet.notebook.magic import load

        load(shell)
    magics = shell.magics_manager.registry["GpuMagics"]
    if cell_options or label:
        magics.defaults = cell_options
        magics.cells.labels["job"] = label
        magics.cells.connect = functools.partial(connect, bound=bound)
    _store, _saver = FolderStore(folder) if folder else _own_volume(), Saver()
    if not checkpoint:
        return json.dumps({"restored": 0})
    return json.dumps({"restored": len(_restored(_store, checkpoint))})


def save(note: str) -> str:
    """After a cell: the variables go to disk. Raises if they cannot, and what was saved before is whole then."""
    global _has_saved
    if _store is None or _saver is None:
        raise InvalidRequest("this kernel is not the kernel of a job")
    if _has_saved:  # what this kernel saved last is what the record names by now; before that it may name an older one
        _store.collect(KEEP)
    groups, unsaved = _encoded()
    base = _store.base()
    capture = _saver.capture(groups, base)
    with _store.staging_folder(needed_bytes(capture, base, _store.room)) as staging:
        staged = _saver.write(
            capture,
            staging=staging,
            base=base,
            author=_store.author,
            wall_ns=time.time_ns(),
            schema=SCHEMA,
            note=note,
        )
        _store.publish(staged)
    _has_saved = True
    report = staged.report
    reasons = [f"{name}: {why}" for name, why in sorted(unsaved.items())]
    return json.dumps({"checkpoint": report.number, "bytes": report.written_bytes, "unsaved": reasons})


def why() -> str:
    """What the last cell that failed died of, as far as it is one of ours; else nothing."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, SubletError):
        return json.dumps(None)
    end = error.end if isinstance(error, LeaseEnded) else None
    return json.dumps(
        {
            "kind": error.kind,
            "is_end": isinstance(error, LeaseEnded),
            "reason": "" if end is None else str(end.reason),
            "message": error.message,
            "do": error.do,
            "transient": error.transient,
        }
    )


def bill() -> str:
    """What the cells of this kernel consumed so far."""
    from dataclasses import asdict

    magics = _shell().magics_manager.registry.get("GpuMagics")
    return json.dumps(None if magics is None else asdict(magics.cells.bill))


def give_back() -> str:
    """After the last cell."""
    magics = _shell().magics_manager.registry.get("GpuMagics")
    if magics is not None:
        magics.cells.release()
    return json.dumps(None)


def go_on(folder: str) -> str:
    """For a person: the variables a job ended with, in this notebook; what there is to say about it."""
    from sublet.notebook.batch.jobs import Job

    job = Job(Path(folder))
    record = job.record()
    if not record.checkpoint:
        raise NotFound("the job saved no variables", do="Its first cell was not finished.")
    if os.path.isdir(job.state):
        names = _restored(FolderStore(job.state, create=False), record.checkpoint)
    else:  # a tenant's, run under one lease
        names = _restored_from_volume(job.spec().label, record.checkpoint)
    summary = f"restored {len(names)} variables, as cell {record.done} of the job left them"
    return "\n".join([summary, *(f"not saved: {one}" for one in record.unsaved)])


# ----------------------------------------------------------------------------------------------------------- within


def _encoded() -> tuple[list[ObjectGroup], dict[str, str]]:
    """The variables in groups that share objects, and the names of those that cannot be saved."""
    space = Space(_shell().user_ns, NOTEBOOK)
    left = {name: space.names[name] for name in space.visible()}
    left[BESIDE] = _beside()
    try:
        return encode_roots(left, rules=HomeRules()), {}
    except Unpicklable:
        unsaved = _refused(left)
    good = {name: value for name, value in left.items() if name not in unsaved}
    return encode_roots(good, rules=HomeRules()), unsaved


def _refused(values: Mapping[str, object]) -> dict[str, str]:
    """Each by itself: some must be among those that cannot."""
    found = {}
    for name, value in values.items():
        try:
            encode_roots({name: value}, rules=HomeRules())
        except Unpicklable as error:
            found[name] = error.what or error.message
    return found


def _own_volume() -> CheckpointStore:
    import sublet

    return store_of(sublet.current().volume)


def _restored(store: CheckpointStore, number: int) -> list[str]:
    names = _shell().user_ns
    with store.open(number) as checkpoint:
        values = checkpoint.load_all()
    beside = values.pop(BESIDE, None)
    names.update(values)
    if beside is not None:
        _put_beside(beside)
    return sorted(name for name in values if name not in HIDDEN)


def _restored_from_volume(name: str, number: int) -> list[str]:
    owner = Owner({}, {})
    owner.rename(name)
    with connect() as fabric:
        fabric.volume(name)  # it may be gone, and none is to be made
        volume = owner.take(fabric)
        if volume is None or not volume.name:
            raise CheckpointFailed(
                f"what the job saved cannot be read: {owner.trouble or f'another program has the volume {name}'}",
                do="`sublet volume ls` shows who has it.",
            )
        try:
            return _restored(volume.store, number)
        finally:
            owner.release_volume()


def _beside() -> dict[str, Any]:
    return {"surroundings": _surroundings().whole(), "extensions": sorted(_shell().extension_manager.loaded)}


def _put_beside(beside: Mapping[str, Any]) -> None:
    shell, around = _shell(), _surroundings()
    for name in _strings(beside["extensions"]):
        if name not in shell.extension_manager.loaded:
            shell.extension_manager.load_extension(name)
    around.restore(beside["surroundings"])
    problems = around.problems()
    problems.pop("working folder", None)  # that of a tenant's job went with its lease
    for what, why in problems.items():
        print(f"sublet: {what} could not be restored: {why}", file=sys.stderr)  # noqa: T201


def _surroundings() -> CellEnvironment:
    """Those that ``%%gpu`` keeps as well; or, where that is not loaded, of this moment."""
    magics = _shell().magics_manager.registry.get("GpuMagics")
    if magics is None:
        return CellEnvironment(is_notebook=True)
    found: CellEnvironment = magics.cells.surroundings
    return found


def _strings(values: Iterable[Any]) -> list[str]:
    return [one for one in values if isinstance(one, str)]


def _end_with(parent: int) -> None:
    """A cell does not run on when the runner that would keep its results is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it went before that held
        os.kill(os.getpid(), signal.SIGKILL)


def _shell() -> Any:
    shell = sys.modules["IPython"].get_ipython()
    if shell is None:
        raise InvalidRequest("there is no notebook here", do="Call it in a cell.")
    return shell
