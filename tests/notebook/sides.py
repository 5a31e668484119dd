"""Two namespaces in two processes, as a notebook and its kernel on the device are; without either of the two."""

from __future__ import annotations

import contextlib
import gc
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sublet.errors import SubletError
from sublet.notebook import groups, guest_side
from sublet.notebook.lookups import possible_lookups
from sublet.notebook.namespace import NamesEncoder, Steady
from sublet.notebook.namespace_sync import BESIDE, NOTEBOOK, Outgoing, Space
from sublet.notebook.reading import read_cell
from sublet.state.transfer.codec import Encoding
from tests.notebook.module_digest import digest


class Other:
    """The other side: a process that runs cells."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.notebook.sides import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, what: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps((what, args), 5, buffer_callback=buffers.append)
        pickle.dump((head, [bytearray(one.raw()) for one in buffers]), self._process.stdin, 5)
        buffers.clear()  # in a traceback, Python's garbage collector crashes on them
        self._process.stdin.flush()
        ok, answer = pickle.load(self._process.stdout)  # noqa: S301
        if not ok:
            raise answer
        return answer

    @contextlib.contextmanager
    def hashing_columns_up_to(self, nbytes: int) -> Iterator[None]:
        """Larger columns of text are told by their address meanwhile, there and here."""
        before, there = groups.ARROW_MAX, self.ask("hash columns up to", nbytes)
        groups.ARROW_MAX = nbytes  # type: ignore[misc]
        try:
            yield
        finally:
            groups.ARROW_MAX = before  # type: ignore[misc]
            self.ask("hash columns up to", there)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def serve() -> None:
    """In the other process, which loads much that stays, and looks for garbage seldom."""
    gc.set_threshold(20_000, 20, 1_000)
    encoded = note_encoded()
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    while True:
        try:
            head, buffers = pickle.load(sys.stdin.buffer)  # noqa: S301
        except EOFError:
            return
        what, args = pickle.loads(head, buffers=buffers)  # noqa: S301
        try:
            if what == "new":
                main = sys.modules["__main__"] = types.ModuleType("__main__")
                answer: Any = None
            elif what == "encoded":
                answer = encoded.copy()
                encoded.clear()
            elif what == "digest":
                answer = digest()
            elif what == "run":
                answer = run(args[0], vars(main))
            elif what == "hash columns up to":
                answer, groups.ARROW_MAX = groups.ARROW_MAX, args[0]  # type: ignore[misc]
            else:
                answer = getattr(guest_side, what)(*args)
                if isinstance(answer, Outgoing):
                    answer = _copied(answer)
            said: tuple[bool, Any] = (True, answer)
        except SubletError as error:
            said = (False, error)
        except Exception as error:  # whatever it is, whoever asked is told
            said = (False, RuntimeError(f"{type(error).__name__}: {error}"))
        pickle.dump(said, answers, 5)
        answers.flush()


def note_encoded() -> set[str]:
    """Names that are encoded in this process from now on."""
    found: set[str] = set()
    run = Encoding.run

    def noted(self: Encoding, value: Any) -> Any:
        found.update(value if type(value) is dict else ())
        return run(self, value)

    Encoding.run = noted  # type: ignore[method-assign]
    return found


def _copied(found: Outgoing) -> Outgoing:
    found.parcels = [replace(one, buffers=tuple(map(bytearray, one.buffers))) for one in found.parcels]
    return found


def run(source: str, space: dict[str, Any]) -> str | None:
    """The name of what it raised, if it did."""
    try:
        exec(compile(source, "<cell>", "exec", dont_inherit=True), space)  # noqa: S102
    except Exception as error:
        return type(error).__name__
    return None


class Notebook:
    """A notebook's namespace, and cells that run on the other side."""

    def __init__(self, other: Other) -> None:
        self.main = types.ModuleType("__main__")
        self.names = vars(self.main)
        self.space = Space(self.names, NOTEBOOK)
        self._other = other
        self._told = NamesEncoder()
        self._steady = Steady()
        self._staying: set[str] = set()
        other.ask("new")

    @contextlib.contextmanager
    def at_home(self) -> Iterator[None]:
        before = sys.modules["__main__"]
        sys.modules["__main__"] = self.main
        try:
            yield
        finally:
            sys.modules["__main__"] = before

    def here(self, source: str) -> str | None:
        """An ordinary cell."""
        with self.at_home():
            return run(source, self.names)

    def there(self, source: str, only: frozenset[str] | None = None) -> str | None:
        """A cell on the device; a test looks at ``sent`` and ``came`` afterwards."""
        with self.at_home():
            reading = read_cell(source)
            reads = self.space.visible() if reading.opaque else reading.reads
            maybe = frozenset() if reading.opaque else possible_lookups(reading.lookups, reads, self.names)
            self.sent = self.space.outgoing(
                reads, must=True, requested=None if reading.opaque else reading.reads, maybe=maybe
            )
            parcels = self.sent.parcels
            try:
                said = self._told.encode(self.sent.names, self._other)
                deletes = frozenset(self.space.named(reading.deletes) - set(reads))
                handles = {name: name for name in self._staying if reading.opaque or name in reading.reads}
                steady = self._steady.current(self.names)
                rest: tuple[Any, ...] = 0, handles, None, None, self.sent.word, False, deletes, steady
                self._other.ask("place", parcels, self.sent.gone, said, reading.binds, *rest)
            except BaseException:
                self.space.invalidate(self.sent.names)
                self._told.forget()
                raise
            self.space.sent(self.sent)
            self._steady.crossed(self.sent.names, self.names)
            raised: str | None = self._other.ask("run", source)
            self.came: Outgoing = self._other.ask("collect", only)
            self.taken = self.space.take(self.came.parcels, self.came.gone)
            if beside := frozenset(name for name, why in self.taken.broken.items() if why == BESIDE):
                stuck = {name: why for name, why in self.taken.broken.items() if name not in beside}
                more: Outgoing = self._other.ask("again", beside, stuck)
                self.came.stays |= stuck | more.stays | self.space.take(more.parcels).broken
            self.came.stays |= {name: why for name, why in self.taken.broken.items() if name not in beside}
            self._steady.crossed((name for one in self.came.parcels for name in one.names), self.names)
            self._staying = (self._staying | self.came.stays.keys()) - self.names.keys()
            if only is not None:
                self.space.invalidate(self.sent.names - self.came.names)
            return raised
