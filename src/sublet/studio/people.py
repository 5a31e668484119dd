"""The people of a studio: whom it knows, the tenant of each, and what they show to be let in.

A person's *token* is ``sublet_studio_`` and 32 random bytes, shown once; only its SHA-256 is stored. There is no need
for salt or a slow hash, because 256 random bits cannot be guessed. A browser that has shown a token gets a *cookie*, as
random and stored in the same way, which ends with the token that it was given for. Both are looked up by their hash and
compared in constant time. Everything is read anew for each request, so what is taken back opens nothing from then on.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sublet.errors import InvalidRequest, NotFound, Unauthorized
from sublet.studio.store import Database
from sublet.values import NS_PER_S, valid_name

PEOPLE_MAX: Final = 10_000
OWNER_TENANT: Final = "local"
"""The tenant of the office's owner. Its sessions are those of `sublet session`, so it has one person at most."""
TOKEN_PREFIX: Final = "sublet_studio_"
COOKIE_S: Final = 12 * 3600
"""A browser is asked for the token again after this long."""
SECRET_BYTES: Final = 32
_SECRET_LENGTH_MAX: Final = 256
_SCHEMA: Final = """
CREATE TABLE person (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    token TEXT NOT NULL UNIQUE,
    expires_ns INTEGER
) STRICT;
CREATE TABLE cookie (
    secret TEXT PRIMARY KEY,
    token TEXT NOT NULL,
    expires_ns INTEGER NOT NULL
) STRICT;
"""
_COLUMNS: Final = "person.id, person.name, person.tenant, person.token, person.expires_ns"


class NotSignedIn(Unauthorized):
    """A browser shows no cookie that is known and in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Someone whom the operator added."""

    id: str
    """Never used again, so that a later person of the same name is another."""
    name: str
    tenant: str
    expires_ns: int | None
    """Until when the token is good, in wall time; None: until another is made."""


class People:
    """All people of one studio. Safe to use from several threads and processes."""

    def __init__(self, folder: Path, *, wall_ns: Callable[[], int], random: Callable[[int], bytes]) -> None:
        self._database = Database(folder / "people.db", _SCHEMA, version=1, what="the people of the studio")
        self._wall_ns, self._random = wall_ns, random

    def all(self) -> list[Person]:
        """Everyone, by name."""
        with self._database.opened() as db:
            return [_person(row) for row in db.execute(f"SELECT {_COLUMNS} FROM person ORDER BY name")]

    def find(self, name: str) -> Person:
        """By name; raises ``NotFound``."""
        found = next((person for person in self.all() if person.name == name), None)
        if found is None:
            raise NotFound(f"there is no person {name[:40]}", do="`sublet person ls` lists them.")
        return found

    def add(self, name: str, tenant: str, valid_s: float | None = None) -> tuple[Person, str]:
        """A new person, and the token to be shown this once."""
        name, tenant = valid_name(name, "person's name"), valid_name(tenant, "tenant name")
        token = self._new_token()
        made = Person(id=f"p-{self._random(8).hex()}", name=name, tenant=tenant, expires_ns=self._until_ns(valid_s))
        with self._database.changing() as db:
            if db.execute("SELECT 1 FROM person WHERE name = ?", (name,)).fetchone():
                raise InvalidRequest(f"there is a person {name} already", do="Use another name.")
            if tenant == OWNER_TENANT and db.execute("SELECT 1 FROM person WHERE tenant = ?", (tenant,)).fetchone():
                raise InvalidRequest(
                    f"the sessions of tenant {tenant} are the owner's, and another person has them already",
                    do="Bind this one to a tenant of its own: `sublet tenant add NAME`.",
                )
            if db.execute("SELECT count(*) FROM person").fetchone()[0] >= PEOPLE_MAX:
                raise InvalidRequest(f"a studio has at most {PEOPLE_MAX} people", do="Remove some first.")
            row = (made.id, name, tenant, _hash(token), made.expires_ns)
            db.execute("INSERT INTO person VALUES (?, ?, ?, ?, ?)", row)
        return made, token

    def new_token(self, name: str, valid_s: float | None = None) -> str:
        """Another token, to be shown this once; the one before it, and every cookie given for that, open nothing."""
        person, token = self.find(name), self._new_token()
        with self._database.changing() as db:
            given = (_hash(token), self._until_ns(valid_s), person.id)
            db.execute("UPDATE person SET token = ?, expires_ns = ? WHERE id = ?", given)
        return token

    def remove(self, name: str) -> None:
        """The token and the cookies open nothing from then on."""
        person = self.find(name)
        with self._database.changing() as db:
            db.execute("DELETE FROM person WHERE id = ?", (person.id,))

    def of_token(self, token: str) -> Person:
        """Whose token this is; raises ``Unauthorized``."""
        return self._of_token(token)[0]

    def sign_in(self, token: str) -> str:
        """A cookie for a browser that shows this token; raises ``Unauthorized``."""
        _, stored = self._of_token(token)
        cookie, now_ns = _text(self._random(SECRET_BYTES)), self._wall_ns()
        with self._database.changing() as db:
            db.execute("DELETE FROM cookie WHERE expires_ns <= ? OR token NOT IN (SELECT token FROM person)", (now_ns,))
            db.execute("INSERT INTO cookie VALUES (?, ?, ?)", (_hash(cookie), stored, now_ns + COOKIE_S * NS_PER_S))
        return cookie

    def sign_out(self, cookie: str) -> None:
        """The cookie opens nothing from then on."""
        with self._database.changing() as db:
            db.execute("DELETE FROM cookie WHERE secret = ?", (_hash(cookie),))

    def of_cookie(self, cookie: str) -> Person:
        """Whose browser this is; raises ``NotSignedIn``."""
        digest = _hash(cookie[:_SECRET_LENGTH_MAX])
        with self._database.opened() as db:
            row = db.execute(
                f"SELECT {_COLUMNS}, cookie.secret, cookie.expires_ns FROM cookie JOIN person USING (token) "
                "WHERE cookie.secret = ?",
                (digest,),
            ).fetchone()
        if row is None or not hmac.compare_digest(digest, row[5]) or row[6] <= self._wall_ns():
            raise NotSignedIn("this browser is not signed in", do="Sign in with your token.")
        try:
            return self._in_time(row)
        except Unauthorized as error:
            raise NotSignedIn(error.message, do=error.do) from error

    def _of_token(self, token: str) -> tuple[Person, str]:
        digest = _hash(token[:_SECRET_LENGTH_MAX])
        with self._database.opened() as db:
            row = db.execute(f"SELECT {_COLUMNS} FROM person WHERE token = ?", (digest,)).fetchone()
        if row is None or not hmac.compare_digest(digest, row[3]):
            raise Unauthorized("the token is not known here", do="Ask the operator for one (`sublet person token`).")
        return self._in_time(row), digest

    def _in_time(self, row: tuple[Any, ...]) -> Person:
        person = _person(row)
        if person.expires_ns is not None and person.expires_ns <= self._wall_ns():
            raise Unauthorized("the token has expired", do="Ask the operator for another (`sublet person token`).")
        return person

    def _new_token(self) -> str:
        return TOKEN_PREFIX + _text(self._random(SECRET_BYTES))

    def _until_ns(self, valid_s: float | None) -> int | None:
        return None if valid_s is None else self._wall_ns() + round(valid_s * NS_PER_S)


def _person(row: tuple[Any, ...]) -> Person:
    ident, name, tenant, _, expires_ns = row[:5]
    return Person(id=ident, name=name, tenant=tenant, expires_ns=expires_ns)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _text(random: bytes) -> str:
    return base64.urlsafe_b64encode(random).rstrip(b"=").decode("ascii")
