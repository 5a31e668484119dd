"""People, tokens and cookies, on a clock that is handed in."""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
from pathlib import Path

import pytest

from sublet.errors import InvalidRequest, JournalError, NotFound, Unauthorized
from sublet.studio.people import COOKIE_S, TOKEN_PREFIX, NotSignedIn, People
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


def test_a_token_is_its_persons_and_stored_as_its_hash(stage: Stage) -> None:
    made, token = stage.people.add("ana", "physics")
    assert token.startswith(TOKEN_PREFIX)
    assert stage.people.of_token(token) == made == stage.people.find("ana")
    content = b"".join(path.read_bytes() for path in stage.people._database.path.parent.iterdir())
    assert token.removeprefix(TOKEN_PREFIX).encode() not in content
    assert hashlib.sha256(token.encode()).hexdigest().encode() in content
    for wrong in ("", "☃", "\ud800", token[:-1], f"{token} ", token * 50, hashlib.sha256(token.encode()).hexdigest()):
        with pytest.raises(Unauthorized, match="not known"):
            stage.people.of_token(wrong)


def test_a_new_token_ends_the_old_one_and_its_cookies_at_once(stage: Stage) -> None:
    _, old = stage.people.add("ana", "physics")
    cookie = stage.people.sign_in(old)
    assert stage.people.of_cookie(cookie).name == "ana"
    new = stage.people.new_token("ana")
    with pytest.raises(Unauthorized):
        stage.people.of_token(old)
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(cookie)
    assert stage.people.of_cookie(stage.people.sign_in(new)).name == "ana"


def test_tokens_and_cookies_are_good_for_their_time(stage: Stage) -> None:
    _, token = stage.people.add("ana", "physics", 2 * COOKIE_S)
    cookie = stage.people.sign_in(token)
    stage.now_ns += COOKIE_S * NS_PER_S - 1
    assert stage.people.of_cookie(cookie).name == "ana"
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
    _, token = stage.people.add("ana", "physics", 60)
    cookie = stage.people.sign_in(token)
    stage.now_ns += 60 * NS_PER_S
    with pytest.raises(NotSignedIn, match="expired"):
        stage.people.of_cookie(cookie)


def test_signing_out_ends_one_browser_alone(stage: Stage) -> None:
    _, token = stage.people.add("ana", "physics")
    here, there = stage.people.sign_in(token), stage.people.sign_in(token)
    stage.people.sign_out(here)
    stage.people.sign_out(here)
    with pytest.raises(NotSignedIn):
        stage.people.of_cookie(here)
    assert stage.people.of_cookie(there).name == "ana"
    for wrong in ("", "☃", token, "x" * 10_000):
        with pytest.raises(NotSignedIn):
            stage.people.of_cookie(wrong)


def test_old_cookies_are_not_kept(stage: Stage) -> None:
    _, token = stage.people.add("ana", "physics")
    for _ in range(3):
        stage.people.sign_in(token)
        stage.now_ns += COOKIE_S * NS_PER_S
    with sqlite3.connect(stage.people._database.path) as db:
        assert db.execute("SELECT count(*) FROM cookie").fetchone()[0] == 1
    db.close()


def test_a_person_who_comes_again_is_another(stage: Stage) -> None:
    """So the sessions of the first are not the second's."""
    first, token = stage.people.add("ana", "physics")
    stage.people.remove("ana")
    with pytest.raises(Unauthorized):
        stage.people.of_token(token)
    with pytest.raises(NotFound):
        stage.people.find("ana")
    assert stage.people.add("ana", "biology")[0].id != first.id


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
        stage.people.new_token("nobody")


def test_people_written_by_another_version_are_refused(stage: Stage) -> None:
    stage.people.add("ana", "physics")
    with sqlite3.connect(stage.people._database.path) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(JournalError, match=r"the people of the studio .* another Sublet"):
        stage.people.all()
