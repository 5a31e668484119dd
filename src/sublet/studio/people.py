"""The people of a studio: their tenants, roles, tokens and invites.

A person has any number of *tokens*, each with a label, until when it is good, and what it opens. A token is
``sublet_studio_`` and 32 random bytes, shown once; only its SHA-256 is stored. There is no need for salt or a slow
hash, because 256 random bits cannot be guessed. A browser that has shown a token gets a *cookie*, as random and stored
in the same way, which ends with the token that it was given for. An *invite* opens the page once: a browser that shows
it gets the person's first token and a cookie. All are looked up by their hash and compared in constant time. What
was read is used again only while nothing was written, so what is taken back opens nothing from then on.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import sqlite3
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from sublet.client.home import make_private_dir
from sublet.errors import InvalidRequest, NotFound, SubletError, Unauthorized
from sublet.lazy_dataclass import dataclass
from sublet.studio.store import Database, SqliteStore
from sublet.values import NS_PER_S, valid_name

DATABASE: Final = "people.db"
PEOPLE_MAX: Final = 10_000
TOKENS_MAX: Final = 20
"""Tokens of one person."""
COURSES_MAX: Final = 20
"""Groups of one teacher."""
OWNER_TENANT: Final = "local"
"""The tenant of the office's owner. Its sessions are those of `sublet session`, so it has one person at most."""
TOKEN_PREFIX: Final = "sublet_studio_"
INVITE_PREFIX: Final = "sublet_invite_"
FIRST_LABEL: Final = "main"
"""The label of a token for which none is said."""
HUB_LABEL: Final = "hub"
"""The label under which browsers are signed in that a JupyterHub knows; no person has this token."""
SERVER_LABEL: Final = "hub-server"
"""The labels of the tokens of single-user servers begin so. They sign no browser in."""
COOKIE_S: Final = 12 * 3600
"""A browser is asked for the token again after this long, where nothing else is said."""
INVITE_S: Final = 14 * 86_400
"""An invite is good for this long where nothing else is said."""
SECRET_BYTES: Final = 32
_SECRET_LENGTH_MAX: Final = 256
ROWS_MAX: Final = 20_000
"""Secrets that are remembered with what they open."""
_Row: TypeAlias = tuple[Any, ...]
_SCHEMA: Final = """
CREATE TABLE person (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    operator INTEGER NOT NULL
) STRICT;
CREATE TABLE token (
    secret TEXT PRIMARY KEY,
    person TEXT NOT NULL REFERENCES person ON DELETE CASCADE,
    label TEXT NOT NULL,
    expires_ns INTEGER,
    read_only INTEGER NOT NULL,
    session TEXT,
    UNIQUE (person, label)
) STRICT;
CREATE TABLE cookie (
    secret TEXT PRIMARY KEY,
    token TEXT NOT NULL REFERENCES token ON DELETE CASCADE,
    expires_ns INTEGER NOT NULL
) STRICT;
CREATE TABLE invite (
    person TEXT PRIMARY KEY REFERENCES person ON DELETE CASCADE,
    secret TEXT NOT NULL UNIQUE,
    expires_ns INTEGER NOT NULL
) STRICT;
"""
_TEACHES: Final = """
CREATE TABLE teaches (
    person TEXT NOT NULL REFERENCES person ON DELETE CASCADE,
    course TEXT NOT NULL,
    PRIMARY KEY (person, course)
) STRICT
"""
_UPGRADES: Final = {1: (_TEACHES,)}
_COLUMNS: Final = (
    "person.id, person.name, person.tenant, person.operator, "
    "(SELECT group_concat(course, ' ') FROM teaches WHERE teaches.person = person.id)"
)
"""Of a person; names of groups have no spaces."""
_TOKEN: Final = (
    "token.secret, token.label, token.expires_ns, token.read_only, token.session, "
    f"{_COLUMNS} FROM token JOIN person ON person.id = token.person"
)
_PERSON: Final = f"SELECT {_COLUMNS} FROM person"
_BY_TOKEN: Final = f"SELECT {_TOKEN} WHERE token.secret = ?"
_BY_COOKIE: Final = (
    f"SELECT cookie.secret, cookie.expires_ns, {_TOKEN} JOIN cookie ON cookie.token = token.secret "
    "WHERE cookie.secret = ?"
)


class NotSignedIn(Unauthorized):
    """A browser shows no cookie that is known and in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Someone whom the operator added."""

    id: str
    """Never used again, so that a later person of the same name is another."""
    name: str
    tenant: str
    is_operator: bool = False
    """Whether the person sees the whole office, and may drain nodes and clear quarantined devices."""
    teaches: tuple[str, ...] = ()
    """Groups of the office whose members the person sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScope:
    """What a token opens: everything of its person, if nothing else is said."""

    read_only: bool = False
    session: str | None = None
    """Only the session of this id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of a person, without its secret."""

    person: Person
    label: str
    expires_ns: int | None
    """Until when it is good, in wall time; None: until it is revoked or replaced."""
    scope: TokenScope


class People:
    """All people of one studio. Safe to use from several threads and processes."""

    def __init__(self, folder: Path, *, wall_ns: Callable[[], int], random: Callable[[int], bytes]) -> None:
        self._database = Database(
            folder / DATABASE,
            f"{_SCHEMA}{_TEACHES};",
            version=2,
            what="the people of the studio",
            upgrades=_UPGRADES,
        )
        self._wall_ns, self._random = wall_ns, random
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], _Row] = {}
        """By query and digest of a secret."""
        self._rows_mark: Hashable = None
        """Of the database when the first of them was read."""

    # ---- who there is

    def all(self) -> list[Person]:
        """All people, by name."""
        with self._database.opened() as db:
            return [_person(row) for row in db.execute(f"{_PERSON} ORDER BY name")]

    def count(self) -> int:
        """How many there are."""
        with self._database.opened() as db:
            return int(db.execute("SELECT count(*) FROM person").fetchone()[0])

    def find(self, name: str) -> Person:
        """By name; raises ``NotFound``."""
        with self._database.opened() as db:
            row = db.execute(f"{_PERSON} WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise NotFound(f"there is no person {name[:40]}", do="`sublet person ls` lists them.")
        return _person(row)

    def add(self, name: str, tenant: str) -> Person:
        """A new person, who has no token yet."""
        made = self._new(name, tenant)
        with self._database.changing() as db:
            _insert(db, made)
        return made

    def set_role(self, name: str, *, operator: bool = False, teaches: Sequence[str] = ()) -> None:
        """An operator, a teacher of these groups, or else a member, from the next request on."""
        person = self.find(name)
        courses = sorted({valid_name(one, "group name") for one in teaches})
        if len(courses) > COURSES_MAX:
            raise InvalidRequest(f"a person teaches at most {COURSES_MAX} groups", do="Name fewer.")
        with self._database.changing() as db:
            db.execute("UPDATE person SET operator = ? WHERE id = ?", (int(operator), person.id))
            db.execute("DELETE FROM teaches WHERE person = ?", (person.id,))
            db.executemany("INSERT INTO teaches VALUES (?, ?)", [(person.id, one) for one in courses])

    def remove(self, name: str) -> None:
        """Tokens, cookies and invite open nothing from then on."""
        person = self.find(name)
        with self._database.changing() as db:
            db.execute("DELETE FROM person WHERE id = ?", (person.id,))

    # ---- tokens

    def tokens(self, person: Person) -> list[Token]:
        """The person's tokens, by label; those that have expired too."""
        with self._database.opened() as db:
            rows = db.execute(f"SELECT {_TOKEN} WHERE person.id = ? ORDER BY token.label", (person.id,)).fetchall()
        return [_token(row) for row in rows]

    def new_token(
        self, name: str, label: str = FIRST_LABEL, *, valid_s: float | None = None, scope: TokenScope | None = None
    ) -> str:
        """A token, to be shown this once. The one with this label before it, and its cookies, open nothing more."""
        person = self.find(name)
        with self._database.changing() as db:
            made = self._insert_token(db, person, valid_name(label, "label"), valid_s, scope or TokenScope())
        self._make_store(person)
        return made

    def revoke(self, name: str, label: str | None = None) -> int:
        """The token with this label opens nothing from then on; without one, all tokens and the invite do not. How many
        tokens that were."""
        person = self.find(name)
        with self._database.changing() as db:
            if label is None:
                db.execute("DELETE FROM invite WHERE person = ?", (person.id,))
                return db.execute("DELETE FROM token WHERE person = ?", (person.id,)).rowcount
            ended = db.execute("DELETE FROM token WHERE person = ? AND label = ?", (person.id, label)).rowcount
        if not ended:
            raise NotFound(f"{name} has no token {label[:40]}", do=f"`sublet person show {name}` lists them.")
        return ended

    def of_token(self, token: str) -> Token:
        """What this opens; raises ``Unauthorized``."""
        return self._of_token(token)[0]

    def of_servers(self) -> list[Token]:
        """The tokens of single-user servers; those that have expired too."""
        with self._database.opened() as db:
            found = db.execute(
                f"SELECT {_TOKEN} WHERE substr(token.label, 1, ?) = ?", (len(SERVER_LABEL), SERVER_LABEL)
            )
            return [_token(row) for row in found.fetchall()]

    def prolong(self, token: Token, valid_s: float) -> None:
        """The token, where it still is one, is good for so long from now on."""
        until_ns = self._wall_ns() + round(valid_s * NS_PER_S)
        with self._database.changing() as db:
            row = (until_ns, token.person.id, token.label)
            db.execute("UPDATE token SET expires_ns = ? WHERE person = ? AND label = ?", row)

    def sweep_servers(self, name: str) -> None:
        """The tokens of this person's servers that have expired no longer count."""
        person = self.find(name)
        with self._database.changing() as db:
            db.execute(
                "DELETE FROM token WHERE person = ? AND substr(label, 1, ?) = ? AND expires_ns <= ?",
                (person.id, len(SERVER_LABEL), SERVER_LABEL, self._wall_ns()),
            )

    # ---- browsers

    def sign_in(self, token: str, valid_s: float = COOKIE_S) -> str:
        """A cookie for a browser that shows this token; raises ``Unauthorized``."""
        found, secret = self._of_token(token)
        if (found.scope.read_only and found.scope.session is None) or found.label.startswith(SERVER_LABEL):
            raise Unauthorized(
                "that token is for a program: it may only read",
                do="Sign in with one that may change sessions, or with one of a session (`sublet person token`).",
            )
        with self._database.changing() as db:
            return self._insert_cookie(db, secret, valid_s)

    def sign_in_by_hub(self, person: Person, valid_s: float = COOKIE_S) -> str:
        """A cookie for a browser whose person a JupyterHub has named."""
        with self._database.changing() as db:
            of = (person.id, HUB_LABEL)
            row = db.execute("SELECT secret FROM token WHERE person = ? AND label = ?", of).fetchone()
            if row is None:
                secret = _hash(self._insert_token(db, person, HUB_LABEL, valid_s, TokenScope()))
            else:
                secret = row[0]
                until_ns = self._wall_ns() + round(valid_s * NS_PER_S)
                db.execute("UPDATE token SET expires_ns = ? WHERE secret = ?", (until_ns, secret))
            cookie = self._insert_cookie(db, secret, valid_s)
        self._make_store(person)
        return cookie

    def sign_out(self, cookie: str) -> None:
        """The cookie opens nothing from then on."""
        with self._database.changing() as db:
            db.execute("DELETE FROM cookie WHERE secret = ?", (_hash(cookie),))

    def of_cookie(self, cookie: str) -> Token:
        """The token that this browser has shown, and so what it opens; raises ``NotSignedIn``."""
        digest = _hash(cookie[:_SECRET_LENGTH_MAX])
        return self._signed_in(digest, self._row(_BY_COOKIE, digest))

    def of_cookies(self, cookies: Sequence[str]) -> dict[str, Token]:
        """Those of these browsers that are signed in, as ``of_cookie`` finds them one by one."""
        found: dict[str, Token] = {}
        with self._database.opened() as db:
            for cookie in cookies:
                digest = _hash(cookie[:_SECRET_LENGTH_MAX])
                with contextlib.suppress(NotSignedIn):
                    found[cookie] = self._signed_in(digest, db.execute(_BY_COOKIE, (digest,)).fetchone())
        return found

    def mark(self) -> Hashable:
        """Another one whenever something of people, tokens or browsers was written, by whichever process."""
        return self._database.mark()

    # ---- invites

    def invite(self, name: str, valid_s: float = INVITE_S) -> str:
        """An invite, to be shown this once, that is good once; the person's invite before it opens nothing more."""
        person = self.find(name)
        with self._database.changing() as db:
            return self._insert_invite(db, person, valid_s)

    def invite_all(self, people: Sequence[tuple[str, str]], valid_s: float = INVITE_S) -> list[tuple[Person, str]]:
        """New people, each with an invite: all of them, or none where one cannot be added."""
        made = [self._new(name, tenant) for name, tenant in people]
        with self._database.changing() as db:
            for one in made:
                _insert(db, one)
            return [(one, self._insert_invite(db, one, valid_s)) for one in made]

    def invited_until_ns(self, person: Person) -> int | None:
        """Until when the person's invite is good, in wall time; None where there is none, or it was used."""
        with self._database.opened() as db:
            row = db.execute("SELECT expires_ns FROM invite WHERE person = ?", (person.id,)).fetchone()
        return None if row is None else int(row[0])

    def accept(self, invite: str, valid_s: float = COOKIE_S) -> tuple[Person, str, str]:
        """The invited person, the first token, to be shown this once, and a cookie. The invite opens nothing more.
        Raises ``Unauthorized``."""
        digest = _hash(invite[:_SECRET_LENGTH_MAX])
        with self._database.changing() as db:
            row = db.execute(
                f"SELECT {_COLUMNS}, invite.secret, invite.expires_ns FROM invite "
                "JOIN person ON person.id = invite.person WHERE invite.secret = ?",
                (digest,),
            ).fetchone()
            if row is None or not hmac.compare_digest(digest, row[5]):
                raise Unauthorized(
                    "the invite is not known here, or was used already",
                    do="Sign in with your token; if you have none, ask the operator for another invite.",
                )
            if row[6] <= self._wall_ns():
                raise Unauthorized(
                    "the invite has expired", do="Ask the operator for another (`sublet person invite`)."
                )
            person = _person(row)
            db.execute("DELETE FROM invite WHERE person = ?", (person.id,))
            token = self._insert_token(db, person, FIRST_LABEL, None, TokenScope())
            cookie = self._insert_cookie(db, _hash(token), valid_s)
        self._make_store(person)
        return person, token, cookie

    # ---- within

    def _make_store(self, person: Person) -> None:
        """The database of the person's sessions, which the first request then need not wait for."""
        with contextlib.suppress(OSError, SubletError):  # a disk without room: the first session makes it, or says so
            folder = records_folder(self._database.path.parent, person)
            make_private_dir(folder.parent)
            SqliteStore(folder).make()

    def _row(self, query: str, digest: str) -> _Row | None:
        """The row of a secret. It is remembered until anything in the database was written, by whichever process: to
        open the database takes longer than all the rest of most requests."""
        mark = self._database.mark()
        with self._lock:
            if mark != self._rows_mark or len(self._rows) >= ROWS_MAX:
                self._rows, self._rows_mark = {}, mark
            rows = self._rows
        row = rows.get((query, digest))
        if row is None:
            with self._database.opened() as db:
                row = db.execute(query, (digest,)).fetchone()
            if row is not None:
                rows[query, digest] = row
        return row

    def _signed_in(self, digest: str, row: _Row | None) -> Token:
        if row is None or not hmac.compare_digest(digest, row[0]) or row[1] <= self._wall_ns():
            raise NotSignedIn("this browser is not signed in", do="Sign in with your token.")
        try:
            return self._in_time(_token(row[2:]))
        except Unauthorized as error:
            raise NotSignedIn(error.message, do=error.do) from error

    def _new(self, name: str, tenant: str) -> Person:
        name, tenant = valid_name(name, "person's name"), valid_name(tenant, "tenant name")
        return Person(id=f"p-{self._random(8).hex()}", name=name, tenant=tenant)

    def _insert_token(
        self, db: sqlite3.Connection, person: Person, label: str, valid_s: float | None, scope: TokenScope
    ) -> str:
        token = TOKEN_PREFIX + _text(self._random(SECRET_BYTES))
        db.execute("DELETE FROM token WHERE person = ? AND label = ?", (person.id, label))
        if db.execute("SELECT count(*) FROM token WHERE person = ?", (person.id,)).fetchone()[0] >= TOKENS_MAX:
            raise InvalidRequest(
                f"a person has at most {TOKENS_MAX} tokens",
                do=f"Revoke one: `sublet person revoke {person.name} LABEL`.",
            )
        until_ns = None if valid_s is None else self._wall_ns() + round(valid_s * NS_PER_S)
        row = (_hash(token), person.id, label, until_ns, int(scope.read_only), scope.session)
        db.execute("INSERT INTO token VALUES (?, ?, ?, ?, ?, ?)", row)
        return token

    def _insert_cookie(self, db: sqlite3.Connection, token: str, valid_s: float) -> str:
        cookie, now_ns = _text(self._random(SECRET_BYTES)), self._wall_ns()
        db.execute("DELETE FROM cookie WHERE expires_ns <= ?", (now_ns,))
        db.execute("INSERT INTO cookie VALUES (?, ?, ?)", (_hash(cookie), token, now_ns + round(valid_s * NS_PER_S)))
        return cookie

    def _insert_invite(self, db: sqlite3.Connection, person: Person, valid_s: float) -> str:
        invite = INVITE_PREFIX + _text(self._random(SECRET_BYTES))
        until_ns = self._wall_ns() + round(valid_s * NS_PER_S)
        db.execute("INSERT OR REPLACE INTO invite VALUES (?, ?, ?)", (person.id, _hash(invite), until_ns))
        return invite

    def _of_token(self, token: str) -> tuple[Token, str]:
        digest = _hash(token[:_SECRET_LENGTH_MAX])
        row = self._row(_BY_TOKEN, digest)
        if row is None or not hmac.compare_digest(digest, row[0]):
            raise Unauthorized("the token is not known here", do="Ask the operator for one (`sublet person token`).")
        return self._in_time(_token(row)), digest

    def _in_time(self, token: Token) -> Token:
        if token.expires_ns is not None and token.expires_ns <= self._wall_ns():
            raise Unauthorized("the token has expired", do="Ask the operator for another (`sublet person token`).")
        return token


def records_folder(folder: Path, person: Person) -> Path:
    """Where the records of this person's sessions lie. ``folder``: of all sessions."""
    return folder if person.tenant == OWNER_TENANT else folder / "people" / person.id


def _insert(db: sqlite3.Connection, person: Person) -> None:
    if db.execute("SELECT 1 FROM person WHERE name = ?", (person.name,)).fetchone():
        raise InvalidRequest(f"there is a person {person.name} already", do="Use another name.")
    of_tenant = db.execute("SELECT 1 FROM person WHERE tenant = ?", (person.tenant,)).fetchone()
    if person.tenant == OWNER_TENANT and of_tenant:
        raise InvalidRequest(
            f"the sessions of tenant {person.tenant} are the owner's, and another person has them already",
            do="Bind this one to a tenant of its own: `sublet tenant add NAME`.",
        )
    if db.execute("SELECT count(*) FROM person").fetchone()[0] >= PEOPLE_MAX:
        raise InvalidRequest(f"a studio has at most {PEOPLE_MAX} people", do="Remove some first.")
    row = (person.id, person.name, person.tenant, int(person.is_operator))
    db.execute("INSERT INTO person VALUES (?, ?, ?, ?)", row)


def _person(row: tuple[Any, ...]) -> Person:
    ident, name, tenant, operator, teaches = row[:5]
    courses = tuple(sorted((teaches or "").split()))
    return Person(id=ident, name=name, tenant=tenant, is_operator=bool(operator), teaches=courses)


def _token(row: tuple[Any, ...]) -> Token:
    _, label, expires_ns, read_only, session = row[:5]
    scope = TokenScope(read_only=bool(read_only), session=session)
    return Token(person=_person(row[5:]), label=label, expires_ns=expires_ns, scope=scope)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _text(random: bytes) -> str:
    return base64.urlsafe_b64encode(random).rstrip(b"=").decode("ascii")
