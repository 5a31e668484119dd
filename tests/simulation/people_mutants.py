"""Known kinds of bugs of session services, put into the real parts while a seed runs; each must break its rule."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, Final

from sublet.errors import InvalidRequest, NotFound
from sublet.lease_end import EndReason
from sublet.office.access import AccessList
from sublet.office.ledger import bills, holders, lookup, renewals
from sublet.office.ledger import events as ev
from sublet.office.ledger.bills import Line
from sublet.office.ledger.queue_order import Shares
from sublet.office.ledger.records import LeaseRecord, TenantRecord
from sublet.office.ledger.state import State
from sublet.office.ledger.step import Step
from sublet.studio import api, sessions
from sublet.studio.hub_api import HubAway
from sublet.studio.hub_people import HubPeople
from sublet.studio.people import Token
from sublet.studio.records import Entry, Session, fold
from sublet.studio.sessions import Sessions
from sublet.testing.machine import Machine
from sublet.values import MILLIS_PER_DEVICE, NS_PER_S, Epoch, Kind, LeaseId, RequestId, TenantId
from sublet.wire.orders import Part
from tests.simulation.mutant import Mutant, in_force


def switched_on(name: str | None) -> AbstractContextManager[None]:
    """The mutant of this name is in force; None changes nothing."""
    return in_force(PEOPLE_MUTANTS[name].changes if name is not None else ())


def _an_id_for_each_request(_original: Any) -> Any:
    return lambda session: RequestId(f"{session.id}-{session.changed_ns}")


def _known_before_it_is_written(_original: Any) -> Any:
    def put(self: Sessions[Any], entry: Entry) -> bool:
        try:
            self._found[entry.session] = fold(self._found.get(entry.session), entry)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        if not self._store.append(entry):
            return False
        self._seq = entry.seq
        return True

    return put


def _any_name(_original: Any) -> Any:
    return lambda self, record: None


def _ends_are_not_noticed(_original: Any) -> Any:
    return lambda self, session, held, live: None


def _whole_seconds(original: Any) -> Any:
    def by_device(*given: Any) -> dict[str, Line]:
        lines: dict[str, Line] = original(*given)
        for line in lines.values():
            line.gpu_milli_ns -= line.gpu_milli_ns % (MILLIS_PER_DEVICE * NS_PER_S)
        return lines

    return by_device


def _of_any_tenant(_original: Any) -> Any:
    def find(step: Step, tenant: TenantId, lease_id: LeaseId) -> LeaseRecord:
        lease = step.state.leases.get(lease_id)
        if lease is None:
            raise NotFound(f"there is no lease {lease_id}")
        return lease

    return find


def _whose_it_is(original: Any) -> Any:
    def find(step: Step, tenant: TenantId, lease_id: LeaseId) -> LeaseRecord:
        lease = step.state.leases.get(lease_id)
        if lease is not None and lease.tenant != tenant:
            raise NotFound(f"that lease is of {lease.tenant}")
        found: LeaseRecord = original(step, tenant, lease_id)
        return found

    return find


def _tokens_stay(original: Any) -> Any:
    def take(self: AccessList, tenant: TenantId) -> TenantRecord | None:
        before = dict(self._by_hash)
        found: TenantRecord | None = original(self, tenant)
        self._by_hash = before
        return found

    return take


def _a_word_is_work(original: Any) -> Any:
    def activity(step: Step, lease: LeaseRecord, busy_ns: int, *, idle: bool) -> ev.Event:
        noted: ev.Event = original(step, lease, busy_ns, idle=idle)
        if idle or lease.deadline_ns is None:
            return noted
        return ev.Renewed(lease=lease.id, deadline_ns=step.now.ns + lease.ttl_ns, number=lease.number + 1)

    return activity


def _never_free(_original: Any) -> Any:
    def check_free(self: Sessions[Any], session: Session, live: object) -> None:
        raise InvalidRequest(f"session {session.name} is held")

    return check_free


def _claims_are_not_audited(original: Any) -> Any:
    return original - {ev.Claimed}


def _quarantines_are_not_audited(original: Any) -> Any:
    return original - {ev.Quarantined}


def _any_that_is_parked(original: Any) -> Any:
    def unpark(self: Machine, under: LeaseId, lease: LeaseId, epoch: Epoch, parts: tuple[Part, ...]) -> None:
        own = self.parked(under)
        others = [guests for guests in self.all_parked().values() if own and guests[0].tenant != own[0].tenant]
        if others:
            self._parked[under] = others[0]
        original(self, under, lease, epoch, parts)

    return unpark


def _on_another_device(original: Any) -> Any:
    def unpark(self: Machine, under: LeaseId, lease: LeaseId, epoch: Epoch, parts: tuple[Part, ...]) -> None:
        lent = {part.resource for part in parts}
        others = [one for one in self.inventory.devices if one.kind is Kind.GPU and one.id not in lent]
        free = [one.id for one in others if not self.residents(one.id)]
        moved = [replace(one, resource=free[0]) if free and one.kind is Kind.GPU else one for one in parts]
        original(self, under, lease, epoch, tuple(moved))

    return unpark


def _reads_with_another_parser(original: Any) -> Any:
    def decode_as(raw: bytes, shape: type[Any]) -> Any:
        json.loads(raw)
        return original(raw, shape)

    return decode_as


def _reads_pickles(original: Any) -> Any:
    def decode_as(raw: bytes, shape: type[Any]) -> Any:
        if raw.startswith(b"\x80"):
            pickle.loads(raw)  # noqa: S301 - that is the bug
        return original(raw, shape)

    return decode_as


def _silence_is_a_yes(original: Any) -> Any:
    def check(self: HubPeople, cookie: str, token: Token) -> None:
        with suppress(HubAway):
            original(self, cookie, token)

    return check


def _nothing_is_cleared(_original: Any) -> Any:
    return lambda self, resource, lease: None


def _by_arrival_alone(_original: Any) -> Any:
    return lambda self, tenant: 0


def _only_what_was_taken(original: Any) -> Any:
    def note_taken(self: State, lease: LeaseRecord) -> None:
        if lease.end is not None and lease.end.reason is not EndReason.RELEASED:
            original(self, lease)

    return note_taken


def _mutant(breaks: str, *changes: tuple[Any, str, Callable[[Any], Any]]) -> Mutant:
    return Mutant(breaks, "session services", changes)


PEOPLE_MUTANTS: Final = {
    "request": _mutant("a request has a new id each time", (sessions, "request_id", _an_id_for_each_request)),
    "memory": _mutant("what is not on disk yet is believed", (Sessions, "_put", _known_before_it_is_written)),
    "name": _mutant("a name is given twice", (Sessions, "_check_start", _any_name)),
    "end": _mutant("ends of leases are not noticed", (Sessions, "_compare_active", _ends_are_not_noticed)),
    "bill": _mutant("device time is rounded on the way", (bills, "_by_device", _whole_seconds)),
    "foreign": _mutant(
        "a lease is found whose ever it is", (lookup, "find", _of_any_tenant), (holders, "find", _of_any_tenant)
    ),
    "told": _mutant(
        "a refusal says whose the lease is", (lookup, "find", _whose_it_is), (holders, "find", _whose_it_is)
    ),
    "token": _mutant("a token that was replaced still opens", (AccessList, "_take", _tokens_stay)),
    "word": _mutant("saying that something runs renews", (renewals, "activity", _a_word_is_work)),
    "audit": _mutant("a claim is not in the audit chain", (ev, "AUDITED", _claims_are_not_audited)),
    "fence": _mutant("a quarantine is not in the audit chain", (ev, "AUDITED", _quarantines_are_not_audited)),
    "resumed": _mutant("another's suspended program is resumed", (Machine, "unpark", _any_that_is_parked)),
    "moved": _mutant(
        "a program is resumed on a device that its lease has not", (Machine, "unpark", _on_another_device)
    ),
    "words": _mutant("what is no message is no error of ours", (api, "decode_as", _reads_with_another_parser)),
    "pickle": _mutant("a message is unpickled", (api, "decode_as", _reads_pickles)),
    "hub": _mutant("a hub that does not answer is taken for a yes", (HubPeople, "check", _silence_is_a_yes)),
    "left": _mutant("memory is not cleared between tenants", (Machine, "scrub", _nothing_is_cleared)),
    "served": _mutant("a session is never free", (Sessions, "_check_free", _never_free)),
}
"""Each breaks a rule of ``people_world.RULES`` in one seed."""

UNFAIR: Final = {
    "by arrival": _mutant("shares are not looked at", (Shares, "of_tenant", _by_arrival_alone)),
    "what is released is over": _mutant("who asks anew is new", (State, "note_taken", _only_what_was_taken)),
}
"""Break what is compared between people."""
