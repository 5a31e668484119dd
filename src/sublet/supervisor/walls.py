"""What a tenant's guest finds: a user of its own, walls around it, a home, and an environment with nothing of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from sublet.supervisor.isolation import Abilities, Ids, Part, Plan, Policy, Refusal, Uids, Wish, clean_env, enter, plan
from sublet.supervisor.isolation import Profile as IsolationProfile
from sublet.supervisor.tenancy import Tenancy
from sublet.values import TenantId
from sublet.wire.guests import GuestSpec

__all__ = ["Room", "Walls"]


@dataclass(frozen=True, slots=True)
class Room:
    """Where one guest lives."""

    env: dict[str, str]
    cwd: str
    enter: Callable[[int], int]
    ids: Ids | None


class Walls:
    """What this machine can build, and the user numbers of the tenants."""

    def __init__(self, *, runtime: str, state: str, policy: Policy | None = None) -> None:
        self.abilities = Abilities.probe()
        self.policy = policy or Policy()
        self._hidden = (runtime, state, os.path.expanduser("~"))
        self._uids = Uids(os.path.join(state, "uids")) if self.abilities.has(Part.UID) else None

    def behind(self, tenant: TenantId) -> _Behind:
        """For one tenant. Raises ``Unsupported`` if a wall that must stand cannot be built here."""
        ids = self.ids(tenant)
        self.plan(Wish(folder="/", tenant=tenant, ids=ids))
        return _Behind(self, tenant, ids)

    def ids(self, tenant: TenantId) -> Ids | None:
        """Whose the files of this tenant's guests are; None: our own user's."""
        return self._uids.ids(tenant) if self._uids is not None else None

    def plan(self, wish: Wish) -> Plan:
        """The steps for one guest."""
        found = plan(IsolationProfile.TENANT, self.abilities, wish, self.policy)
        if isinstance(found, Refusal):
            raise found.error()
        return found

    @property
    def hidden(self) -> tuple[str, ...]:
        """Folders that no guest of a tenant may see."""
        return self._hidden

    def lines(self) -> tuple[str, ...]:
        """For ``sublet doctor``."""
        return self.abilities.lines()


class _Behind:
    """The walls for guests of one tenant."""

    def __init__(self, walls: Walls, tenant: TenantId, ids: Ids | None) -> None:
        self._walls = walls
        self._tenant = tenant
        self._ids = ids

    def room(self, tenancy: Tenancy, spec: GuestSpec, *, counted: bool) -> Room:
        """Home and temporary files lie in the lease's folder, and go with it."""
        home = os.path.join(tenancy.folder, "home")
        os.makedirs(home, mode=0o700, exist_ok=True)
        if self._ids is not None:
            os.chown(home, *self._ids)
        readable = {tenancy.page_path, sys.prefix, sys.base_prefix, *_prefix_of(spec)}
        steps = self._walls.plan(
            Wish(
                folder=home,
                tenant=self._tenant,
                ids=self._ids,
                readable=tuple(sorted(readable)),
                writable=tenancy.writable,
                hidden=self._walls.hidden,
                counted=counted,
            )
        )
        term = spec.env.get("TERM", "dumb")
        env = clean_env(self._tenant, home=home, term=term, extra=spec.env)
        return Room(env, spec.cwd or home, lambda parent: enter(steps, parent=parent), self._ids)


def _prefix_of(spec: GuestSpec) -> tuple[str, ...]:
    """The folder that the interpreter of an entry point was installed in."""
    return (os.path.dirname(os.path.dirname(spec.python)),) if os.path.isabs(spec.python) else ()
