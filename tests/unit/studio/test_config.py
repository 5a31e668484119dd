"""The studio's file of settings: every key, and every way in which a file is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sublet.errors import InvalidRequest
from sublet.studio.config import DEFAULTS, KEYS, Key, StudioSettings, Unit, changes, parse_config

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "studio.toml"


def written(key: Key, value: int) -> str:
    return f'"{value}s"' if key.unit is Unit.SECONDS else str(value)


def refused(text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_config(text)
    return f"{caught.value.message}. {caught.value.do}"


def test_the_example_names_every_key_with_its_default() -> None:
    """As it stands it changes nothing; without the marks of comments it sets each key to what holds anyway."""
    text = EXAMPLE.read_text(encoding="utf-8")
    assert parse_config(text) == DEFAULTS
    opened = re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE)
    unset = ("socket =", "api =", "token_file =")
    found = parse_config("\n".join(line for line in opened.splitlines() if not line.startswith(unset)))
    assert set(found.given) == set(KEYS) - {"listen.socket", "hub.api", "hub.token_file"}
    assert changes(DEFAULTS, found) == []
    without_address = "\n".join(line for line in opened.splitlines() if not line.startswith("address"))
    assert parse_config(without_address).socket == "/run/sublet/studio.sock"
    assert parse_config(without_address).hub_api == "http://127.0.0.1:8081/hub/api"


def test_the_reference_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "studio.md").read_text(encoding="utf-8")
    rows = [
        f"| `{key.path}` | {key.shown(key.default)} | "
        f"{f'{key.shown(key.least)} to {key.shown(key.most)} ' if key.most else ''}| {key.says} |"
        for key in KEYS.values()
    ]
    part = page.partition("## Settings")[2].partition("\n## ")[0]
    assert [line for line in part.splitlines() if line.startswith("| `")] == rows


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.most], ids=lambda key: key.path)
def test_a_number_is_taken_within_its_range_and_refused_outside_of_it(key: Key) -> None:
    for value in (key.least, key.most):
        assert parse_config(f"[{key.table}]\n{key.name} = {written(key, value)}").value(key.path) == value
    for value in (key.least - 1, key.most + 1, 10**30):
        said = refused(f"\n[{key.table}]\n{key.name} = {written(key, value)}")
        assert said.startswith("studio.toml:3: "), said
        assert key.name in said
    for value in (key.least - 1, key.most + 1):
        if value == 0 and key.unit is Unit.SECONDS:
            continue  # no duration at all is refused as such
        said = refused(f"[{key.table}]\n{key.name} = {written(key, value)}")
        assert f"Give {key.shown(key.least)} to {key.shown(key.most)}: {key.says}." in said


def test_each_setting_is_that_of_its_key() -> None:
    found = parse_config(
        '[listen]\naddress = "[::1]:0"\n[person]\nsessions = 3\nrecords = 1001\nsign_in = "2m"\n'
        '[studio]\nwaiting = 4\nconnections = 99\nupdate = "5s"\n'
    )
    assert (found.address, found.socket) == (("::1", 0), None)
    assert (found.sessions_max, found.records_max, found.cookie_s) == (3, 1001, 120)
    assert (found.waiting_max, found.connections_max, found.update_s) == (4, 99, 5)
    assert parse_config('[listen]\nsocket = "/run/x"').socket == "/run/x"
    found = parse_config(
        '[hub]\napi = "https://hub.example.org/x/hub/api/"\ntoken_file = "/t"\nservice = "gpus"\n'
        'create_people = false\ntenants = { "Students of ML" = "ml1" }\nteachers = { staff = "ml1" }\n'
        'answer = "3s"\nrecheck = "1m"\nreport = "2m"\nserver_token = "10m"\n'
    )
    assert found.hub_api == "https://hub.example.org/x/hub/api"
    assert (found.hub_token_file, found.hub_service) == ("/t", "gpus")
    assert (found.hub_creates_people, found.hub_answer_s, found.hub_recheck_s) == (False, 3, 60)
    assert (found.hub_report_s, found.hub_token_s) == (120, 600)
    assert (found.hub_tenants, found.hub_teachers) == ({"Students of ML": "ml1"}, {"staff": "ml1"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[person]\n\nsesions = 4", "studio.toml:3: [person] has no key 'sesions'; did you mean sessions?"),
        ("# x\n[listn]\naddress = 4", "studio.toml:2: there is no table ['listn']; did you mean listen?"),
        ("sessions = 4", "studio.toml:1: 'sessions' stands outside of a table; it belongs below [person]"),
        ("[person]\nsessions = true", "studio.toml:2: person.sessions = True is not a whole number"),
        ('[person]\nsessions = "4"', "studio.toml:2: person.sessions = '4' is not a whole number"),
        ("[person]\nsign_in = 12", "studio.toml:2: person.sign_in = 12 is not a duration"),
        ('[person]\nsign_in = "12 moons"', "studio.toml:2: "),
        (
            '[listen]\naddress = "0.0.0.0:8320"',
            "studio.toml:2: listen.address: '0.0.0.0:8320' is not an address of this",
        ),
        ('[listen]\naddress = "127.0.0.1:x"', "studio.toml:2: listen.address: 'x' is not a port"),
        ('[listen]\naddress = "127.0.0.1:65536"', "studio.toml:2: listen.address: '65536' is not a port"),
        ("[listen]\naddress = 8320", "studio.toml:2: listen.address = 8320 is not an address"),
        ('[listen]\nsocket = "studio.sock"', "studio.toml:2: listen.socket = 'studio.sock' is not a whole path"),
        ('[listen]\nsocket = "/a\\u0000b"', "studio.toml:2: listen.socket = '/a\\x00b' is not a whole path"),
        (f'[listen]\nsocket = "/{"ä" * 54}"', "studio.toml:2: listen.socket has more than 107 bytes"),
        ('[listen]\naddress = "[::1]:1"\nsocket = "/x"', "studio.toml:3: listen.address and listen.socket contradict"),
        ("[person", "studio.toml is not TOML"),
        ('[hub]\napi = "http://127.0.0.1:8081/hub/api"', "studio.toml:2: hub.api needs hub.token_file beside it"),
        ('[hub]\ntoken_file = "/x"', "studio.toml:2: hub.token_file needs hub.api beside it"),
        (
            '[hub]\napi = "http://127.0.0.1:8081"',
            "studio.toml:2: hub.api = 'http://127.0.0.1:8081' is not the API",
        ),
        ('[hub]\napi = "http://hub.example.org/hub/api"', "would have tokens travel in the clear"),
        ('[hub]\napi = "/hub/api"', "would have tokens travel in the clear, or is no address"),
        ('[hub]\ntoken_file = "hub-token"', "studio.toml:2: hub.token_file = 'hub-token' is not a whole path"),
        ('[hub]\nservice = "Studio/x"', "studio.toml:2: 'Studio/x' is not a valid hub.service"),
        ("[hub]\ncreate_people = 1", "studio.toml:2: hub.create_people = 1 is neither true nor false"),
        ("[hub]\ntenants = [4]", "studio.toml:2: hub.tenants = [4] is not a table of names"),
        ("[hub]\ntenants = { a = 4 }", "studio.toml:2: hub.tenants = {'a': 4} is not a table of names"),
        ('[hub.teachers]\nstaff = "ML 1"', "'ML 1' is not a valid name in hub.teachers"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_its_line(text: str, said: str) -> None:
    assert said in refused(text)


def test_what_has_changed_is_said_with_when_it_holds() -> None:
    now = StudioSettings({"person.sign_in": 3600, "listen.socket": "/run/x", "studio.waiting": 1000})
    assert changes(DEFAULTS, now) == [
        "listen.socket is /run/x now, and was not set, from the next start on.",
        "person.sign_in is 1h now, and was 12h.",
    ]
