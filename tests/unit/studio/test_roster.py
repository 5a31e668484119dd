"""Lists of people: what is taken, and what is said of each line that is wrong."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import InvalidRequest
from sublet.studio.roster import BYTES_MAX, UNREADABLE_MAX, Roster, RosterRefused, read_roster
from sublet.values import valid_name

KNOWN: Final = {"eve": "physics", "o.tto": "physics"}


def read(text: str | bytes, **more: Any) -> Roster:
    data = text if isinstance(text, bytes) else text.encode()
    return read_roster(data, **{"tenant": None, "tenants": ["physics", "biology", "local"], "known": KNOWN, **more})


@pytest.mark.parametrize(
    "text",
    [
        "name,tenant\nana,physics\nbob,biology\n",
        "name,tenant\nana,physics\nbob,biology",
        "\ufeffName, TENANT \r\n ana ,physics\r\n\r\nbob,biology\r\n",
        "name;tenant\nana;physics\nbob;biology\n",
        "tenant,name\nphysics,ana\nbiology,bob\n",
        '"name","tenant"\n"ana","physics"\n,\n"bob","biology"\n',
    ],
)
def test_what_spreadsheets_and_courses_write_is_read(text: str) -> None:
    assert read(text) == Roster((("ana", "physics"), ("bob", "biology")), (), ())


def test_other_columns_are_left_alone_and_one_tenant_can_be_said_for_all() -> None:
    found = read('name,email,notes\nana,ana@example.org,"two\nlines, one value"\nbob,,\n', tenant="physics")
    assert found == Roster((("ana", "physics"), ("bob", "physics")), (), ("email", "notes"))


def test_every_wrong_line_is_named_with_its_number_and_nothing_is_taken() -> None:
    lines = {
        "ana,physics": "",
        "Ana Müller,physics": "'Ana Müller' is not a valid person's name; ana-muller would be",
        "☃,physics": "'☃' is not a valid person's name",
        "ana,biology": "ana is in line 2 already",
        "a-na,physics": "a-na can be mistaken for ana of line 2",
        "eve,physics": "there is a person eve already, of tenant physics",
        "otto,physics": "otto can be mistaken for o.tto, who is there already",
        "carl,chemistry": "there is no tenant 'chemistry'",
        "dora,": "no tenant is named",
        "owner,local": "tenant local is the owner's, and its person is not added by a list",
        "fay": "it has 1 field where the first line has 2; is it cut off?",
        "gus,physics,more": "it has 3 fields where the first line has 2; is it cut off?",
        "hal,physics": "",
    }
    with pytest.raises(RosterRefused, match="11 lines of the list are wrong, and nothing was added") as error:
        read("name,tenant\n" + "\n".join(lines))
    expected = [f"line {number}: {why}" for number, why in enumerate(lines.values(), 2) if why]
    assert list(error.value.lines) == expected


def test_a_line_below_a_value_of_several_lines_has_its_number_in_the_file() -> None:
    with pytest.raises(RosterRefused, match="1 line of the list is wrong") as error:
        read('name,tenant,notes\nana,physics,"two\nlines"\n\ncarl,chemistry,\n')
    assert error.value.lines == ("line 5: there is no tenant 'chemistry'",)


def test_people_who_are_there_are_passed_over_where_that_is_said() -> None:
    found = read("name,tenant\neve,physics\nana,physics\n", skip_known=True)
    assert found == Roster((("ana", "physics"),), ("eve",), ())
    with pytest.raises(RosterRefused) as error:
        read("name,tenant\neve,biology\n", skip_known=True)
    assert error.value.lines == ("line 2: there is a person eve already, of tenant physics",)
    assert read("name,tenant\neve,physics\n", skip_known=True).new == ()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the list is empty"),
        (b"\n \n", "the list is empty"),
        (b"name,tenant\n", "no people in it"),
        (b"ana,physics\n", "does not have one column name and one column tenant: 'ana, physics'"),
        (b"name\nana\n", "does not have one column name and one column tenant"),
        (b"name,tenant,name\nana,physics,x\n", "does not have one column name"),
        ("name,tenant\nana,physics\nb\u00fcb,physics".encode("latin-1"), "line 3 of the list is not UTF-8 (byte 0xfc)"),
        ("name,tenant\nana,physics".encode("utf-16"), "line 1 of the list is not UTF-8"),
        (b'"name,tenant\nana,physics\n', "line 1 of the list cannot be read"),
        (b"name,tenant\n" + b"x" * BYTES_MAX, "more than 4 MiB"),
    ],
)
def test_what_is_no_list_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(data)
    assert said in error.value.message
    assert len(error.value.message) < 300
    assert error.value.do


def test_a_quotation_mark_that_is_not_closed_hides_no_other_wrong_line() -> None:
    """It takes all lines behind it, so they are read for themselves; it was the only line that was named."""
    lines = {
        "ana,physics": "",
        '"bob,physics': "it cannot be read: a quotation mark is not closed",
        "carl,chemistry": "there is no tenant 'chemistry'",
        f"{'x' * 200_000},physics": "it cannot be read: field larger than field limit (131072)",
        "dora,": "no tenant is named",
        "eli,physics": "",
    }
    with pytest.raises(RosterRefused) as error:
        read("name,tenant\n" + "\n".join(lines))
    assert list(error.value.lines) == [f"line {number}: {why}" for number, why in enumerate(lines.values(), 2) if why]
    with pytest.raises(RosterRefused) as error:
        read('name,tenant\n"bob,physics\nana,physics\n"carl,physics\n')
    assert [line.partition(":")[0] for line in error.value.lines] == ["line 2", "line 4"]


def test_of_a_file_that_is_no_list_at_all_a_hundred_lines_are_named() -> None:
    with pytest.raises(RosterRefused) as error:
        read("name,tenant\n" + '"x"y,physics\n' * 100_000)
    assert len(error.value.lines) == UNREADABLE_MAX


def test_one_tenant_for_all_and_a_column_contradict_each_other() -> None:
    with pytest.raises(InvalidRequest, match="has a column tenant, and --tenant is given"):
        read("name,tenant\nana,physics\n", tenant="physics")


def test_more_people_than_a_studio_has_are_refused_in_little_time() -> None:
    text = "name,tenant\n" + "".join(f"s{number},physics\n" for number in range(10_001))
    with pytest.raises(InvalidRequest, match="10001 new people, and a studio has at most 10000"):
        read(text)


LOGINS: Final = {"ana": 2001, "bob": 2002}


def test_a_list_binds_tenants_to_users_and_makes_those_that_are_missing() -> None:
    """Users are named by number or login name; a tenant that is made without one is bound to none."""
    text = "name,tenant,uid\nana,a1,ana\nbob,b1,2002\ncem,c1,\ndora,physics,3001\ngus,biology,4001\n"
    found = read(text, make=True, users={"biology": 4001}, number_of=LOGINS.get)
    assert found.tenants == (("a1", 2001), ("b1", 2002), ("c1", None))
    assert found.bound == (("physics", 3001),), "biology is bound so already"
    assert found.left_alone == ()
    assert [name for name, _ in found.new] == ["ana", "bob", "cem", "dora", "gus"]


def test_a_user_that_is_none_or_anothers_is_named_by_line() -> None:
    lines = {
        "ana,a1,ana": "",
        "bob,b1,nologin": "there is no user 'nologin' on this machine",
        "cem,c1,4294967295": "there is no user '4294967295' on this machine",
        "dora,d1,-1": "there is no user '-1' on this machine",
        "eli,e1,0": "root has the rights of the office's owner, and is no tenant's user",
        "fay,a1,2002": "tenant a1 is bound to user 2001 already",
        "gus,g1,2001": "user 2001 is that of tenant a1 in line 2",
        "hal,physics,5002": "tenant physics is bound to user 5001 already",
        "ivy,i1,5001": "user 5001 is that of tenant physics already",
        "jun,No Name,": "'No Name' is not a valid tenant name; no-name would be",
        "kim,,2003": "no tenant is named",
    }
    with pytest.raises(RosterRefused) as error:
        read("name,tenant,uid\n" + "\n".join(lines), make=True, users={"physics": 5001}, number_of=LOGINS.get, known={})
    assert list(error.value.lines) == [f"line {number}: {why}" for number, why in enumerate(lines.values(), 2) if why]


def test_one_tenant_for_all_is_bound_to_no_user() -> None:
    with pytest.raises(InvalidRequest, match="one tenant is bound to one user"):
        read("name,uid\nana,2001\n", tenant="physics")


@given(st.text(max_size=40))
def test_a_name_that_is_proposed_is_one(text: str) -> None:
    quoted = text.replace('"', '""')
    try:
        found = read(f'name,tenant\n"{quoted}",physics\n', known={})
    except RosterRefused as error:
        _, proposed, rest = error.lines[0].partition("; ")
        if proposed and rest.endswith(" would be"):
            valid_name(rest.removesuffix(" would be"), "name")
    except InvalidRequest:
        pass  # nothing but spaces
    else:
        assert [name for name, _ in found.new] == [text.strip()]
