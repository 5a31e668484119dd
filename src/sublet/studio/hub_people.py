"""Maps users of a JupyterHub to people of the studio, with their browsers and servers.

The hub decides who a user is; the studio believes nothing that it has not asked the hub itself. A browser is signed in
for as long as the hub says so: it is asked again from time to time with the token that the user gave to the studio,
which is kept in memory alone. A hub that does not answer lets no browser in. A single-user server has a token of its
own, which its hub asked for; it is good while the hub says that the server runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import pwd
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Final

import msgspec

from sublet.errors import InvalidRequest, NotFound, SubletError, Unauthorized
from sublet.lazy_dataclass import dataclass
from sublet.lease.states import LeaseStatus
from sublet.lease.value import rfc3339
from sublet.studio.hub_api import Handshake, Hub, HubAway, HubRefused, HubUser
from sublet.studio.people import HUB_LABEL, OWNER_TENANT, SERVER_LABEL, NotSignedIn, Person, Token
from sublet.studio.service import Studio
from sublet.values import Kind, valid_name
from sublet.wire.http import LeaseView
from sublet.wire.http_views import SESSION_LABEL

AT_ONCE_MAX: Final = 8
"""Requests of browsers to the hub. A slow hub keeps no more threads of the studio from their work."""
SIGN_INS_MAX: Final = 20_000
SERVER_NAME_MAX: Final = 255
_DULL: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,38}[a-z0-9])?")
_HELD: Final = (LeaseStatus.ACTIVE, LeaseStatus.NOTICED)
_WAITS: Final = (LeaseStatus.QUEUED, LeaseStatus.GRANTED)


class ServerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A single-user server that the hub starts, or has stopped."""

    user: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    server: Annotated[str, msgspec.Meta(max_length=SERVER_NAME_MAX)] = ""
    """Empty: the user's default server."""
    groups: Annotated[list[str], msgspec.Meta(max_length=1000)] = []


@dataclass(slots=True)
class _SignIn:
    """A browser, as the hub sees it."""

    token: str
    checked_s: float
    asks: threading.Lock
    failed: tuple[float, HubAway] | None = None


class HubPeople:
    """The users of one hub. Safe to use from several threads."""

    def __init__(self, studio: Studio, hub: Hub, token: str, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """``token``: what the hub shows when it asks for a server's token; the one that it knows the studio by."""
        self._studio, self.hub, self._now_s = studio, hub, now_s
        self._token = token
        self._lock = threading.Lock()
        self._admitting = threading.Lock()
        self._asking = threading.BoundedSemaphore(AT_ONCE_MAX)
        self._sign_ins: dict[str, _SignIn] = {}

    # ---- browsers

    def check_answers(self) -> None:
        """Raise ``HubAway`` where a browser that is sent to the hub would find that it does not answer."""
        with self._ask():
            self.hub.check()

    def sign_in(self, code: str, handshake: Handshake) -> str:
        """A cookie for the browser that brings this code from the hub. Raises ``SubletError``."""
        with self._ask():
            token = self.hub.token_for(code, handshake)
            user = self.hub.user_of(token)
        person = self.admit(user)
        cookie = self._studio.people.sign_in_by_hub(person, self._studio.settings.cookie_s)
        with self._lock:
            if len(self._sign_ins) >= SIGN_INS_MAX:
                del self._sign_ins[next(iter(self._sign_ins))]
            self._sign_ins[_digest(cookie)] = _SignIn(token, self._now_s(), threading.Lock())
        return cookie

    def sign_out(self, cookie: str) -> None:
        """The browser is to ask the hub again."""
        with self._lock:
            self._sign_ins.pop(_digest(cookie), None)

    def check(self, cookie: str, token: Token) -> None:
        """Raise unless the hub said lately that this browser is this person's. Others, who showed a token of the
        studio's, are left alone."""
        if token.label != HUB_LABEL:
            return
        with self._lock:
            found = self._sign_ins.get(_digest(cookie))
        if found is None:  # the studio was started again
            raise NotSignedIn("the studio was started again since this browser signed in", do="Sign in again.")
        with found.asks:  # several pages of one browser are one question
            now_s, settings = self._now_s(), self._studio.settings
            if now_s - found.checked_s <= settings.hub_recheck_s:
                return
            if found.failed is not None and now_s - found.failed[0] <= settings.hub_answer_s:
                raise found.failed[1]  # one that did not answer is not asked at once again, whatever the browser asks
            try:
                with self._ask():
                    user = self.hub.user_of(found.token)
                if user.name != token.person.name:
                    raise HubRefused("JupyterHub names another user for this browser", do="Sign in again.")
                self.admit(user)
            except HubAway as error:
                found.failed = (now_s, error)
                raise
            except HubRefused as error:
                self.sign_out(cookie)
                self._studio.people.sign_out(cookie)
                raise NotSignedIn(error.message, do=error.do) from error
            found.checked_s, found.failed = now_s, None

    @contextlib.contextmanager
    def _ask(self) -> Iterator[None]:
        if not self._asking.acquire(blocking=False):
            raise HubAway("answers slowly")
        try:
            yield
        finally:
            self._asking.release()

    # ---- who a user is here

    def admit(self, user: HubUser) -> Person:
        """The person of this user: the one of this name; else a new one, if the settings say so, with the tenant that
        the office binds to this user of the machine, or that the settings name for a group of the user's. The studio
        adds no tenants: it has no right to."""
        settings = self._studio.settings
        try:
            valid_name(user.name, "person's name")
        except InvalidRequest as error:
            raise Unauthorized(
                f"the user {user.name[:60]!r} of JupyterHub cannot be a person here",
                do=f"Tell the operator of the studio. {error.do}",
            ) from error
        with self._admitting:
            try:
                person = self._studio.people.find(user.name)
            except NotFound as error:
                if not settings.hub_creates_people:
                    raise Unauthorized(
                        f"{user.name} is no person of this studio",
                        do="Ask the operator, who adds you with `sublet person add`.",
                    ) from error
                person = self._studio.people.add(user.name, self._tenant_of(user))
            if settings.hub_teachers:
                teaches = sorted({office for hub, office in settings.hub_teachers.items() if hub in user.groups})
                if teaches != sorted(person.teaches):
                    self._studio.people.set_role(person.name, operator=person.is_operator, teaches=teaches)
        return person

    def _tenant_of(self, user: HubUser) -> str:
        """Raises ``Unauthorized`` where there is none. A tenant of the same name is not the user's because of that."""
        tenants = [one for one in self._studio.office.shown().tenants if not one.operator and not one.studio]
        uid = _uid_of(user.name)
        if uid is not None and (own := next((one.id for one in tenants if one.uid == uid), None)):
            return own
        rules = self._studio.settings.hub_tenants
        named = next((tenant for group, tenant in rules.items() if group in user.groups), "")
        if named in {one.id for one in tenants} - {OWNER_TENANT}:
            return named
        bound = f"`sublet tenant add NAME --uid {'UID' if uid is None else uid} --no-token-needed`"
        raise Unauthorized(
            f"the office has no tenant {named} yet" if named else f"the office has no tenant yet for {user.name}",
            do=f"Ask the operator for one ({bound}, or `hub.tenants` in studio.toml).",
        )

    # ---- servers

    def check_hub(self, token: str) -> None:
        """Raise unless this is the hub's request."""
        if not hmac.compare_digest(_digest(token), _digest(self._token)):
            raise Unauthorized("that is not the token by which the hub knows this studio", do="See `hub.token_file`.")

    def begin_server(self, body: ServerBody) -> dict[str, object]:
        """A token for a server that is about to start; the one that it had before opens nothing any more."""
        person = self.admit(HubUser(name=body.user, groups=tuple(body.groups)))
        valid_s, people = self._studio.settings.hub_token_s, self._studio.people
        people.sweep_servers(person.name)
        token = people.new_token(person.name, server_label(body.server), valid_s=valid_s)
        return {"person": person.name, "tenant": person.tenant, "token": token, "valid": valid_s}

    def end_server(self, body: ServerBody) -> dict[str, object]:
        """Its token opens nothing any more. One that has none is as good as ended."""
        with contextlib.suppress(NotFound):
            self._studio.people.revoke(body.user, server_label(body.server))
        return {}

    def update_servers(self) -> None:
        """Prolong the tokens of servers that run, and tell the hub in which of them something runs, so that its culler
        leaves these alone and ends the others. Raises ``SubletError``."""
        tokens = self._studio.people.of_servers()
        if not tokens:
            return
        running, valid_s = self.hub.servers(), self._studio.settings.hub_token_s
        people: dict[str, Person] = {}
        for token in tokens:
            name = token.person.name
            if token.label in map(server_label, running.get(name, ())):
                self._studio.people.prolong(token, valid_s)
                people[name] = token.person
        for name in sorted(self.in_use(people.values())):
            self.hub.report_active(name, running[name], rfc3339(time.time_ns()))

    def in_use(self, people: Iterable[Person]) -> set[str]:
        """Those of them who run a cell on a GPU, or wait for one in a cell. Where several people share a tenant, the
        session of a lease names its person."""
        members = Counter(one.tenant for one in self._studio.people.all())
        leases = [one for one in self._studio.office.shown().leases if is_in_use(one)]
        found = set()
        for person in people:
            theirs = [one.labels.get(SESSION_LABEL, "") for one in leases if one.tenant == person.tenant]
            if theirs and (members[person.tenant] == 1 or any(map(self._studio.of(person).has, theirs))):
                found.add(person.name)
        return found

    def run(self, stopped: threading.Event) -> None:
        """Look at the servers from time to time. What fails is logged when it begins and when it is over."""
        failing = ""
        while not stopped.wait(self._studio.settings.hub_report_s):
            try:
                self.update_servers()
                failure = ""
            except SubletError as error:
                failure = error.message
            if failure != failing:
                sys.stderr.write(
                    f"{f'Servers of the hub: {failure}' if failure else 'Servers of the hub: seen again.'}\n"
                )
                sys.stderr.flush()
            failing = failure


def server_label(server: str) -> str:
    """The label of the token of this server of a person."""
    if not server:
        return SERVER_LABEL
    if _DULL.fullmatch(server):
        return f"{SERVER_LABEL}-{server}"
    return f"{SERVER_LABEL}.{_digest(server)[:16]}"


def is_in_use(lease: LeaseView) -> bool:
    """Whether something runs under it; or a cell waits for it, and not the studio, whose requests have no peer. What a
    notebook keeps in volumes, and the memory that a kernel lives in, is no use of anything."""
    if not any(want.kind == Kind.GPU for want in lease.wants):
        return False
    is_waiting = lease.status in _WAITS and bool(lease.peer)
    return (lease.status in _HELD and not lease.idle) or is_waiting


def _uid_of(user: str) -> int | None:
    """Root is no tenant's user; None where the machine has no such user."""
    try:
        return pwd.getpwnam(user).pw_uid or None
    except KeyError:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
