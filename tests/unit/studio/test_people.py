"""People, tokens and cookies, on a clock that is handed in."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import secrets
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sublet.errors import InvalidRequest, JournalError, NotFound, Unauthorized
from sublet.studio.people import (
    COOKIE_S,
    COURSES_MAX,
    FIRST_LABEL,
    HUB_LABEL,
    INVITE_PREFIX,
    SERVER_LABEL,
    TOKEN_PREFIX,
    TOKENS_MAX,
    NotSignedIn,
    People,
    Token,
    TokenScope,
    records_folder,
)
from sublet.studio.store import DATABASE, FRESH_NS, Database
from sublet.values import NS_PER_S


class Stage:
    """The people of one studio, its time and its chance."""

    def __init__(self, folder: Path) -> None:
        self.now_ns = 1_000 * NS_PER_S
        numbers = itertools.count(1)
        self.people = People(
            folder, wall_ns=lambda: self.now_ns, random=lambda size: next(numbers).to_bytes(size, "big")
        )


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "studio")


def member(stage: Stage, name: str = "ana", valid_s: float | None = None) -> str:
    """The token of a new person."""
    stage.people.add(name, "physics")
    return stage.people.new_token(name, valid_s=valid_s)


def on_disk(stage: Stage) -> bytes:
    files = (path for path in stage.people._database.path.parent.rglob("*") if path.is_file())
    return b"".join(path.read_bytes() for path in files)


def test_a_token_is_its_persons_and_stored_as_its_hash(stage: Stage) -> None:
    token = member(stage)
    assert token.startswith(TOKEN_PREFIX)
    assert stage.people.of_token(token) == Token(
        person=stage.people.find("ana"), label=FIRST_LABEL, expires_ns=None, scope=TokenScope()
    )
    assert token.removeprefix(TOKEN_PREFIX).encode() not in on_disk(stage)
    assert hashlib.sha256(token.encode()).hexdigest().encode() in on_disk(stage)
    for wrong in ("", "☃", "\ud800", token[:-1], f"{token} ", token * 50, hashlib.sha256(token.encode()).hexdigest()):
        with pytest.raises(Unauthorized, match="not known"):
            stage.people.of_token(wrong)


def test_what_another_studio_gave_out_opens_nothing_here(stage: Stage, tmp_path: Path) -> None:
    """Its token, its browser's cookie, its invite: refused as if they did not exist, also for a person of that name."""
    other = People(tmp_path / "other", wall_ns=lambda: stage.now_ns, random=secrets.token_bytes)
    for people in (stage.people, other):
        people.add("ana", "physics")
    token, invite = other.new_token("ana"), other.invite("ana")
    cookie = other.sign_in(token)
    for opens, text in (
        (stage.people.sign_in, token),
        (stage.people.of_token, token),
        (stage.people.of_cookie, cookie),
        (stage.people.accept, invite),
    ):
        with pytest.raises(Unauthorized) as foreign:
            opens(text)
        with pytest.raises(Unauthorized) as unknown:
            opens(text[:-1] + ("a" if text[-1] != "a" else "b"))
        assert str(foreign.value) == str(unknown.value)
    assert stage.people.of_cookies([cookie]) == {}


def test_a_new_token_ends_the_old_one_of_its_label_and_its_cookies_at_once(stage: Stage) -> None:
    old = member(stage)
    laptop = stage.people.new_token("ana", "laptop")
    cookie, other = stage.people.sign_in(old), stage.people.sign_in(laptop)
    assert stage.people.of_cookie(cookie).person.name == "ana"
    new = stage.people.new_token("ana")
    with pytest.raises(Unauthorized):
        stage.people.of_token(old)
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(cookie)
    assert stage.people.of_cookie(stage.people.sign_in(new)).person.name == "ana"
    assert stage.people.of_cookie(other).person.name == "ana"
    assert [one.label for one in stage.people.tokens(stage.people.find("ana"))] == ["laptop", FIRST_LABEL]


def test_a_token_is_revoked_alone_or_with_all_others_and_the_invite(stage: Stage) -> None:
    main, laptop = member(stage), stage.people.new_token("ana", "laptop")
    other = member(stage, "bob")
    assert stage.people.revoke("ana", "laptop") == 1
    with pytest.raises(Unauthorized):
        stage.people.of_token(laptop)
    assert stage.people.of_token(main).label == FIRST_LABEL
    with pytest.raises(NotFound, match="ana has no token laptop"):
        stage.people.revoke("ana", "laptop")
    cookie, invite = stage.people.sign_in(main), stage.people.invite("ana")
    stage.people.new_token("ana", "laptop")
    assert stage.people.revoke("ana") == 2
    assert stage.people.revoke("ana") == 0
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(cookie)
    with pytest.raises(Unauthorized, match="used already"):
        stage.people.accept(invite)
    assert stage.people.of_token(other).person.name == "bob"


def test_a_secret_is_read_once_until_any_process_writes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process changes holds from the next request on, soon after a write as long after it."""
    folder = stage.people._database.path.parent
    other = People(folder, wall_ns=lambda: stage.now_ns, random=secrets.token_bytes)
    token = member(stage)
    cookie = stage.people.sign_in(token)
    opened, original = list[Database](), Database.opened

    def counted(database: Database) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        opened.append(database)
        return original(database)

    monkeypatch.setattr(Database, "opened", counted)

    def settle() -> None:
        """Until a mark of the database is the same for as long as nothing is written."""
        time.sleep(2 * FRESH_NS / NS_PER_S)

    def look(times: int = 3) -> int:
        """How often the database was opened for it."""
        opened.clear()
        for _ in range(times):
            assert stage.people.of_token(token) == stage.people.of_cookie(cookie)
        return len(opened)

    settle()
    assert (look(), look()) == (2, 0)
    with pytest.raises(Unauthorized):
        stage.people.of_token("sublet_studio_unknown")
    assert len(stage.people._rows) == 2, "what opens nothing is not remembered"
    other.set_role("ana", operator=True)
    assert stage.people.of_token(token).person.is_operator
    assert 2 <= look() <= 6, "soon after a write it is read each time"
    other.set_role("ana", operator=False)  # the look above may have come late enough to be remembered
    settle()
    assert (look(), look()) == (2, 0)
    stage.now_ns += COOKIE_S * NS_PER_S
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(cookie)
    stage.now_ns -= COOKIE_S * NS_PER_S
    assert other.revoke("ana") == 1
    with pytest.raises(Unauthorized):
        stage.people.of_token(token)
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(cookie)


def test_of_many_processes_that_write_none_is_overlooked(tmp_path: Path) -> None:
    """A token is made and taken back again and again, at any distance, and after each it opens or does not."""
    here = People(tmp_path, wall_ns=time.time_ns, random=secrets.token_bytes)
    there = People(tmp_path, wall_ns=time.time_ns, random=secrets.token_bytes)
    here.add("ana", "physics")
    kept = here.new_token("ana", "kept")
    for number in range(40):
        token = there.new_token("ana", "laptop")
        assert here.of_token(token).label == "laptop"
        time.sleep(number % 8 * FRESH_NS / NS_PER_S / 4)
        assert here.of_token(token) == there.of_token(token)
        assert there.revoke("ana", "laptop") == 1
        with pytest.raises(Unauthorized):
            here.of_token(token)
        assert here.of_token(kept).label == "kept"


def test_a_token_and_its_browsers_keep_what_it_opens_and_one_that_only_reads_signs_none_in(stage: Stage) -> None:
    stage.people.add("ana", "physics")
    for label, scope in (
        ("shows", TokenScope(read_only=True)),
        ("one", TokenScope(session="s-1")),
        ("both", TokenScope(read_only=True, session="s-1")),
    ):
        token = stage.people.new_token("ana", label, scope=scope)
        assert stage.people.of_token(token).scope == scope
        if scope.session is not None:
            assert stage.people.of_cookie(stage.people.sign_in(token)).scope == scope
            continue
        with pytest.raises(Unauthorized, match="for a program"):
            stage.people.sign_in(token)


def test_a_person_has_a_bounded_number_of_tokens(stage: Stage) -> None:
    member(stage)
    for number in range(TOKENS_MAX - 1):
        stage.people.new_token("ana", f"l{number}")
    with pytest.raises(InvalidRequest, match="at most"):
        stage.people.new_token("ana", "more")
    stage.people.new_token("ana", "l0")
    for label in ("", "Main", "../up", "☃", "x" * 64):
        with pytest.raises(InvalidRequest, match="not a valid label"):
            stage.people.new_token("ana", label)
    assert len(stage.people.tokens(stage.people.find("ana"))) == TOKENS_MAX


@pytest.mark.parametrize("how", ["token", "invite", "hub"])
def test_with_the_first_token_a_person_has_a_database_for_sessions(stage: Stage, tmp_path: Path, how: str) -> None:
    """So that a request, which is in more of a hurry, does not wait until one is made. Who only was added has none, and
    a disk that takes none is no error here."""
    people, folder = stage.people, tmp_path / "studio"
    for name in ("ana", "bob"):
        person = people.add(name, "physics")
        database = records_folder(folder, person) / DATABASE
        assert database == folder / "people" / person.id / DATABASE
        assert not database.exists()
        if name == "bob":
            shutil.rmtree(folder / "people")
            (folder / "people").touch()
        if how == "token":
            people.of_token(people.new_token(name))
        elif how == "invite":
            people.of_token(people.accept(people.invite(name))[1])
        else:
            people.of_cookie(people.sign_in_by_hub(person))
        if name == "ana":
            with contextlib.closing(sqlite3.connect(database)) as db:
                assert db.execute("SELECT count(*) FROM record").fetchone() == (0,)


def test_an_invite_is_good_once(stage: Stage) -> None:
    """It gives a token and a cookie, and is stored as its hash; a link that is shown again opens nothing."""
    stage.people.add("ana", "physics")
    invite = stage.people.invite("ana")
    assert invite.startswith(INVITE_PREFIX)
    assert invite.removeprefix(INVITE_PREFIX).encode() not in on_disk(stage)
    person, token, cookie = stage.people.accept(invite)
    assert (
        stage.people.of_token(token).person
        == stage.people.of_cookie(cookie).person
        == person
        == stage.people.find("ana")
    )
    assert stage.people.invited_until_ns(person) is None
    for wrong in (invite, invite[:-1], "", "☃", token, "x" * 10_000):
        with pytest.raises(Unauthorized, match="not known here, or was used already"):
            stage.people.accept(wrong)
    assert stage.people.of_token(token).person == person


def test_an_invite_expires_and_a_new_one_ends_the_one_before(stage: Stage) -> None:
    person = stage.people.add("ana", "physics")
    first, second = stage.people.invite("ana", 60), stage.people.invite("ana", 60)
    with pytest.raises(Unauthorized, match="used already"):
        stage.people.accept(first)
    assert stage.people.invited_until_ns(person) == stage.now_ns + 60 * NS_PER_S
    stage.now_ns += 60 * NS_PER_S
    with pytest.raises(Unauthorized, match="the invite has expired"):
        stage.people.accept(second)
    assert stage.people.tokens(person) == []
    stage.people.accept(stage.people.invite("ana"))


def test_of_many_accepts_of_one_invite_one_gets_a_token(tmp_path: Path) -> None:
    """Each in a thread of its own, on a database that each opens."""
    people = People(tmp_path, wall_ns=time.time_ns, random=secrets.token_bytes)
    people.add("ana", "physics")
    invite = people.invite("ana")

    def accept(_: int) -> str:
        other = People(tmp_path, wall_ns=time.time_ns, random=secrets.token_bytes)
        try:
            return other.accept(invite)[1]
        except Unauthorized:
            return ""

    with ThreadPoolExecutor(8) as pool:
        given = [token for token in pool.map(accept, range(8)) if token]
    assert [people.of_token(token).person.name for token in given] == ["ana"]


def test_people_are_added_all_or_not_at_all(stage: Stage) -> None:
    stage.people.add("eve", "physics")
    with pytest.raises(InvalidRequest, match="a person eve already"):
        stage.people.invite_all([("ana", "physics"), ("eve", "physics")])
    assert [person.name for person in stage.people.all()] == ["eve"]
    invited = stage.people.invite_all([("ana", "physics"), ("bob", "biology")], 60)
    assert [stage.people.accept(invite)[0] for _, invite in invited] == [person for person, _ in invited]
    assert [(person.name, person.tenant) for person in stage.people.all()] == [
        ("ana", "physics"),
        ("bob", "biology"),
        ("eve", "physics"),
    ]


def test_tokens_and_cookies_are_good_for_their_time(stage: Stage) -> None:
    token = member(stage, valid_s=2 * COOKIE_S)
    cookie = stage.people.sign_in(token)
    stage.now_ns += COOKIE_S * NS_PER_S - 1
    assert stage.people.of_cookie(cookie).person.name == "ana"
    stage.now_ns += 1
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(cookie)
    later = stage.people.sign_in(token)
    stage.now_ns += COOKIE_S * NS_PER_S - 1  # the cookie would be good, and its token is not
    stage.now_ns += 1
    with pytest.raises(Unauthorized, match="expired"):
        stage.people.of_token(token)
    with pytest.raises(Unauthorized, match="expired"):
        stage.people.sign_in(token)
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(later)


def test_a_cookie_ends_with_a_token_that_expires_before_it(stage: Stage) -> None:
    token = member(stage, valid_s=60)
    cookie = stage.people.sign_in(token)
    stage.now_ns += 60 * NS_PER_S
    with pytest.raises(NotSignedIn, match="expired"):
        stage.people.of_cookie(cookie)


def test_signing_out_ends_one_browser_alone(stage: Stage) -> None:
    token = member(stage)
    here, there = stage.people.sign_in(token), stage.people.sign_in(token)
    stage.people.sign_out(here)
    stage.people.sign_out(here)
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(here)
    assert stage.people.of_cookie(there).person.name == "ana"
    for wrong in ("", "☃", token, "x" * 10_000):
        with pytest.raises(NotSignedIn):
            stage.people.of_cookie(wrong)


def test_old_cookies_are_not_kept(stage: Stage) -> None:
    token = member(stage)
    for _ in range(3):
        stage.people.sign_in(token)
        stage.now_ns += COOKIE_S * NS_PER_S
    with sqlite3.connect(stage.people._database.path) as db:
        assert db.execute("SELECT count(*) FROM cookie").fetchone()[0] == 1
    db.close()


def test_an_operator_is_one_from_the_next_request_on(stage: Stage) -> None:
    token = member(stage)
    cookie = stage.people.sign_in(token)
    for is_operator in (True, False):
        stage.people.set_role("ana", operator=is_operator)
        assert stage.people.find("ana").is_operator is is_operator
        assert stage.people.of_cookie(cookie).person.is_operator is is_operator
        assert stage.people.of_token(token).person.is_operator is is_operator
    with pytest.raises(NotFound):
        stage.people.set_role("bob", operator=True)


def test_a_person_who_comes_again_is_another(stage: Stage) -> None:
    """So the sessions of the first are not the second's."""
    token = member(stage)
    first = stage.people.find("ana")
    stage.people.remove("ana")
    with pytest.raises(Unauthorized):
        stage.people.of_token(token)
    with pytest.raises(NotFound):
        stage.people.find("ana")
    assert stage.people.add("ana", "biology").id != first.id


def test_what_cannot_be_added_changes_nothing(stage: Stage) -> None:
    stage.people.add("ana", "physics")
    stage.people.add("owner", "local")
    before = stage.people.all()
    for name, tenant in (
        *(("ana", "physics"), ("Ana", "physics"), ("", "physics"), ("../up", "physics"), ("☃", "physics")),
        *(("bob", ""), ("bob", "<b>"), ("other", "local")),
    ):
        with pytest.raises(InvalidRequest):
            stage.people.add(name, tenant)
    assert stage.people.all() == before
    with pytest.raises(NotFound):
        stage.people.new_token("bob")


def test_people_written_by_another_version_are_refused(stage: Stage) -> None:
    stage.people.add("ana", "physics")
    with sqlite3.connect(stage.people._database.path) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(JournalError, match=r"the people of the studio .* another Sublet"):
        stage.people.all()


def test_a_teacher_is_one_from_the_next_request_on_and_every_way_in_says_so(stage: Stage) -> None:
    """By name, list, token, cookie and invite. A role replaces the one before it."""
    token = member(stage)
    cookie = stage.people.sign_in(token)
    stage.people.set_role("ana", teaches=["ml2", "ml1", "ml2"])
    taught = ("ml1", "ml2")
    assert stage.people.find("ana").teaches == taught
    assert [one.teaches for one in stage.people.all()] == [taught]
    assert stage.people.of_token(token).person.teaches == taught
    assert stage.people.of_cookie(cookie).person.teaches == taught
    assert [one.person.teaches for one in stage.people.tokens(stage.people.find("ana"))] == [taught]
    assert stage.people.accept(stage.people.invite("ana"))[0].teaches == taught
    stage.people.set_role("ana", operator=True)
    assert (stage.people.find("ana").teaches, stage.people.find("ana").is_operator) == ((), True)
    stage.people.set_role("ana")
    assert stage.people.of_cookie(stage.people.sign_in(stage.people.new_token("ana"))).person == stage.people.find(
        "ana"
    )
    assert not stage.people.find("ana").is_operator


def test_a_role_that_cannot_be_given_changes_nothing(stage: Stage) -> None:
    stage.people.add("ana", "physics")
    stage.people.set_role("ana", teaches=["ml1"])
    for groups in (["ml2", "a b"], [""], ["../x"], [f"g{number}" for number in range(COURSES_MAX + 1)]):
        with pytest.raises(InvalidRequest):
            stage.people.set_role("ana", teaches=groups)
        assert stage.people.find("ana").teaches == ("ml1",)
    with pytest.raises(NotFound):
        stage.people.set_role("bob", teaches=["ml1"])
    stage.people.remove("ana")
    stage.people.add("ana", "physics")
    assert stage.people.find("ana").teaches == ()


# ---- a database of an older Sublet

VERSION_1 = """
CREATE TABLE person (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, operator INTEGER NOT NULL)
STRICT;
CREATE TABLE token (secret TEXT PRIMARY KEY, person TEXT NOT NULL REFERENCES person ON DELETE CASCADE,
    label TEXT NOT NULL, expires_ns INTEGER, read_only INTEGER NOT NULL, session TEXT, UNIQUE (person, label)) STRICT;
CREATE TABLE cookie (secret TEXT PRIMARY KEY, token TEXT NOT NULL REFERENCES token ON DELETE CASCADE,
    expires_ns INTEGER NOT NULL) STRICT;
CREATE TABLE invite (person TEXT PRIMARY KEY REFERENCES person ON DELETE CASCADE, secret TEXT NOT NULL UNIQUE,
    expires_ns INTEGER NOT NULL) STRICT;
INSERT INTO person VALUES ('p-1', 'ana', 'physics', 1);
PRAGMA user_version = 1;
"""
OLD_TOKEN = TOKEN_PREFIX + "of-an-older-sublet"


def write_version_1(stage: Stage, more: str = "") -> Path:
    path = stage.people._database.path
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(f"PRAGMA journal_mode = WAL; {VERSION_1} {more}")
        digest = hashlib.sha256(OLD_TOKEN.encode()).hexdigest()
        db.execute("INSERT INTO token VALUES (?, 'p-1', 'main', NULL, 0, NULL)", (digest,))
        db.commit()
    return path


def version(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_people_of_the_version_before_go_on(stage: Stage) -> None:
    """Whoever opens it first upgrades it, several at once too; tokens and roles are as they were."""
    path = write_version_1(stage)
    with ThreadPoolExecutor(8) as pool:
        numbers = itertools.count(1)
        several = [
            People(path.parent, wall_ns=lambda: 0, random=lambda size: next(numbers).to_bytes(size, "big"))
            for _ in range(8)
        ]
        found = list(pool.map(lambda people: people.all(), several))
    assert version(path) == 2
    assert all([(one.name, one.is_operator, one.teaches) for one in people] == [("ana", True, ())] for people in found)
    assert stage.people.of_token(OLD_TOKEN).person.id == "p-1"
    stage.people.set_role("ana", teaches=["ml1"])
    assert stage.people.of_token(OLD_TOKEN).person.teaches == ("ml1",)


def test_an_upgrade_that_fails_leaves_the_version_before(stage: Stage) -> None:
    path = write_version_1(stage, "CREATE TABLE teaches (other INTEGER) STRICT;")
    with pytest.raises(JournalError, match="cannot be read or written"):
        stage.people.all()
    assert version(path) == 1
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM person").fetchall() == [("ana",)]
        db.execute("DROP TABLE teaches")
        db.commit()
    assert [one.name for one in stage.people.all()] == ["ana"]
    assert version(path) == 2


def test_a_browser_that_a_hub_knows_is_signed_in_without_a_token_and_each_for_itself(stage: Stage) -> None:
    """Its token is nobody's: it is revoked under its label, and then all these browsers are out."""
    member(stage)
    ana = stage.people.find("ana")
    one, two = stage.people.sign_in_by_hub(ana, 100), stage.people.sign_in_by_hub(ana, 100)
    assert stage.people.of_cookie(one).label == HUB_LABEL
    stage.people.sign_out(one)
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(one)
    assert stage.people.of_cookie(two).person == ana
    stage.now_ns += 90 * NS_PER_S
    three = stage.people.sign_in_by_hub(ana, 100)
    stage.now_ns += 20 * NS_PER_S
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(two)
    assert stage.people.of_cookie(three).person == ana
    stage.people.revoke("ana", HUB_LABEL)
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(three)


def test_a_servers_token_opens_sessions_and_no_page_and_ends_unless_it_is_prolonged(stage: Stage) -> None:
    member(stage)
    token = stage.people.new_token("ana", f"{SERVER_LABEL}-gpu", valid_s=100)
    found = stage.people.of_token(token)
    assert found.person.name == "ana"
    with pytest.raises(Unauthorized, match="for a program"):
        stage.people.sign_in(token)
    assert stage.people.of_servers() == [found]
    stage.now_ns += 90 * NS_PER_S
    stage.people.prolong(found, 100)
    stage.now_ns += 90 * NS_PER_S
    assert stage.people.of_token(token).person.name == "ana"
    stage.people.sweep_servers("ana")
    assert len(stage.people.of_servers()) == 1
    stage.now_ns += 20 * NS_PER_S
    with pytest.raises(Unauthorized, match="expired"):
        stage.people.of_token(token)
    stage.people.sweep_servers("ana")
    assert stage.people.of_servers() == []
    assert [one.label for one in stage.people.tokens(found.person)] == [FIRST_LABEL]
    stage.people.prolong(found, 100)
    assert stage.people.of_servers() == [], "what was revoked stays revoked"
