"""What a person writes becomes a request, or one clear sentence and nothing sent."""

from __future__ import annotations

import hashlib
import math
import os
import socket
from typing import Any

import msgspec
import pytest

from sublet.client.address import find_address
from sublet.client.home import home_dir, make_private_dir, runtime_dir
from sublet.client.requests import LeaseOptions, ask_block, ask_cpu, ask_gpu, ask_memory
from sublet.errors import InvalidRequest
from sublet.values import GIB, RenewMode
from sublet.wire.unix import short_path
from tests.cases import case


def gpu(**asked: Any) -> Any:
    own = {"min_vram": "2GiB", "count": 1, "exclusivity": None, "model": None, "or_smaller": False, "or_model": False}
    terms = LeaseOptions(**{key: value for key, value in asked.items() if key not in own})  # type: ignore[typeddict-item]
    return ask_gpu(terms, **(own | {key: value for key, value in asked.items() if key in own}))  # type: ignore[arg-type]


def test_a_request_says_what_was_written() -> None:
    asked = gpu(
        min_vram="1.5GiB",
        count=2,
        exclusivity="device",
        model="H200",
        ttl="5m",
        tier="batch",
        wait="10m",
        name="train",
        labels={"course": "dl"},
        selector={"rack": "a"},
        renew="always",
        renew_every="1m",
        max_hold="2h",
    )
    want = asked.request.wants[0]
    assert (want.kind, want.amount, want.count, want.exclusivity, want.model) == (
        *("gpu", 3 * GIB // 2, 2, "device", "H200"),
    )
    request = asked.request
    assert (request.ttl, request.tier, request.wait, request.renew, request.spot) == (
        300,
        "batch",
        600,
        "always",
        False,
    )
    assert (request.name, request.labels, request.selector) == ("train", {"course": "dl"}, {"rack": "a"})
    assert asked.policy.mode is RenewMode.ALWAYS


def test_a_request_has_the_id_that_was_given_or_one_of_its_own() -> None:
    assert gpu(request_id="s-1-2").request.request_id == "s-1-2"
    assert gpu().request.request_id != gpu().request.request_id
    for wrong in ("", "x" * 129, "a\nb", 7):
        with pytest.raises(InvalidRequest, match="request_id"):
            gpu(request_id=wrong)


def test_by_default_it_waits_without_bound_and_takes_nothing_smaller() -> None:
    request = gpu().request
    assert (request.wait, request.ttl, request.tier, request.renew) == (None, None, None, "while-busy")
    assert request.wants[0].least is None


@pytest.mark.parametrize(("written", "least"), [(False, None), (True, 1), ("512MiB", GIB // 2), ("2GiB", 2 * GIB)])
def test_or_smaller_says_how_small(written: Any, least: int | None) -> None:
    assert gpu(or_smaller=written).request.wants[0].least == least


@pytest.mark.parametrize(("written", "other"), [(False, None), (True, "*"), ("T4|L4", "T4|L4")])
def test_or_model_says_which(written: Any, other: str | None) -> None:
    assert gpu(model="A100", or_model=written).request.wants[0].or_model == other


def test_what_was_not_said_is_not_sent() -> None:
    """So an office of the version before, which does not know or_model or pay_priority, takes the request."""
    sent = msgspec.json.decode(msgspec.json.encode(gpu().request))
    assert not sent.keys() & {"pay_priority", "spot", "replaces", "retain"}
    assert sent["wants"] == [{"kind": "gpu", "amount": 2 * GIB}]
    assert msgspec.json.decode(msgspec.json.encode(gpu(pay_priority=True).request))["pay_priority"] is True


@pytest.mark.parametrize(("wait", "seconds"), [(0, 0), ("0s", 0), (None, None), (math.inf, None), ("1m30s", 90)])
def test_waiting(wait: Any, seconds: float | None) -> None:
    assert gpu(wait=wait).request.wait == seconds


def test_each_request_has_an_id_of_its_own() -> None:
    assert gpu().request.request_id != gpu().request.request_id


SIZES = [0, -1, "0", "-1GiB", "", "GiB", "2 gigs", "1e9", "NaN", math.nan, 1.5, True, None, 1 << 61, "9999999PiB", b"1"]
DURATIONS = [
    0,
    -1,
    -1e300,
    "0s",
    "-5m",
    "",
    "m",
    "soon",
    "5 parsecs",
    math.nan,
    -math.inf,
    True,
    "100000d",
    "1h2",
    1e300,
]

BAD_GPU: list[dict[str, Any]] = [
    *({"min_vram": value} for value in SIZES),
    *({"or_smaller": value} for value in SIZES if value is not True),
    *({"ttl": value} for value in [*DURATIONS, math.inf]),
    *({"wait": value} for value in DURATIONS if value not in (0, "0s")),
    *({"renew_every": value} for value in DURATIONS),
    *({"max_hold": value} for value in DURATIONS),
    {"or_smaller": "3GiB"},
    {"or_model": True},
    {"or_model": "T4"},
    *({"count": value} for value in (0, -1, 1.0, True, "2", None, 10**9)),
    *({"exclusivity": value} for value in ("exclusive", "", "SHARED", 1)),
    *({"tier": value} for value in ("gold", "", "Batch", 3)),
    *({"renew": value} for value in ("sometimes", "", True, None)),
    {"tier": "batch", "spot": True},
    {"tier": "interactive", "spot": True},
    {"spot": "yes"},
    {"renew": "never", "renew_every": "10s"},
    {"ttl": "10s", "renew_every": "9.9s"},
    {"ttl": "10m", "max_hold": "1m"},
    *({"name": value} for value in ("", "Up", "a b", "../x", "x" * 64, 5, "ü")),
    *({"model": value} for value in ("", "a\nb", 5, "x" * 200)),
    *({"labels": value} for value in ([1], {"a": 1}, {"": "x"}, {"a": "b\n"}, {str(i): "" for i in range(17)}, "x")),
    *({"selector": value} for value in ({"a": None}, [("a", "b")])),
]


def test_bad_input_is_one_clear_sentence() -> None:
    """What happened, and what to do; never a traceback of ours, and never a guess at what was meant."""
    for asked in BAD_GPU:
        with case(asked):
            with pytest.raises(InvalidRequest) as caught:
                gpu(**asked)
            assert caught.value.message
            assert caught.value.do.endswith(".")
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 300


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError, match="no argument 'vram'"):
        gpu(vram="2GiB")


@pytest.mark.parametrize("cores", [0, -1, 1.5, True, "4", None, 1 << 30])
def test_cores_are_whole(cores: Any) -> None:
    with pytest.raises(InvalidRequest, match="cores must be a whole number"):
        ask_cpu(LeaseOptions(), cores=cores, or_smaller=False)


@pytest.mark.parametrize("or_smaller", [0, -1, 9, "4", 1.0])
def test_fewer_cores_are_whole_and_fewer(or_smaller: Any) -> None:
    with pytest.raises(InvalidRequest):
        ask_cpu(LeaseOptions(), cores=8, or_smaller=or_smaller)


@pytest.mark.parametrize(
    ("size", "min_blocks"), [(None, None), (1, 1), (None, 0), (None, 1.5), (None, True), (None, 1 << 60), ("x", None)]
)
def test_a_block_is_asked_in_one_way(size: Any, min_blocks: Any) -> None:
    with pytest.raises(InvalidRequest):
        ask_block(LeaseOptions(), size=size, min_blocks=min_blocks)


def test_blocks_are_pages() -> None:
    assert ask_block(LeaseOptions(), size=None, min_blocks=512).request.wants[0].amount == 512 * 4096
    assert ask_memory(LeaseOptions(), size="8GiB", or_smaller=False).request.wants[0].amount == 8 * GIB


# ---- where the office is


def test_the_office_of_this_machine_unless_said_otherwise(tmp_path: Any) -> None:
    """What is given goes before the environment, and a home that is given means this machine."""
    env = {"SUBLET_HOME": str(tmp_path), "SUBLET_TOKEN": "sublet_x"}
    local = find_address(None, None, None, env)
    assert (local.home, local.token) == (tmp_path, "sublet_x")
    assert local.socket is not None
    there = find_address(None, None, None, env | {"SUBLET_URL": "https://gpu.example.org/lab/"})
    assert (there.host, there.port, there.tls, there.prefix) == ("gpu.example.org", 443, True, "/lab")
    assert there.home is None  # an office elsewhere is not ours to start
    assert find_address(None, None, str(tmp_path), env | {"SUBLET_URL": "https://x"}).home == tmp_path
    assert find_address("unix:///run/x.sock", None, None, env).home is None


def test_the_token_is_not_shown(tmp_path: Any) -> None:
    assert "sublet_secret" not in repr(find_address("https://x.org", "sublet_secret", None, {}))


@pytest.mark.parametrize(
    "url",
    ["gpu.example.org", "ftp://x", "https://", "https://u:p@x", "https://x?y", "unix://host/x", "http://gpu.example.org",
     "https://x:99999", "https://x:port", "", "http://10.0.0.1:80"],
)  # fmt: skip
def test_an_address_that_is_none_is_told(url: str) -> None:
    """A token never travels in the clear, either."""
    with pytest.raises(InvalidRequest):
        find_address(url, None, None, {})


@pytest.mark.parametrize("token", ["", "two words", "a\r\nx: y", "é", "x" * 5000])
def test_a_token_that_is_none_is_told(token: str) -> None:
    with pytest.raises(InvalidRequest):
        find_address(None, token, None, {})


def test_the_same_home_written_otherwise_is_the_same_office(tmp_path: Any) -> None:
    link = tmp_path / "link"
    (tmp_path / "home").mkdir()
    link.symlink_to(tmp_path / "home")
    assert home_dir(str(link)) == home_dir(f"{tmp_path}/x/../home/")
    assert runtime_dir(home_dir(link)) != runtime_dir(tmp_path)


def test_where_an_office_listens_does_not_depend_on_who_is_logged_in(tmp_path: Any, monkeypatch: Any) -> None:
    """A service, a job of cron and a login find the same office, whichever of them began it."""
    for name in ("USERS", "ROOTS", "EARLIER"):
        monkeypatch.setattr(f"sublet.client.home.{name}", str(tmp_path / name))
    uid = os.getuid()
    without_login = runtime_dir(tmp_path)
    assert without_login == tmp_path / "run"
    (tmp_path / "USERS" / str(uid)).mkdir(parents=True)
    assert runtime_dir(tmp_path).parent == tmp_path / "USERS" / str(uid)
    without_login.mkdir(parents=True)
    assert runtime_dir(tmp_path) == without_login, "where one was begun without a login it is found"


def test_roots_office_does_not_lie_where_roots_last_logout_clears_up(tmp_path: Any, monkeypatch: Any) -> None:
    for name in ("USERS", "ROOTS", "EARLIER"):
        monkeypatch.setattr(f"sublet.client.home.{name}", str(tmp_path / name))
    monkeypatch.setattr("os.getuid", lambda: 0)
    monkeypatch.setattr("sublet.client.home._is_own", lambda path, uid: uid == 0 and os.path.isdir(path))
    assert runtime_dir(tmp_path) == tmp_path / "run", "where there is no /run, or it cannot be written"
    (tmp_path / "ROOTS").mkdir()
    (tmp_path / "USERS/0").mkdir(parents=True)
    assert runtime_dir(tmp_path).parent == tmp_path / "ROOTS"


def test_an_office_of_an_earlier_version_is_found_while_it_listens(tmp_path: Any, monkeypatch: Any) -> None:
    for name in ("USERS", "ROOTS", "EARLIER"):
        monkeypatch.setattr(f"sublet.client.home.{name}", str(tmp_path / name))
    new = runtime_dir(tmp_path)
    digest = hashlib.sha256(os.fsencode(tmp_path)).hexdigest()[:12]
    earlier = tmp_path / "EARLIER" / f"sublet-{os.getuid()}-{digest}"
    earlier.mkdir(parents=True, mode=0o700)
    assert runtime_dir(tmp_path) == new, "nothing listens there"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, short_path(f"{earlier}/supervisor.sock") as address:
        sock.bind(address)
        sock.listen(1)
        assert runtime_dir(tmp_path) == earlier
    assert runtime_dir(tmp_path) == new


def test_a_folder_that_others_may_write_is_refused_and_left_as_it_is(tmp_path: Any) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(InvalidRequest, match="others may write"):
        make_private_dir(folder)
    assert folder.stat().st_mode & 0o777 == 0o777
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest):
        make_private_dir(tmp_path / "file")
    assert make_private_dir(tmp_path / "new" / "one").stat().st_mode & 0o777 == 0o700
