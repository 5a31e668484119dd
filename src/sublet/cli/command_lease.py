"""The lease of one command: acquired, renewed while the command runs, released when it ends.

What happens nearly always (it is granted at once, and the command is short) takes three small requests on one
connection. For everything else, which is waiting in the queue, an office that does not answer, and renewal, the
client's own programs are loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from sublet.cli.direct_request import Direct
from sublet.cli.exit_status import raised_by_signals
from sublet.cli.show import visible
from sublet.errors import CapacityExceeded, Disconnected, SubletError

if TYPE_CHECKING:
    import threading

    from sublet.cli.progress_line import LiveLine
    from sublet.client.lease import Lease
    from sublet.client.model import Place
    from sublet.client.operations import Hooks

SAY_WAITING_AFTER_S: Final = 1.0
"""Away from a terminal, a shorter wait is not worth a line."""
UNAVAILABLE: Final = 503
RETURN_PATIENCE_S: Final = 3.0
"""How long it is tried to give a lease back. What could not be given back ends by its time to live."""


class CommandLease:
    """A lease that this command holds."""

    def __init__(self, direct: Direct, answer: bytes, sent_ns: int, token: str, renew: str) -> None:
        view: dict[str, Any] = json.loads(answer)["lease"]
        self.id = str(view["id"])
        self.tenant = str(view["tenant"])
        self.is_on_host = any(part["kind"] == "gpu" and part["host"] for part in view["parts"])
        """A host device stands in for a GPU."""
        self.token = token
        self.is_lost = False
        """Another program holds it now, so it is not ours to give back."""
        self.is_silent = False
        """The office did not answer when it was given back."""
        self.end: dict[str, Any] | None = None
        """How it ended, if that was before it was given back."""
        self.direct = direct
        self._answer = answer
        self._sent_ns = sent_ns
        self._renew = renew
        self._since_ns = boottime_ns()
        self._kept: Lease | None = None
        self._keeping: threading.Thread | None = None
        self._is_returned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        self.try_release()

    def keep(self) -> None:
        """The command runs on: from now on it is renewed. What does that is loaded beside the command's output."""
        if self._renew != "never" and not self._is_returned:
            from sublet.background import start_thread

            self._keeping = start_thread("keep", self._keep)

    def _keep(self) -> None:
        from sublet.client.fabric import keep_acquired

        self._kept = keep_acquired(self._answer, sent_ns=self._sent_ns, busy_since_ns=self._since_ns, renew=self._renew)

    def try_release(self) -> None:
        """Release it, once. What cannot be given back now ends by its time to live."""
        if self._is_returned:
            return
        self._is_returned = True
        if self._keeping is not None:
            self._keeping.join()
        try:
            busy_s = self._stop_renewal()
            if not self.is_lost:
                self.end = self._released(busy_s)
        except SubletError:
            self.is_silent = True
        finally:
            self.direct.close()

    def _stop_renewal(self) -> float:
        if self._kept is None:
            return (boottime_ns() - self._since_ns) / 1e9
        from sublet.client.fabric import stop_keeping

        return stop_keeping(self._kept)

    def _released(self, busy_s: float) -> dict[str, Any] | None:
        request_id = f"cli-{os.urandom(12).hex()}"
        try:
            body = {"request_id": request_id, "busy": busy_s}
            view = self.direct.ask("POST", f"/v1/leases/{self.id}/release", body)
        except Disconnected:
            view = self._release_patiently(request_id, busy_s)
        end: dict[str, Any] | None = view.get("end")
        return None if end is None or end["reason"] == "released" else end

    def _release_patiently(self, request_id: str, busy_s: float) -> dict[str, Any]:
        from msgspec import to_builtins

        from sublet.cli.call import CommandOffice
        from sublet.client.home import was_ended
        from sublet.client.operations import OfficeOperations
        from sublet.clock import SystemClock
        from sublet.values import LeaseId

        office = CommandOffice.reach(start=False)
        program = OfficeOperations(SystemClock(), partial(was_ended, office.address.home)).release(
            LeaseId(self.id), request_id=request_id, busy_s=busy_s, patience_s=RETURN_PATIENCE_S
        )
        view = office.run(program)
        found: dict[str, Any] = {} if view is None else to_builtins(view)
        return found


def take(request: dict[str, Any]) -> CommandLease:
    """Ask, and wait in line if need be. Raises ``CapacityExceeded`` or ``QuotaExceeded`` if it is not granted."""
    direct = Direct.reach()
    try:
        direct.send("POST", "/v1/leases", {**request, "token": True})
        import sublet.cli.attach  # noqa: F401 - soon needed, and the office has something to do meanwhile

        status, answer = direct.answer()
    except Disconnected:
        return _take_patiently(direct, request)
    except KeyboardInterrupt:
        _withdraw(direct, request)
        raise
    if status == UNAVAILABLE:
        _report_unavailable(direct, answer, waits=request["wait"] != 0)
    document = direct.read(status, answer) if status == 201 else None
    if document is None or document["lease"]["status"] not in ("active", "noticed") or not document["token"]:
        return _take_patiently(direct, request)
    return CommandLease(direct, answer, direct.sent_ns, document["token"], request["renew"])


def _report_unavailable(direct: Direct, answer: bytes, *, waits: bool) -> None:
    """It answers, and grants nothing for now: it is closing, say. A waiting user is told the reason, once."""
    try:
        direct.read(UNAVAILABLE, answer)
    except Disconnected as error:
        if not waits:
            raise CapacityExceeded(error.message, do=error.do) from error
        sys.stderr.write(f"sublet: {visible(error.message)}; asking again until it does\n")


def token_of(direct: Direct, lease: str) -> str:
    """A capability token of a lease of ours that lives."""
    from urllib.parse import quote

    return str(direct.ask("GET", f"/v1/leases/{quote(lease, safe='')}/token")["token"])


def boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _withdraw(direct: Direct, request: dict[str, Any]) -> None:
    """The request may have arrived: the same id tells which lease it became, and that is given back."""
    with contextlib.suppress(SubletError, KeyError):
        lease = direct.ask("POST", "/v1/leases", {**request, "token": True})["lease"]["id"]
        direct.ask("POST", f"/v1/leases/{lease}/release", {"request_id": f"cli-{os.urandom(12).hex()}"})


def _take_patiently(direct: Direct, request: dict[str, Any]) -> CommandLease:
    """The same request with the same id, by the client's own program: it retries, waits in the queue and withdraws."""
    import msgspec

    from sublet.cli.call import CommandOffice
    from sublet.cli.progress_line import LiveLine
    from sublet.client.operations import OfficeOperations
    from sublet.clock import SystemClock
    from sublet.wire.decoders import convert_to
    from sublet.wire.http import AcquireRequest, GrantAnswer

    acquire = convert_to({**{k: v for k, v in request.items() if v is not None}, "token": True}, AcquireRequest)
    with LiveLine() as line, _patient_hooks(line) as hooks, raised_by_signals(lambda number: SystemExit(128 + number)):
        grant = CommandOffice.reach().run(OfficeOperations(SystemClock()).acquire(acquire, hooks))
    try:
        token = token_of(direct, grant.view.id)
    except BaseException:
        with contextlib.suppress(SubletError):
            direct.ask("POST", f"/v1/leases/{grant.view.id}/release", {"request_id": f"cli-{os.urandom(12).hex()}"})
        raise
    answer = msgspec.json.encode(GrantAnswer(lease=grant.view, token=token))
    return CommandLease(direct, answer, grant.sent_ns, token, acquire.renew)


@contextlib.contextmanager
def _patient_hooks(line: LiveLine) -> Iterator[Hooks]:
    """What is said while one waits: to a person at once, to a log only if it lasts."""
    from sublet.background import start_timer
    from sublet.cli.acquire import offered, position_text
    from sublet.client.operations import Hooks

    timer: threading.Timer | None = None
    since_s = time.monotonic()

    def on_place(place: Place) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
        left_s = since_s + SAY_WAITING_AFTER_S - time.monotonic()
        if line.live or left_s <= 0:
            line.set(position_text(place))
            return
        timer = start_timer("say_waiting", left_s, lambda: line.set(position_text(place)))

    try:
        yield Hooks(on_place=on_place, on_offer=lambda offer: offered(line, offer))
    finally:
        if timer is not None:
            timer.cancel()
