"""Sends one request to the office and decodes its answer, over the client's transport."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from sublet import errors
from sublet.cli.show import Json
from sublet.client.address import Address, find_address
from sublet.client.driver import run_program
from sublet.client.steps import HttpCall, Program
from sublet.client.transport import Transport
from sublet.clock import SystemClock
from sublet.errors import Disconnected, SubletError
from sublet.lease_end import EndReason, LeaseEnd
from sublet.wire.version import WIRE_VERSION

T = TypeVar("T")

REQUEST_S: Final = 10.0
"""How long an answer may take. The office answers in milliseconds; this is for a machine that is very busy."""


class NoOffice(Disconnected):
    """No office answers on this machine."""


class CommandOffice:
    """The office that is meant: ``SUBLET_URL``, else the one of this machine, by ``SUBLET_HOME``."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._transport = Transport(address, SystemClock(), wire=WIRE_VERSION)

    @classmethod
    def reach(cls, *, start: bool = True) -> CommandOffice:
        """The office, started in the background where it is ours to start and none runs.

        Commands that only look whether there is one say ``start=False``: looking changes nothing.
        """
        office = cls(find_address(None, None, None, os.environ))
        if start:
            office._revive()
        return office

    @classmethod
    def listing(cls, path: str, *, live: bool = False, patience: float = 0.0, **query: object) -> list[Json]:
        """A list from the office. Empty, and no office is started, if there can be nothing to list.

        Without an office there are records only if there is a journal; live leases only if the supervisor of an earlier
        office still runs (``NoOffice`` is raised then, since the list may not be empty).
        """
        office = cls.reach(start=False)
        try:
            found: list[Json] = office.get(path, patience=patience, **query)
        except NoOffice:
            home = office.address.home
            assert home is not None  # an office elsewhere is not ours to start, and is Disconnected
            if live:
                check_nothing_lives(home)
            if live or not (home / "journal.db").exists():
                return []
            office._revive()
            found = office.get(path, patience=patience, **query)
        return found

    def run(self, program: Program[T]) -> T:
        """Carry out one of the client's own programs, such as waiting in the queue."""
        try:
            return run_program(program, self._transport.exchange, self._revive)
        finally:
            self._transport.close()

    def _revive(self) -> None:
        """Start the office if it is this machine's and does not answer."""
        if self.address.home is not None:
            from sublet.client.office import ensure_office

            ensure_office(self.address.home)

    def get(self, path: str, *, patience: float = 0.0, **query: object) -> Any:
        return self._call("GET", path, None, query, patience)

    def post(self, path: str, body: Mapping[str, Any], *, patience: float = 0.0, **query: object) -> Any:
        return self._call("POST", path, body, query, patience)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._call("PATCH", path, body, {}, 0.0)

    @staticmethod
    def quote(text: str) -> str:
        """A name as a part of a path, with its special characters escaped."""
        return quote(text, safe="")

    @staticmethod
    def request_id() -> str:
        """Fresh for each command: repeating a command is asking again."""
        return f"cli-{os.urandom(12).hex()}"

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, object], patience: float
    ) -> Any:
        given = {key: value for key, value in query.items() if value is not None}
        call = HttpCall(
            method=method,
            path=f"{path}?{urlencode(given)}" if given else path,
            # What was not said is not sent, so the office's defaults are in one place.
            body=None if body is None else json.dumps({k: v for k, v in body.items() if v is not None}).encode(),
            timeout_s=REQUEST_S + patience,
        )
        try:
            reply = self._transport.exchange(call)
        except Disconnected as error:
            if self.address.home is not None and isinstance(
                error.__cause__, FileNotFoundError | ConnectionRefusedError
            ):
                raise no_office(self.address.home) from error
            raise
        finally:
            self._transport.close()  # a command asks once or twice: nothing stays open
        try:
            document = json.loads(reply.body)
        except ValueError as error:
            raise Disconnected(
                f"what answers at {self.address.url} is not an office of ours (status {reply.status})",
                do="Check SUBLET_URL.",
            ) from error
        if reply.status >= 400 and not (isinstance(document, dict) and "answer" in document):
            raise error_of(document, reply.status)
        return document


def no_office(home: object) -> NoOffice:
    """What to say where none runs and none is to be started."""
    return NoOffice(
        f"no office is running for {home}",
        do="Start one with `sublet up`, or just ask for a lease: `sublet lease acquire --gpu 1GiB`.",
    )


def check_nothing_lives(home: str | os.PathLike[str]) -> None:
    """Raise ``NoOffice`` if no office runs for this folder, and a supervisor that it left may have live leases."""
    from sublet.client.home import home_dir, runtime_dir
    from sublet.client.office import answers

    if answers(runtime_dir(home_dir(home)) / "supervisor.sock"):
        raise NoOffice(
            f"no office is running for {home}, and leases of an earlier one may go on to their deadlines",
            do="Start one with `sublet up`: it shows them.",
        )


def lease_end(view: Json | None) -> LeaseEnd | None:
    """An end as the office tells it. A reason we do not know yet comes from a newer office and stays readable."""
    if view is None or view["reason"] not in {reason.value for reason in EndReason}:
        return None
    saved_at = view.get("saved_at")
    return LeaseEnd(reason=EndReason(view["reason"]), at=view["at"], detail=view["detail"], saved_at=saved_at)


def error_of(document: Any, status: int) -> SubletError:
    """The error the office sent, as the class it travels under."""
    body = document.get("error") if isinstance(document, dict) else None
    if not isinstance(body, dict):
        return SubletError(f"the office answered {status} without saying why", do="See its log.")
    message, do = str(body.get("message", "")), str(body.get("do", ""))
    known = getattr(errors, str(body.get("kind")), None)
    if not (isinstance(known, type) and issubclass(known, SubletError)):
        return SubletError(message, do=do)
    if issubclass(known, errors.LeaseEnded):
        end = lease_end(body.get("end"))
        because = f": {end.reason}" + (f", {end.detail}" if end.detail else "") if end is not None else ""
        return known(
            message if because and end is not None and end.reason in message else message + because, end=end, do=do
        )
    return known(message, do=do)
