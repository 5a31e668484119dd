"""A person whose programs send what no honest program sends: bytes that are no message, and messages with hostile text.

They go through what the studio and the office read messages with. While one is handled nothing of it may be executed:
the interpreter's own audit events tell of code that is compiled, unpickled or given to a shell.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from sublet.errors import SubletError
from sublet.office.access import Caller
from sublet.office.api.app import read_message
from sublet.office.api.from_wire import acquire_command
from sublet.studio.api import Ask, StartBody
from sublet.studio.records import Entry
from sublet.values import GIB, LeaseId
from sublet.wire.http import AcquireRequest
from tests.simulation.people import Notebook

if TYPE_CHECKING:
    from tests.simulation.office import OfficeProcess

_S: Final = 1_000_000_000
MARK: Final = "hostile_bytes"
EVENTS: Final = frozenset(
    {"pickle.find_class", "compile", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen"}
)
MESSAGE_MAX: Final = 2_000
"""Characters of what is said of a message that was refused."""
TEXTS: Final = (
    f"$(touch {MARK})",
    f"; {MARK} `{MARK}` | sh",
    f"__import__('os').system('{MARK}')",
    f"{{0.__class__.__init__.__globals__}} {MARK} %s %n",
    f"../../{MARK}",
    f"\0{MARK}",
    f"\ud800 {MARK}",
    MARK * 20_000,
)
VALUES: Final[tuple[object, ...]] = (*TEXTS, -1, 0, True, None, 1e308, 2**70, [], {}, [MARK], {MARK: {MARK: MARK}})


class _Executes:
    """Unpickled, it would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"{MARK} = 1",)


class _Events:
    """What the interpreter says while a message is handled. A hook cannot be taken out again, so there is one."""

    def __init__(self) -> None:
        self.found: list[str] | None = None
        self._is_hooked = False

    @contextlib.contextmanager
    def heard(self, found: list[str]) -> Iterator[None]:
        """Those of code that came with the message are found."""
        if not self._is_hooked:
            sys.addaudithook(self._hear)
            self._is_hooked = True
        self.found = found
        try:
            yield
        finally:
            self.found = None

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.found is not None and event in EVENTS and (event == "pickle.find_class" or MARK in repr(arguments)):
            self.found.append(f"{event} {repr(arguments)[:100]}")


EXECUTED: Final = _Events()


class Forger(Notebook):
    """Each turn a message of another kind, to studio or office, in each way in which a message can be wrong."""

    def turn(self) -> None:
        chance = self.world.random
        number = self.world.new_number()
        draw = chance.randrange(3)
        if draw == 0:
            raw = self._spoilt(self._acquire(number))
            reply = self.call(lambda office, answer: self._asked_of_office(office, answer, raw))
            if reply is not None and reply.kind == "error":
                self.world.people_rules.told(self, reply.error, _text(raw))
            return
        fields = {"name": f"forged-{number}", "vram": 4 * GIB, "ttl": 30, "later": True}
        raw = self._spoilt(fields if draw == 1 else self._entry(number))
        ask = self._start if draw == 1 else self._add
        self._handled(raw, lambda: ask(Ask("", {}, raw, None)), lambda: len(self.person.store.entries))

    def _entry(self, number: int) -> dict[str, object]:
        found = self.sessions.all()
        session = found[number % len(found)].id if found else f"s-{number:012x}"
        return {
            "seq": len(self.person.store.entries) + 1,
            "session": session,
            "at_ns": 1,
            "record": {"type": "ran", "cell": {"cell": 1, "lease": "x", "at_ns": 1, "held_s": 1.0, "busy_s": 1.0,
                                               "vram_byte_s": 1.0}},
        }  # fmt: skip

    def _acquire(self, number: int) -> dict[str, object]:
        return {
            "request_id": f"{self.name}-{self.boot}-{number}",
            "wants": [{"kind": "gpu", "amount": GIB}],
            "ttl": 10,
            "wait": 0,
            "name": f"forged-{number}",
            "labels": {"a": "b"},
            "holder": "a forger",
        }

    def _spoilt(self, message: dict[str, Any]) -> bytes:
        """In one of the ways."""
        chance = self.world.random
        way = chance.randrange(8)
        self.world.coverage.seen[f"message spoilt, way {way}"] += 1
        raw = json.dumps(message).encode()
        match way:
            case 0:
                return raw[: chance.randrange(len(raw))]
            case 1:
                at = chance.randrange(len(raw))
                return raw[:at] + bytes([raw[at] ^ (1 << chance.randrange(8))]) + raw[at + 1 :]
            case 2:
                return pickle.dumps(_Executes())
            case 3:
                return b"[" * 50_000 + b"]" * 50_000
            case 4:
                return json.dumps({**message, MARK: chance.choice(VALUES)}).encode()
            case 5:
                return b'{"name": ' + b"9" * 5_000 + b"}"
            case _:
                return json.dumps({**message, chance.choice(list(message)): chance.choice(VALUES)}).encode()

    # ---- in the studio, and in the office

    def _start(self, ask: Ask) -> None:
        body = ask.read(StartBody)
        self.person.started.add(self.sessions.start(body.name, body.terms()).id)

    def _add(self, ask: Ask) -> None:
        self.sessions.add(ask.read(Entry))

    def _asked_of_office(self, office: OfficeProcess, answer: Callable[[object], None], raw: bytes) -> None:
        assert office.ledger is not None
        ledger = office.ledger

        def asked() -> None:
            request: AcquireRequest = read_message(AcquireRequest, raw)
            lease = LeaseId(f"{self.name}.{self.boot}.f{self.world.new_number()}")
            command = acquire_command(request, Caller(self.tenant, False), lease, ledger.policy)
            office.submit(command, lambda reply: None if reply.kind == "unknown" else answer(reply))

        if not self._handled(raw, asked, lambda: len(ledger.state.leases)):
            answer(None)

    def _handled(self, raw: bytes, act: Callable[[], None], count: Callable[[], int]) -> bool:
        """Whether the message was taken. What is refused is refused in words of a bounded length, and leaves nothing
        behind."""
        rules, before, executed = self.world.people_rules, count(), list[str]()
        try:
            with EXECUTED.heard(executed):
                act()
        except SubletError as error:
            self.world.coverage.seen["message refused"] += 1
            rules.told(self, error, _text(raw))
            if len(error.message) + len(error.do) > MESSAGE_MAX:
                rules.fail("N12", f"{self.name} was told {len(error.message)} characters: {error.message[:80]!r}")
            if count() != before:
                rules.fail("N12", f"a message of {self.name} was refused, and left something")
            return False
        except AssertionError:
            raise
        except Exception as error:
            rules.fail("N12", f"a message of {self.name} came to {type(error).__name__}: {error}"[:300])
        finally:
            if executed:
                rules.fail("N13", f"of a message of {self.name} was executed: {executed[0]}")
        self.world.coverage.seen["message taken"] += 1
        return True

    def pause_ns(self) -> int:
        return _S


def _text(raw: bytes) -> str:
    """What of a message can come back in a refusal."""
    return raw.decode("utf-8", "replace")
