"""A JupyterHub of the pretended world, which is away now and then, and people who look at their page through it.

The studio's side is the product's own ``HubPeople``: it lets a browser in for as long as the hub has said so lately.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, cast

from sublet.errors import NotFound
from sublet.studio.hub_api import Handshake, Hub, HubAway, HubRefused, HubUser
from sublet.studio.hub_people import HubPeople
from sublet.studio.people import HUB_LABEL, NotSignedIn, Token, TokenScope
from sublet.studio.people import Person as StudioPerson
from sublet.studio.service import Studio
from tests.simulation.people import Program

if TYPE_CHECKING:
    from tests.simulation.people_world import PeopleWorld

_S: Final = 1_000_000_000
RECHECK_S: Final = 5
ANSWERS_NS: Final = 6 * _S
"""So long a hub that is away is waited for."""


class PretendedHub:
    """What ``Hub`` asks over the network. Who is logged out there is known to it at once."""

    def __init__(self, world: PeopleWorld) -> None:
        self._world = world
        self.away_until = 0
        self.logged_out: dict[str, int] = {}
        """Since when (true time), by user."""
        self.asker: Visitor | None = None
        """The program whose browser waits for it now."""

    def token_for(self, code: str, _handshake: Handshake) -> str:
        """For a code that the hub gave to this user."""
        self._answer()
        return code

    def user_of(self, token: str) -> HubUser:
        """Whose browser it is; refused where that user is logged out."""
        asker = self._answer()
        if token in self.logged_out:
            raise HubRefused("JupyterHub does not know this browser any more", do="Sign in again.")
        asker.yes_at = self._world.now
        return HubUser(name=token, groups=())

    def _answer(self) -> Visitor:
        asker = self.asker
        assert asker is not None
        asker.hub_answers()
        self.asker = asker
        if self._world.now < self.away_until:
            raise HubAway("did not answer in time")
        return asker


@dataclass
class _MemoryPeople:
    """The studio's people and cookies, in memory: those of the process."""

    known: dict[str, StudioPerson] = field(default_factory=dict)
    cookies: dict[str, StudioPerson] = field(default_factory=dict)

    def find(self, name: str) -> StudioPerson:
        if name not in self.known:
            raise NotFound(f"there is no person {name}")
        return self.known[name]

    def sign_in_by_hub(self, person: StudioPerson, _valid_s: int) -> str:
        cookie = f"cookie-{len(self.cookies)}"
        self.cookies[cookie] = person
        return cookie

    def sign_out(self, cookie: str) -> None:
        self.cookies.pop(cookie, None)


class Visitor(Program):
    """A person's browser: signs in by the hub, and looks at the page again and again."""

    cookie = ""
    yes_at: int | None = None
    """When the hub last said, of this browser, who it is (true time)."""

    def begin(self) -> None:
        super().begin()
        people = _MemoryPeople()
        name = self.person.tenant
        people.known[name] = StudioPerson(id="p-1", name=name, tenant=name)
        settings = SimpleNamespace(
            hub_recheck_s=RECHECK_S, hub_answer_s=5, hub_creates_people=False, hub_teachers={}, cookie_s=86_400
        )
        self._people = people
        studio = cast(Studio, SimpleNamespace(settings=settings, people=people))
        self.hub_people = HubPeople(studio, cast(Hub, self.world.hub), "", now_s=lambda: self.world.now / _S)

    def hub_answers(self) -> None:
        """Meanwhile the world goes on; a hub that is away is waited for as long as it may take."""
        is_away = self.world.now < self.world.hub.away_until
        self._calls += 1
        self.after(ANSWERS_NS if is_away else _S // 20, self._heard, self._calls)
        self.wait()

    def _heard(self, calls: int) -> None:
        if calls == self._calls:
            self.wake(None)

    def turn(self) -> None:
        hub, chance = self.world.hub, self.world.random.random
        name = str(self.person.tenant)
        if chance() < 0.05:
            hub.logged_out.setdefault(name, self.world.now)
        elif chance() < 0.3:
            hub.logged_out.pop(name, None)
        if not self.cookie:
            hub.asker = self
            self.cookie = self.hub_people.sign_in(name, Handshake("secret"))
        person = self._people.cookies.get(self.cookie)
        if person is None:
            self.cookie = ""
            return
        hub.asker = self
        try:
            self.hub_people.check(
                self.cookie, Token(person=person, label=HUB_LABEL, expires_ns=None, scope=TokenScope())
            )
        except NotSignedIn:
            self.cookie = ""
            self.world.coverage.seen["signed out by the hub"] += 1
            return
        except HubAway:
            self.world.coverage.seen["page refused, the hub is away"] += 1
            raise
        self.world.people_rules.shown(self)
        self.sessions.reconcile()

    def pause_ns(self) -> int:
        return int((0.5 + self.world.random.random() * 3) * _S)
