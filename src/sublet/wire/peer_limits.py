"""Limits on the connections of one listening socket: in all, for each user of the machine, and a share for the owner.

A connection is *silent* until its peer has said who it is or what it wants. When a limit is reached, a silent
connection is closed to make room: an active client is not kept out by silent ones. One that has
spoken is never closed for another; the newcomer is refused then. Pure: what to close is returned.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Admitted(NamedTuple, Generic[Key]):
    """The newcomer is counted from now on."""

    closed: Key | None = None
    """A silent connection that is to be closed, and is counted no more."""


class PeerRefused(NamedTuple):
    """The newcomer is not counted, and nothing has changed."""

    limit: str
    """Which limit: ``connections`` or ``connections_of_user``."""
    message: str


class PeerLimits(Generic[Key]):
    """Counts the connections of one listening socket, by key and by the user number of the peer."""

    def __init__(self, *, most: int, per_user: int, reserved: int, owners: frozenset[int]) -> None:
        """``per_user`` bounds each user that is not among ``owners``; ``reserved`` of the ``most`` connections are
        for the owners alone."""
        self.most: Final = most
        self._others_most = most - reserved
        self.bound_users(per_user)
        self._owners = owners
        self._users: dict[Key, int] = {}
        self._counts: dict[int, int] = {}
        self._others = 0
        self._silent: dict[int, dict[Key, None]] = {}
        """Silent connections of each user, oldest first."""

    def __len__(self) -> int:
        return len(self._users)

    def bound_users(self, per_user: int) -> None:
        """So many for each user from now on; connections that are open stay."""
        self._per_user = min(per_user, self._others_most)

    def admit(self, key: Key, user: int) -> Admitted[Key] | PeerRefused:
        """Count a new connection of this user, or say why it is refused."""
        closed: Key | None = None
        is_owner = user in self._owners
        if not is_owner and self._counts.get(user, 0) >= self._per_user:
            closed = self._oldest_silent(user)
            if closed is None:
                return PeerRefused("connections_of_user", f"user {user} has {self._per_user} connections open here")
        elif len(self._users) >= self.most or (not is_owner and self._others >= self._others_most):
            closed = self._one_of_most_silent(owners_too=is_owner)
            if closed is None:
                return PeerRefused("connections", f"{self.most} connections are open here")
        if closed is not None:
            self.disconnected(closed)
        self._users[key] = user
        self._counts[user] = self._counts.get(user, 0) + 1
        self._others += not is_owner
        self._silent.setdefault(user, {})[key] = None
        return Admitted(closed)

    def handshake_done(self, key: Key) -> None:
        """This connection is silent no more. Harmless for one that is not counted."""
        user = self._users.get(key)
        if user is not None:
            self._no_longer_silent(key, user)

    def disconnected(self, key: Key) -> None:
        """This connection is closed. Harmless for one that is not counted."""
        user = self._users.pop(key, None)
        if user is None:
            return
        self._no_longer_silent(key, user)
        self._others -= user not in self._owners
        self._counts[user] -= 1
        if not self._counts[user]:
            del self._counts[user]

    def _no_longer_silent(self, key: Key, user: int) -> None:
        silent = self._silent.get(user)
        if silent is not None:
            silent.pop(key, None)
            if not silent:
                del self._silent[user]

    def _oldest_silent(self, user: int) -> Key | None:
        return next(iter(self._silent.get(user, ())), None)

    def _one_of_most_silent(self, *, owners_too: bool) -> Key | None:
        """The oldest one of the user who has the most of them. Owners' connections make room for owners only."""
        users = [user for user in self._silent if owners_too or user not in self._owners]
        return self._oldest_silent(max(users, key=lambda user: len(self._silent[user]))) if users else None
