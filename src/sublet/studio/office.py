"""The public API of the office as sessions use it, on one fabric; and which session this process belongs to."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from sublet.background import start_thread
from sublet.client.fabric import Fabric
from sublet.client.home import home_dir
from sublet.client.lease import Lease
from sublet.client.model import Offer
from sublet.errors import LeaseEnded, NotFound, StaleEpoch, SubletError
from sublet.lease.states import LeaseStatus
from sublet.lease.value import rfc3339, wall_ns_of
from sublet.studio.records import CellRecord, CheckpointLocator, Offered, ProcessIdentity, Terms
from sublet.studio.remote import STUDIO_VARIABLE, TOKEN_VARIABLE, RemoteStore
from sublet.studio.sessions import Asking, Seen, Sessions, is_ident, new_id
from sublet.studio.store import DATABASE, SqliteStore, Store
from sublet.values import Kind
from sublet.wire.http import ActivityRequest, EndView, LeaseView, ReleaseRequest
from sublet.wire.http_views import SESSION_LABEL

VARIABLE: Final = "SUBLET_SESSION"
FOLDER: Final = "studio"
"""In the state folder: sessions, and the people of the studio."""
_HELD: Final = (LeaseStatus.ACTIVE, LeaseStatus.NOTICED)
_OVER: Final = (LeaseStatus.ENDING, LeaseStatus.ENDED)


class FabricOffice:
    """One fabric. What is acquired is a `Lease` of it."""

    def __init__(self, fabric: Fabric, *, bound: bool | None = None) -> None:
        """``bound``: whether leases end with this process; None: as the fabric does."""
        self.fabric = fabric
        self._bound = bound

    def live(self) -> list[Seen]:
        return [seen_as(view) for view in self.fabric.leases() if is_of_session(view)]

    def find(self, lease: str) -> Seen | None:
        try:
            return seen_as(self.fabric.lease(lease))
        except NotFound:
            return self._billed(lease)

    def _billed(self, lease: str) -> Seen | None:
        """A lease that the office has forgotten: the bill still has how it ended."""
        line = next((one for one in self.fabric.bill(by="lease") if one.key == lease and one.end), None)
        if line is None:
            return None
        ended_ns = None if line.ended_at is None else wall_ns_of(line.ended_at)
        return Seen(
            id=lease,
            session="",
            tenant=line.tenant or "",
            is_over=True,
            reason=line.end or "",
            ended_ns=ended_ns,
        )

    def acquire(self, asking: Asking) -> Lease:
        terms = asking.terms

        request: dict[str, Any] = {
            "min_vram": terms.vram,
            "count": terms.count,
            "ttl": terms.ttl_s,
            "tier": terms.tier,
            "exclusivity": terms.exclusivity,
            "model": terms.model,
            "or_smaller": terms.or_smaller,
            "or_model": terms.or_model,
            "bound": self._bound,
            "on_offer": lambda offer: asking.offered(_offer_record(offer)),
            "request_id": asking.request_id,
            **({"pay_priority": True} if terms.pay_priority else {}),  # which an older office would not know
            **{name: value for name, value in asking.more.items() if value is not None},
        }
        request["labels"] = {**(request.get("labels") or {}), **asking.labels}
        return self.fabric.gpu(**request)

    def remembers(self, asking: Asking) -> bool:
        return any(view.labels.items() >= asking.labels.items() for view in self.fabric.leases(all=True))

    def attach(self, lease: str) -> Lease:
        return self.fabric.attach(lease, bound=self._bound)

    def release(self, lease: str) -> None:
        with contextlib.suppress(LeaseEnded, NotFound):
            body = ReleaseRequest(request_id=f"release-{lease}")
            self.fabric.request("POST", f"/v1/leases/{lease}/release", body, shape=LeaseView)

    def tenant(self) -> str:
        with contextlib.suppress(SubletError):  # an office that is away hinders no new session
            return self.fabric.status().tenant
        return ""

    def is_ours(self, lease: str) -> bool:
        return any(view.id == lease for view in self.fabric.leases(own=True))

    def leave(self, held: Lease) -> None:
        held.leave()

    def set_down(self, held: Lease) -> None:
        """Leave it to the program that takes it over. Nothing runs under it until then, so it is the first to yield."""
        body = ActivityRequest(epoch=held.epoch, active=False)
        with contextlib.suppress(LeaseEnded, NotFound, StaleEpoch):  # over already, or another program's by now
            self.fabric.request("POST", f"/v1/leases/{held.id}/activity", body, shape=LeaseView)
        held.leave()

    def drop(self, held: Lease) -> None:
        held.release()

    def seen(self, held: Lease) -> Seen:
        return seen_as(self.fabric.lease(held.id))


def is_of_session(lease: LeaseView) -> bool:
    """Whether this is a session's lease of GPUs, or of what is parked of it, whose end has not begun."""
    is_gpu = not lease.wants or lease.wants[0].kind == Kind.GPU
    return SESSION_LABEL in lease.labels and (is_gpu or lease.parks is not None) and lease.status not in _OVER


def seen_as(view: LeaseView) -> Seen:
    """A lease, as sessions look at it."""
    end = view.end
    return Seen(
        id=view.id,
        session=view.labels.get(SESSION_LABEL, ""),
        tenant=view.tenant,
        epoch=None if view.epoch is None else (view.epoch.incarnation, view.epoch.n),
        is_held=view.status in _HELD,
        is_busy=view.status in _HELD and not view.idle,
        is_queued=view.status == LeaseStatus.QUEUED,
        is_over=view.status == LeaseStatus.ENDED,
        is_parked=view.parks is not None,
        bound_to=view.bound_to,
        devices=tuple(part.resource for part in view.parts),
        reason="" if end is None else end.reason,
        detail="" if end is None else end.detail,
        ended_ns=None if end is None else wall_ns_of(end.at),
        saved_at=None if end is None else end.saved_at,
        checkpoint=None if end is None else _checkpoint(end),
    )


def _checkpoint(end: EndView) -> CheckpointLocator | None:
    if end.saved_version is None or not end.saved_volume:
        return None
    return CheckpointLocator(volume=end.saved_volume, number=end.saved_version)


def offer_of(record: Offered) -> Offer:
    """What is on record, in the words of the client."""
    price, asked_price = (None if one is None else Decimal(one) for one in (record.price, record.asked_price))
    return Offer(
        kind=Kind.GPU,
        asked=record.asked,
        offered=record.offered,
        valid=record.valid_s,
        model=record.model,
        asked_model=record.asked_model,
        estimate=record.estimate_s,
        price=price,
        asked_price=asked_price,
        currency=record.currency,
    )


def _offer_record(offer: Offer) -> Offered:
    return Offered(
        offered=offer.offered,
        asked=offer.asked,
        valid_s=offer.valid,
        model=offer.model,
        asked_model=offer.asked_model,
        estimate_s=offer.estimate,
        price=None if offer.price is None else str(offer.price),
        asked_price=None if offer.asked_price is None else str(offer.asked_price),
        currency=offer.currency,
    )


def _try_to_record(act: Callable[[], None]) -> None:
    """Record something; if that fails, the bill by leases and the volume have it all the same."""
    with contextlib.suppress(SubletError):
        act()


def this_process(name: str = "") -> ProcessIdentity:
    """This one, told apart from a later one with its number."""
    pid = os.getpid()
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    return ProcessIdentity(host=socket.gethostname(), pid=pid, started=_started(pid) or 0, name=name or program)


def is_alive(process: ProcessIdentity) -> bool:
    """Whether it still runs. A process of another machine may, so it does."""
    return process.host != socket.gethostname() or _started(process.pid) == process.started


def _started(pid: int) -> int | None:
    """When it was started, in ticks since the machine was; None if there is no such process, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if len(fields) < 20 or fields[0] in "ZX" else int(fields[19])


def open_sessions(
    office: FabricOffice,
    *,
    home: str | None = None,
    folder: Path | None = None,
    name: str = "",
    owner: tuple[str, str] = ("", ""),
) -> Sessions[Lease]:
    """The sessions of this user, in the state folder or behind the studio that ``SUBLET_STUDIO`` names; or those that
    are kept in a ``folder``. ``owner``: the person of the studio and the tenant whose new sessions are."""
    return Sessions(
        _own_store(home) if folder is None else SqliteStore(folder),
        office,
        me=this_process(name),
        is_alive=is_alive,
        wall_ns=time.time_ns,
        new_id=lambda: new_id(secrets.token_bytes(8)),
        person=owner[0],
        tenant=owner[1],
    )


def _own_store(home: str | None) -> Store:
    url = os.environ.get(STUDIO_VARIABLE) if home is None else None
    return RemoteStore(url, os.environ.get(TOKEN_VARIABLE)) if url else SqliteStore(sessions_folder(home))


def are_recorded(home: str | None = None) -> bool:
    """Whether this user ever had a session; the office need not run for that."""
    is_elsewhere = home is None and bool(os.environ.get(STUDIO_VARIABLE))
    return is_elsewhere or (sessions_folder(home) / DATABASE).exists()


def sessions_folder(home: str | None = None) -> Path:
    """Where the sessions of this user lie."""
    return home_dir(home) / FOLDER


class NotebookSession:
    """The session that a notebook's kernel holds: what its cells ask for, and the lease under which they run."""

    def __init__(self, text: str, fabric: Fabric, terms: Terms) -> None:
        """``terms`` are those of a new session, where there is none of this name."""
        self._fabric = fabric
        self._sessions = open_sessions(FabricOffice(fabric), name="a notebook")
        self.was_refused = False
        """It was started here, and what its first cell asked for can never be granted: it is as if never started."""
        self._is_new = False
        try:
            self.session = self._sessions.find(text)
        except NotFound:
            if is_ident(text):  # of a session that is elsewhere, or mistyped
                raise
            self.session = self._sessions.start(text, terms)
            self._is_new = True
        """As it was when the kernel came to it; its id, name and terms do not change."""

    def gpu(self, **request: Any) -> Lease:
        """As ``Fabric.gpu``: the lease that the session has, if it will do, else one that is asked for."""
        terms = self.session.terms
        if not request.get("or_smaller") and request.get("min_vram", terms.vram) == terms.vram:
            request["or_smaller"] = terms.or_smaller
        if not request.get("or_model") and request.get("model") in (None, terms.model):
            request["or_model"] = terms.or_model
        if request.get("replaces") is not None:
            return self._replaced(request)
        on_offer: Callable[[Offer], bool] = request.pop("on_offer", None) or (lambda offer: True)
        try:
            lease = self._sessions.acquire(self.session.id, request, lambda offer: on_offer(offer_of(offer)))
        except SubletError as error:
            self.was_refused = self._is_new and self._sessions.end_refused(self.session, error)
            raise
        least, count = request.get("min_vram", terms.vram), request.get("count", terms.count)
        if len(lease.devices) == count and all(one.amount >= least for one in lease.devices):
            return lease
        if request.get("or_smaller"):
            return lease
        try:
            return self._replaced({**request, "replaces": lease})
        except BaseException:
            lease.release()
            raise

    def ran(self, **cell: Any) -> None:
        """Record what a cell consumed (``CellRecord``), beside the notebook: no cell is held up for it."""
        made = CellRecord(**cell)
        start_thread("session_cell", lambda: _try_to_record(lambda: self._sessions.ran(self.session.id, made)))

    def saved(self, volume: str, number: int, wall_ns: int) -> None:
        """Record that this checkpoint was saved in the volume, beside the notebook."""
        where, at = CheckpointLocator(volume=volume, number=number), rfc3339(wall_ns)
        start_thread("session_saved", lambda: _try_to_record(lambda: self._sessions.saved(self.session.id, at, where)))

    def moved(self, lease: Lease) -> None:
        """The kernel goes on under this lease."""
        self._sessions.moved(self.session.id, lease)

    def _replaced(self, request: dict[str, Any]) -> Lease:
        terms = self.session.terms
        given = {name: value for name, value in request.items() if value is not None}
        given = {"exclusivity": terms.exclusivity, "model": terms.model, **given}
        lease = self._fabric.gpu(**{**given, "labels": {**given.get("labels", {}), SESSION_LABEL: self.session.id}})
        self.moved(lease)
        return lease
