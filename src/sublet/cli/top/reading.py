"""Reads an office's whole state for the live view."""

from __future__ import annotations

import json
import time
from typing import Any, Final

from sublet.cli.call import error_of, no_office
from sublet.cli.show import Json
from sublet.cli.top.snapshot import OfficeSnapshot
from sublet.client.address import Address
from sublet.client.steps import HttpCall
from sublet.client.transport import Flight, Transport
from sublet.clock import SystemClock
from sublet.errors import Disconnected, NotFound, Unauthorized
from sublet.wire.version import WIRE_VERSION

ANSWER_S: Final = 10.0
CONNECT_S: Final = 5.0


class OfficeReader:
    """Asks one office, on connections that are kept."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._transport = Transport(address, SystemClock(), wire=WIRE_VERSION)
        self._is_operator = True
        """Until it is said that we are not."""

    def read(self, *, everything: bool = True) -> OfficeSnapshot:
        """How it is now; without ``everything`` what changes slowly, and costs the office most, is left out."""
        status: Json = self._get("/v1/status")
        return OfficeSnapshot(
            status=status,
            leases=tuple(self._get("/v1/leases")),
            queue=tuple(self._get("/v1/queue")) if status["queued"] else (),
            guests=self._guests(),
            bill=tuple(self._get("/v1/bill?by=tenant")) if everything else (),
            tenants=self._operators("/v1/tenants") if everything else None,
            fences=self._operators("/v1/fences") if everything and status["quarantined"] else None,
            at_s=time.monotonic(),
            wall_s=time.time(),
        )

    def listen(self) -> Flight:
        """The office's news; an operator gets every tenant's."""
        return self._transport.launch(HttpCall(method="GET", path="/v1/events?all=1", timeout_s=CONNECT_S))

    def close(self) -> None:
        self._transport.close()

    def _guests(self) -> tuple[Json, ...] | None:
        """An older office cannot tell, and one whose supervisor is away cannot tell now. The rest is worth showing."""
        try:
            return tuple(self._get("/v1/guests"))
        except NotFound:
            return None
        except Disconnected as error:
            if error.__cause__ is not None:  # it is the office that did not answer
                raise
            return None

    def _operators(self, path: str) -> tuple[Json, ...] | None:
        if not self._is_operator:
            return None
        try:
            return tuple(self._get(path))
        except Unauthorized:
            self._is_operator = False
            return None

    def _get(self, path: str) -> Any:
        try:
            reply = self._transport.exchange(HttpCall(method="GET", path=path, timeout_s=ANSWER_S))
        except Disconnected as error:
            if self.address.home is not None and isinstance(
                error.__cause__, FileNotFoundError | ConnectionRefusedError
            ):
                raise no_office(self.address.home) from error
            raise
        try:
            found = json.loads(reply.body)
        except ValueError as error:
            raise Disconnected(f"what answers at {self.address.url} is not an office of ours") from error
        if reply.status >= 400:
            raise error_of(found, reply.status)
        return found


def document(known: OfficeSnapshot) -> Json:
    """The same as one document, in the words of the control API."""
    parts = {name: getattr(known, name) for name in ("leases", "queue", "guests", "tenants", "fences", "bill")}
    lists = {name: None if part is None else list(part) for name, part in parts.items()}
    return {"status": known.status, **lists}
