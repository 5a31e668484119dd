"""A replica in a folder of a local disk: a log of records, and packs beside it.

Several processes may use one folder at once; each carries its requests out under the folder's lock. Requests that
arrive together share one write and one sync.

A folder has::

    log            the records (docs/replicated.md); one file, made anew when it is full
    lock           held while a process reads or writes
    packs/K/NAME   what is too large for a record, K being a hash of the key
"""

from __future__ import annotations

import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.state.replicated.ballot import Garbled, WriteStamp
from sublet.state.replicated.cell import Accept as AcceptRequest
from sublet.state.replicated.cell import Answer, Install, Installed, Prepare, Query, ReplicaCell, Request, answer
from sublet.state.replicated.files import RealFiles, refuse_network
from sublet.state.replicated.folder_format import Header, entries
from sublet.state.replicated.folder_log import LOG, FolderLog
from sublet.state.replicated.quorum import ReplicaSet
from sublet.state.replicated.replica import FailureDomain, ReplicaFull, ReplicaSilent, folder_of, seal, unseal

LOG_BYTES: Final = 1 << 20
"""What a log takes on the disk from the first moment on."""
PACKS: Final = "packs"


@dataclass(frozen=True, slots=True)
class StartedRequests:
    """Requests that were answered, and whether a sync must come before the answers may be given."""

    replies: list[Answer]
    unsettled: bool


class FolderReplica:
    """A replica on a local disk. It is made when the folder has none."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        domain: FailureDomain | None = None,
        log_bytes: int = LOG_BYTES,
        files: RealFiles | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.domain = domain if domain is not None else FailureDomain()
        self._files = RealFiles() if files is None else files
        self._thread_lock = threading.Lock()
        self._synced_packs: set[tuple[str, str]] = set()
        """(key, pack) pairs whose names this process knows to be on the disk."""
        try:
            self._files.make_folder(self.folder)
            if files is None:
                refuse_network(self.folder)
            self._log = FolderLog(self.folder, self._files, -(-max(log_bytes, 1 << 14) // 512) * 512)
        except OSError as error:
            raise InvalidRequest(
                f"the folder {self.folder} cannot hold a replica ({error.strerror})",
                do="Give a folder of your own on a local disk with room.",
            ) from error
        try:
            with self._mapped():
                is_known = self._log.exists()
            if not is_known:
                self._log.make(os.urandom(16).hex(), os.urandom(4), time.time_ns())
            self.identity = self._log.peek()
        except BaseException:
            self._log.close()
            raise
        if files is None:  # as an unreferenced open file is closed
            weakref.finalize(self, self._log.close).atexit = False

    def who_else_writes(self) -> str:
        """Its owner, if that is another user, or any user."""
        try:
            found = os.stat(self.folder)
        except OSError:  # it is gone, and nothing is read there
            return ""
        is_ours = found.st_uid in (0, os.geteuid()) and not found.st_mode & stat.S_IWOTH
        return "" if is_ours else f"the folder {self.folder}"

    # ---- what the protocol asks ----

    def ask(self, requests: Sequence[tuple[str, Request]]) -> list[Answer]:
        """Carry these out; one write and one sync for all of them."""
        with self._thread_lock:
            log = self._log
            log.take()
            try:
                replies = self._ask(log, requests)
            except OSError as error:
                raise self._unable(error) from error
            finally:
                log.unlock()
            log.make_durable()
            return replies

    def begin(self, requests: Sequence[tuple[str, Request]]) -> StartedRequests | None:
        """As much of ``ask`` as takes no time: all but the sync. None if it would have to wait for another process.

        A ``StartedRequests`` holds the replica until ``finish`` is called with it, perhaps in another thread.
        """
        if not self._thread_lock.acquire(blocking=False):
            return None
        started: StartedRequests | None = None
        try:
            if self._log.take(wait=False):
                try:
                    started = self._started(requests)
                finally:
                    self._log.unlock()
        except OSError as error:
            raise self._unable(error) from error
        finally:
            if started is None or not started.unsettled:
                self._thread_lock.release()
        return started

    def _started(self, requests: Sequence[tuple[str, Request]]) -> StartedRequests | None:
        replies, changed, known = self._answers(requests)
        if changed or known is not None:
            planned = self._log.plan(changed, known)
            if not self._log.fits(planned):
                return None
            self._log.write(planned)
        return StartedRequests(replies, self._log.dirty)

    def finish(self, started: StartedRequests) -> list[Answer]:
        """The rest of it. Only for a ``StartedRequests`` that is unsettled, and once.

        The folder's lock was given back before: a program that is stopped during its sync keeps no other waiting.
        """
        try:
            self._log.make_durable()
        except OSError as error:
            raise self._unable(error) from error
        finally:
            self._thread_lock.release()
        return started.replies

    def _ask(self, log: FolderLog, requests: Sequence[tuple[str, Request]]) -> list[Answer]:
        replies, changed, known = self._answers(requests)
        if changed or known is not None:
            log.append(changed, known)
        return replies

    def _answers(
        self, requests: Sequence[tuple[str, Request]]
    ) -> tuple[list[Answer], dict[str, ReplicaCell], ReplicaSet | None]:
        """What is said, what cells become, and the set if there is a new one. Nothing is changed yet."""
        log = self._log
        known, changed, replies = log.known, dict[str, ReplicaCell](), list[Answer]()
        for key, request in requests:
            inner: Prepare | AcceptRequest | Query | None
            if isinstance(request, Install):
                if known is None or request.replicas.generation > known.generation:
                    known = request.replicas
                inner = request.then
            else:
                inner = request
            if inner is None:
                replies.append(Installed())
                continue
            before = changed[key] if key in changed else log.cell(key)
            after, reply = answer(before, known, inner, self._missing(key, before, inner))
            replies.append(reply)
            if after is not before:
                changed[key] = after
        return replies, changed, known if known is not log.known else None

    def known(self) -> ReplicaSet | None:
        """The latest set that was installed."""
        with self._held() as log:
            return log.known

    def keys(self) -> list[str]:
        """Every key of which there is a record."""
        with self._held() as log:
            return sorted(log.cells)

    # ---- packs ----

    def put_pack(self, key: str, name: str, data: bytes) -> None:
        """Written whole under another name, then named, then the name made durable."""
        files, place = self._files, self._place(key)
        temporary = place / f".{os.urandom(8).hex()}"
        with self._mapped():
            files.make_folder(self.folder / PACKS)
            files.make_folder(place)
            try:
                fd = files.open(temporary, fresh=True)
                try:
                    files.write(fd, seal(data), 0)
                    files.sync(fd)
                finally:
                    files.close(fd)
                files.rename(temporary, place / name)
            except OSError:
                files.remove(temporary)
                raise
            files.sync_folder(place)
        self._synced_packs.add((key, name))

    def read_pack(self, key: str, name: str) -> bytes | None:
        """The bytes, checked; None if there is no such pack or it is damaged."""
        with self._mapped():
            try:
                fd = self._files.open(self._place(key) / name)
            except FileNotFoundError:
                return None
            try:
                return unseal(self._files.read(fd, self._files.size(fd), 0))
            except Garbled:
                return None
            finally:
                self._files.close(fd)

    def packs(self, key: str) -> list[str]:
        """The names there are."""
        with self._mapped():
            return [name for name in self._files.names(self._place(key)) if not name.startswith(".")]

    def sweep(self, key: str, stamp: WriteStamp, names: Sequence[str]) -> int:
        """Remove these packs if the last write that was taken is this one and does not name them."""
        with self._held() as log, self._mapped():
            accepted = log.cell(key).accepted
            if accepted is None or accepted.stamp != stamp:
                return 0
            gone = [name for name in names if name not in accepted.packs]
            for name in gone:
                self._files.remove(self._place(key) / name)
                self._synced_packs.discard((key, name))
            return len(gone)

    # ---- looking after it ----

    def verify(self) -> list[str]:
        """Read everything and say what is damaged."""
        found = []
        try:
            with self._held() as log:
                fd = self._files.open(self.folder / LOG)
                try:
                    data = self._files.read(fd, self._files.size(fd), 0)
                finally:
                    self._files.close(fd)
                entries(data, Header.unpack(data[:512]))
                named = {
                    (key, pack) for key, cell in log.cells.items() if cell.accepted for pack in cell.accepted.packs
                }
        except Garbled as error:
            return [f"{self.folder / LOG}: {error}"]
        except ReplicaSilent as error:
            return [error.message]
        for key, pack in sorted(named):
            if self.read_pack(key, pack) is None:
                found.append(f"{key}: the pack {pack} is missing or damaged")
        return found

    def close(self) -> None:
        """Harmless twice."""
        with self._thread_lock:
            self._log.close()

    def __repr__(self) -> str:
        return f"<FolderReplica {self.identity[:8]} in {self.folder}>"

    # ---- inside ----

    @contextmanager
    def _held(self) -> Iterator[FolderLog]:
        with self._thread_lock, self._mapped():
            self._log.take()
            try:
                self._log.make_durable()
                yield self._log
            finally:
                self._log.unlock()

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._unable(error) from error

    def _unable(self, error: OSError) -> ReplicaFull:
        return ReplicaFull(
            f"the replica in {self.folder} could not do its work ({error.strerror})",
            do="See to its disk; the other replicas go on without it.",
        )

    def _missing(self, key: str, before: ReplicaCell, request: Request) -> tuple[str, ...]:
        if not isinstance(request, AcceptRequest) or not request.accepted.packs:
            return ()
        named = before.accepted.packs if before.accepted is not None else ()
        new = [name for name in request.accepted.packs if name not in named and (key, name) not in self._synced_packs]
        if not new:
            return ()
        present = set(self._files.names(self._place(key)))
        missing = tuple(name for name in new if name not in present)
        if not missing:
            # A name that another process gave may not be on the disk yet.
            self._files.sync_folder(self._place(key))
            self._synced_packs.update((key, name) for name in new)
        return missing

    def _place(self, key: str) -> Path:
        return self.folder / PACKS / folder_of(key)
