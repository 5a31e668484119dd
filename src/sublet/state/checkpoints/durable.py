"""``Durable[T]``: a value that is saved in the storage of its lease.

    state = sublet.Durable({"step": 0, "weights": weights}, block_lease)
    state.mutate(train_one_step)
    state.checkpoint()
    ...
    state = sublet.Durable.restore(block_lease)

A checkpoint that failed is an error, never a silence: ``checkpoint()`` raises, and a save in the background raises at
the next touch and at ``close``. What was saved before is whole in either case.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Generic, Protocol, TypeVar, cast, runtime_checkable

from sublet.background import start_thread, start_timer
from sublet.clock import Clock, SystemClock
from sublet.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest
from sublet.state.checkpoints.object_groups import encode_roots
from sublet.state.checkpoints.parent import Base
from sublet.state.checkpoints.reader import CheckpointReader
from sublet.state.checkpoints.save_size import needed_bytes
from sublet.state.checkpoints.store import CheckpointStore, FolderStore
from sublet.state.checkpoints.volume import VolumePlace, VolumeStore
from sublet.state.checkpoints.writer import Author, Capture, Saver, SaveReport, Staged
from sublet.state.transfer.memory import Copies
from sublet.values import NS_PER_S, Epoch, LeaseId, parse_duration_ns, shown

T = TypeVar("T")
R = TypeVar("R")

ROOT: Final = "value"
"""The one root that such a checkpoint has."""


@runtime_checkable
class BlockFolder(Protocol):
    """What a block lease is to this room: a folder for as long as (lease, epoch) is live."""

    @property
    def id(self) -> LeaseId: ...

    @property
    def epoch(self) -> Epoch: ...

    @property
    def folder(self) -> str | os.PathLike[str]: ...


Place = CheckpointStore | VolumePlace | BlockFolder | str | os.PathLike[str]


def store_of(place: Place) -> CheckpointStore:
    """A store from a store, from a block lease, or from a folder's path."""
    if isinstance(place, str | os.PathLike):
        return FolderStore(place)
    if hasattr(place, "volume_line"):
        return VolumeStore(cast("VolumePlace", place).volume_line())
    if isinstance(place, BlockFolder) and not hasattr(place, "publish"):
        return FolderStore(place.folder, author=Author(lease=place.id, epoch=place.epoch))
    if hasattr(place, "publish") and hasattr(place, "stage"):
        return cast("CheckpointStore", place)
    raise InvalidRequest(
        f"{shown(place)} cannot hold checkpoints", do="Give a block lease, a folder, or a checkpoint store."
    )


class Durable(Generic[T]):
    """A value and the place where it is saved.

    ``auto_checkpoint`` saves in the background: after so many mutations (an int), or so long after the first mutation
    that is not saved ("30s"). Change the value through ``mutate`` then, which keeps a save and a change apart; what is
    changed behind its back while a save copies may be saved half.
    """

    def __init__(
        self,
        value: T,
        block_lease: Place,
        *,
        schema: str = "",
        auto_checkpoint: int | str | None = None,
        keep: int = 3,
        clock: Clock | None = None,
        _damage: CheckpointDamaged | None = None,
    ) -> None:
        """``schema`` says what the value is, in your words; a checkpoint of another schema is not restored. The newest
        ``keep`` checkpoints stay, older ones are removed."""
        if type(keep) is not int or keep < 1:
            raise InvalidRequest("at least the newest checkpoint is kept", do="Give keep=1 or more.")
        self._keep = keep
        self._value = value
        self._place = block_lease
        self._store = store_of(block_lease)
        self._schema = schema
        self._every, self._after_ns = _auto(auto_checkpoint)
        self._clock: Clock = SystemClock() if clock is None else clock
        self._saver = Saver()
        self._base = self._store.base() if _damage is None else Base()
        self._damage = _damage
        """Of the newest checkpoint, where an older one was restored all the same."""
        self._copies = Copies()
        self._mutations = 0
        """Since the last capture."""
        self._is_new = True
        """It was never looked at, and is not what is saved there."""
        self._dirty_ns: int | None = None
        """When the first of them was."""
        self._turn = threading.RLock()
        """Held while the value is changed or looked at."""
        self._queue = _Queue(self._write)
        self._timer = _Timer(self._due) if self._after_ns is not None else None
        self._closed = False
        self.last: SaveReport | None = None
        """The last checkpoint that is durable, None before the first of this object."""

    @classmethod
    def restore(
        cls,
        block_lease: Place,
        *,
        schema: str = "",
        number: int | None = None,
        auto_checkpoint: int | str | None = None,
        keep: int = 3,
        clock: Clock | None = None,
    ) -> Durable[Any]:
        """The value of the newest checkpoint, or of the one with this number, ready to go on.

        Raises ``NotFound`` where nothing was saved, ``CheckpointDamaged`` where what is there is not what was saved
        (``number=`` then asks for an earlier one by name; that is never done in silence, and the damaged one is not
        saved over), ``InvalidRequest`` where the checkpoint is of another schema. Loads what was saved, so restore only
        what you or your program saved.
        """
        store = store_of(block_lease)
        with store.open(number) as checkpoint:
            _same_schema(checkpoint, schema)
            value = checkpoint.load(ROOT)
        begin = functools.partial(
            cls, value, block_lease, schema=schema, auto_checkpoint=auto_checkpoint, keep=keep, clock=clock
        )
        try:
            found = begin()
        except CheckpointDamaged as damage:
            if number is None:
                raise
            found = begin(_damage=damage)
        found._is_new = False
        return found

    @property
    def value(self) -> T:
        """The value itself. Raises the error of a save in the background that failed."""
        self._touch()
        return self._value

    @value.setter
    def value(self, value: T) -> None:
        self._touch()
        with self._turn:
            self._value = value
            self._mutated()

    def mutate(self, fn: Callable[[T], R]) -> R:
        """``fn(value)`` changes the value in place; what it returns is handed through. While it runs nothing is saved.

        If it raises, what it changed by then stays changed, and counts.
        """
        self._touch()
        with self._turn:
            try:
                return fn(self._value)
            finally:
                self._mutated()

    def checkpoint(self, *, wait: bool = True, note: str = "") -> SaveReport | None:
        """Save. When this returns the checkpoint is durable; with ``wait=False`` the value is only copied, and written
        in the background (if an earlier one is still being written, that is waited for first)."""
        self._touch()
        if not wait:
            with self._turn:
                self._queue.put(lambda: self._captured(copy=True), note)
            return None
        self._queue.drain()
        self._raise_failure()
        with self._turn:
            self._save(self._captured(copy=False), note)
        return self.last

    def flush(self) -> None:
        """Wait until what was begun in the background is durable, or raise why it is not."""
        self._queue.drain()
        self._touch()

    def into_block_lease(self) -> Place:
        """Save what is not saved, close, and hand back what was given as ``block_lease``."""
        self.close()
        return self._place

    def close(self, *, save: bool = True) -> None:
        """Save a value that never was, and what ``mutate`` changed since the last checkpoint; wait for the background,
        and raise what went wrong there. What was changed otherwise needs a ``checkpoint``. Harmless twice."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.stop()
        try:
            self._queue.drain()
            with self._turn:
                if save and (self._mutations or self._is_new):
                    self._save(self._captured(copy=False), "")
                    self._queue.failure = None  # everything is saved by now
            self._raise_failure()
        finally:
            self._queue.stop()

    def __enter__(self) -> Durable[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:  # the error of the body is the news; what was saved by then stays saved
            self.close(save=False)
        except CheckpointFailed as failed:
            error.add_note(f"Besides, {failed}")

    # ---- inside ----

    def _touch(self) -> None:
        if self._closed:
            raise InvalidRequest("this durable value is closed", do="Restore it to go on.")
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure = self._queue.take_failure()
        if failure is not None:
            raise failure

    def _mutated(self) -> None:
        self._mutations += 1
        if self._dirty_ns is None:
            self._dirty_ns = self._clock.now_ns()
            if self._timer is not None and self._after_ns is not None:
                self._timer.start(self._after_ns / NS_PER_S)
        if self._every is not None and self._mutations >= self._every:
            self._queue.put(lambda: self._captured(copy=True), "")

    def _due(self) -> None:
        """Called by the timer's thread."""
        with self._turn:
            if not self._mutations or self._closed:
                return
            try:
                self._queue.put(lambda: self._captured(copy=True), "")
            except Exception as error:  # noqa: BLE001 - raised in the owner's thread, at the next touch
                self._queue.failure = error

    def _captured(self, *, copy: bool) -> Capture:
        began_ns = time.monotonic_ns()
        try:
            groups = encode_roots({ROOT: self._value})
            capture = self._saver.capture(groups, self._base, copy=self._copies if copy else None)
        except (OSError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise
            how = "Save with wait=True, which copies no arrays" if copy else "Free some, or save in smaller parts"
            failed = "there is not enough memory to take the state down; what was saved before is whole"
            raise CheckpointFailed(failed, do=f"{how}.") from error
        capture.took_ns = time.monotonic_ns() - began_ns
        self._mutations, self._dirty_ns, self._is_new = 0, None, False
        return capture

    def _write(self, capture: Capture, note: str) -> None:
        """Called by the queue's thread."""
        try:
            self._save(capture, note)
        finally:
            del capture
            self._copies.reset()

    def _save(self, capture: Capture, note: str) -> None:
        try:
            staged = self._published(capture, note)
        except BaseException:
            self._mutations += 1  # what was captured is not saved after all
            raise
        self._base, self.last = staged.base, staged.report
        self._store.collect(self._keep)

    def _published(self, capture: Capture, note: str) -> Staged:
        if self._damage is not None:
            raise CheckpointFailed(
                f"the newest checkpoint there is damaged ({self._damage.message}), and is not saved over",
                do="Save it in another place: `Durable(state.value, elsewhere)`. Or remove that checkpoint's manifest, "
                "and restore again.",
            ) from self._damage
        room = self._store.room
        needed = needed_bytes(capture, self._base, room)
        with self._store.staging_folder(needed) as staging:
            staged = self._saver.write(
                capture,
                staging=staging,
                base=self._base,
                author=self._store.author,
                wall_ns=self._clock.wall_ns(),
                schema=self._schema,
                note=note,
                spare=room - needed,
            )
            self._store.publish(staged)
        return staged


class _Queue:
    """One save in the background at a time: the next one waits for it."""

    def __init__(self, write: Callable[[Capture, str], None]) -> None:
        self._write = write
        self._change = threading.Condition()
        self._job: tuple[Capture, str] | None = None
        self._busy = False
        self._over = False
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def put(self, capture: Callable[[], Capture], note: str) -> None:
        self.drain()
        job = (capture(), note)
        with self._change:
            if self._thread is None:
                self._thread = start_thread("durable", self._run, again=True)
                atexit.register(self.drain)  # what was begun is finished, also in a program that just ends
            self._job, self._busy = job, True
            self._change.notify_all()

    def drain(self) -> None:
        with self._change:
            self._change.wait_for(lambda: not self._busy)

    def take_failure(self) -> BaseException | None:
        """It is raised once; the next save tells whether it still holds."""
        failure, self.failure = self.failure, None
        return failure

    def stop(self) -> None:
        with self._change:
            self._over = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.drain)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._job is not None or self._over)
                if self._job is None:
                    return
                job, self._job = self._job, None
            failure: BaseException | None = None
            try:
                self._write(*job)
            except BaseException as error:  # noqa: BLE001 - raised in the owner's thread, at the next touch
                failure = error
            del job
            with self._change:
                self.failure = failure or self.failure
                self._busy = False
                self._change.notify_all()


class _Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._timer: threading.Timer | None = None

    def start(self, seconds: float) -> None:
        self._timer = start_timer("durable_timer", seconds, self._call)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()


def _auto(auto_checkpoint: int | str | None) -> tuple[int | None, int | None]:
    if auto_checkpoint is None:
        return None, None
    if isinstance(auto_checkpoint, bool) or not isinstance(auto_checkpoint, int | str):
        raise InvalidRequest(
            f"auto_checkpoint cannot be {auto_checkpoint!r}", do='Give a number of mutations, or a duration ("30s").'
        )
    if isinstance(auto_checkpoint, int):
        if auto_checkpoint < 1:
            raise InvalidRequest("auto_checkpoint needs at least one mutation", do="Give 1 or more.")
        return auto_checkpoint, None
    return None, parse_duration_ns(auto_checkpoint, "auto_checkpoint")


def _same_schema(checkpoint: CheckpointReader, schema: str) -> None:
    found = checkpoint.manifest.schema
    if found != schema:
        raise InvalidRequest(
            f"checkpoint {checkpoint.number} is of schema {found!r}, not {schema!r}",
            do="Restore it with the schema it was saved with, or save under another name.",
        )
