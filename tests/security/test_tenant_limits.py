"""What one tenant may ask of the office: requests, leases and volumes are bounded, and the others are served."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.cli.call import CommandOffice
from sublet.errors import InvalidRequest, QuotaExceeded, SubletError
from sublet.values import MIB
from tests.security.conftest import Place, going_by
from tests.traces import until

POLICY: Final = """\
[tenant]
leases = 3
leases_per_hour = 12
volumes = 2
requests_per_minute = 60   # and as many at once
"""


@pytest.fixture(scope="module")
def small(place: Place) -> Iterator[Place]:
    with going_by(place, POLICY):
        yield place


def tenant(place: Place, name: str, **quota: int) -> sublet.Fabric:
    """A new one, which has asked for nothing yet."""
    body = {"id": name, "quota": quota} if quota else {"id": name}
    token = place.owner.request("POST", "/v1/tenants", body, shape=dict)["token"]
    return sublet.connect(home=place.home, token=token, as_tenant=True)


def test_a_flood_of_requests_is_refused_and_says_when_to_ask_again(small: Place) -> None:
    with tenant(small, "flood") as flood, flood.block("1B", wait=0) as lease:
        before = time.monotonic()
        with pytest.raises(QuotaExceeded, match="tenant flood sends more than 60 requests a minute") as caught:
            [flood.request("GET", "/v1/leases", shape=list) for _ in range(200)]
        assert time.monotonic() - before < 60, "more came back than was asked"
        assert caught.value.do.startswith("Ask again in ")
        lease.renew()  # what it has it keeps
        assert small.ana.request("GET", "/v1/leases", shape=list) is not None
        for _ in range(200):
            small.owner.request("GET", "/v1/status", shape=dict)
    assert lease.end is not None, "and gives back"


def test_leases_at_once_are_bounded_by_default(small: Place) -> None:
    with tenant(small, "many") as many:
        held = [many.block("1B", wait=0) for _ in range(3)]
        with pytest.raises(QuotaExceeded, match="the quota of leases is 3, 3 held and 1 asked"):
            many.block("1B", wait=0)
        small.owner.request("PATCH", "/v1/tenants/many", {"quota": {"leases": 4}}, shape=dict)
        held.append(many.block("1B", wait=0))
        small.owner.request("PATCH", "/v1/tenants/many", {"quota": {"leases": 2}}, shape=dict)
        for lease in held:  # a quota below what runs takes nothing away
            lease.renew()
        with pytest.raises(QuotaExceeded, match="the quota of leases is 2, 4 held and 1 asked"):
            many.block("1B", wait=0)
        for lease in held[1:]:
            lease.release()
        many.block("1B", wait="60s").release()
        held[0].release()


def test_leases_that_begin_are_bounded_by_the_hour(small: Place) -> None:
    """Each is kept for good in the audit chain."""
    with tenant(small, "churn") as churn:
        before, began_s = small.owner.status().audit_head, time.monotonic()
        for _ in range(12):
            churn.block("1B", wait=0).release()
        after = small.owner.status().audit_head
        assert before != after
        with pytest.raises(QuotaExceeded, match="tenant churn has begun 12 leases within an hour") as caught:
            churn.block("1B", wait=0)
        found = re.fullmatch(r"Ask again in (?:(\d)m)? ?(?:(\d+)s)?\.", caught.value.do)
        assert found is not None, caught.value.do
        waits_s = 60 * int(found[1] or 0) + int(found[2] or 0)
        assert 300 - (time.monotonic() - began_s) <= waits_s <= 300, "the first comes back in five minutes"
    for _ in range(20):
        small.owner.block("1B", wait=0).release()


def test_volumes_are_bounded_by_default(small: Place) -> None:
    with tenant(small, "hoard") as hoard:
        for name in ("a", "b"):
            with hoard.block("1MiB", name=name) as lease:
                lease.start(["sh", "-c", 'echo x > "$SUBLET_BLOCK"/x'], cwd="/").wait(timeout=60)
        with pytest.raises(QuotaExceeded, match="tenant hoard has 2 volumes, and that is the most"):
            hoard.block("1MiB", name="c", wait=0)
        hoard.block("1MiB", name="a", wait="60s").release()  # its last lease may be put away just now


def test_which_limits_hold_is_said_with_where_each_is_from(small: Place) -> None:
    with tenant(small, "asks", leases=7) as asks:
        found = {row["key"]: row for row in asks.request("GET", "/v1/policy", shape=list)}
        assert found["tenant.leases"]["value"] == 7
        assert found["tenant.leases"]["source"] == "quota of asks"
        assert found["tenant.volumes"]["source"] == "policy.toml line 4"
        assert (found["lease.cores"]["value"], found["lease.cores"]["source"]) == (1, "default")
        assert not any(key.startswith(("office.", "user.")) for key in found)
        with pytest.raises(SubletError, match="the limits of others are for operators"):
            asks.request("GET", "/v1/policy?tenant=ana", shape=list)
    told = small.command("policy", "show", "--tenant", "asks", "--json")
    rows: list[dict[str, Any]] = json.loads(told.stdout)
    assert {row["key"]: row["source"] for row in rows}["tenant.leases"] == "quota of asks"
    shown = small.command("policy", "show").stdout
    assert "policy.toml line 2" in shown
    assert {
        row["source"]
        for row in json.loads(small.command("policy", "show", "--tenant", "local", "--json").stdout)
        if row["key"].startswith("tenant.")
    } == {"owner"}


def test_a_file_with_a_mistake_is_said_with_its_line_and_keeps_an_office_from_starting(
    small: Place, tmp_path: Path
) -> None:
    wrong = tmp_path / "policy.toml"
    wrong.write_text("[tenant]\nleasez = 4\n")
    checked = small.command("policy", "check", str(wrong))
    assert checked.returncode == 2
    assert f"{wrong}:2: [tenant] has no key 'leasez'; did you mean leases?" in checked.stderr
    right = small.command("policy", "check", str(small.home / "policy.toml"))
    assert (right.returncode, "4 limits set" in right.stdout) == (0, True)
    assert small.command("policy", "check", str(tmp_path / "none")).returncode == 2
    wrong.chmod(0o600)
    started = subprocess.run(
        [sys.executable, "-m", "sublet", "up"],
        env={**os.environ, "SUBLET_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert started.returncode != 0
    assert "did you mean leases?" in started.stderr


def test_a_changed_file_holds_without_a_restart(place: Place) -> None:
    """Checked as a whole: with a mistake in it nothing changes. Who is bounded, what is lent and the caps of guests go
    by it; what is leased stays."""
    place.apply("")
    until("the end of what other tests leased", lambda: not place.owner.status().live)
    pid, file = place.owner.status().pid, place.home / "policy.toml"

    def home_kib() -> int:
        """Of a guest under a lease that begins now."""
        with place.ben.block("1B") as lease:
            guest = lease.start(["sh", "-c", "cd; df -k --output=size . | tail -1"], cwd="/")
            assert guest.wait(timeout=60) == 0
            return int(b"".join(piece.data for piece in guest.output()))

    def memory() -> int:
        return next(one.capacity for one in place.owner.status().devices if one.kind == "memory")

    with tenant(place, "changing") as one, place.owner.memory("600MiB"):
        kept, before, all_of_it = one.block("1B"), home_kib(), memory()
        file.write_text('[tenant]\nleases = 1\n[lease]\nhome = "8MiB"\n[office]\nmemory = "512MiB"\n')
        told = place.command("policy", "apply", "--json")
        assert told.returncode == 0, told.stderr
        assert {row["key"]: (row["before"], row["now"]) for row in json.loads(told.stdout)} == {
            "tenant.leases": ("1000", "1"),
            "lease.home": ("256MiB", "8MiB"),
            "office.memory": ("15/16 of the machine's", "512MiB"),
        }
        with pytest.raises(QuotaExceeded, match="the quota of leases is 1"):
            one.block("1B", wait=0)
        assert before > home_kib() == 8 << 10
        assert memory() == 600 * MIB < all_of_it, "what is leased stays"
        assert "policy.toml line 2" in place.command("policy", "show").stdout
        assert "Nothing has changed" in place.command("policy", "apply").stdout

        file.write_text("[tenant]\nleases = 7\nqueu = 3\n")
        refused = place.command("policy", "apply")
        assert refused.returncode == 2, refused
        assert f"{file}:3: [tenant] has no key 'queu'; did you mean queue?" in refused.stderr
        file.chmod(0o666)
        assert "other users can write" in place.command("policy", "apply").stderr
        file.chmod(0o644)
        with pytest.raises(QuotaExceeded, match="the quota of leases is 1"):
            one.block("1B", wait=0)
        with pytest.raises(SubletError, match="operator"):
            one.request("POST", "/v1/policy/apply", {}, shape=list)

        place.apply("[tenant]\nleases = 1\n")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(one.block, "1B", wait=60)
            until("a request that waits", lambda: place.owner.status().queued == 1)
            place.apply("")  # the limit was all that it lacked, and nothing else happens
            waiting.result(60).release()
        kept.release()
        assert memory() == all_of_it
        one.block("1B", wait=0).release()
    audited = [one for one in place.owner.request("GET", "/v1/audit", shape=list) if one["kind"] == "policy_applied"]
    assert [one["by"] for one in audited[-4:]] == ["operator:local"] * 4
    assert audited[-4]["event"]["changed"]["lease.home"] == "8MiB"
    assert place.owner.status().pid == pid


WHOLE: Final = """\
[group.film]
weight = 2
members = ["whole", "later"]
[reservation.shoot]
group = "film"
gpus = 1
when = "every Tue 10:00-12:00"
zone = "UTC"
[budget.group.film]
month = "20"
"""


def test_groups_reservations_and_budgets_of_the_file_hold_as_a_whole(place: Place) -> None:
    """`check` asks the office that runs, `apply` takes all or nothing, `show` says where each value is from."""
    place.apply("")
    file = place.home / "policy.toml"
    tenant(place, "whole").close()
    file.write_text(WHOLE)
    would = json.loads(place.command("policy", "check", str(file), "--json").stdout)
    assert {row["key"]: (row["before"], row["now"]) for row in would["changes"]} == {
        "group.film.weight": ("-", "2"),
        "group.film.members": ("-", "whole"),
        "reservation.shoot.group": ("-", "film"),
        "reservation.shoot.gpus": ("-", "1"),
        "reservation.shoot.when": ("-", "every Tue 10:00-12:00"),
        "reservation.shoot.zone": ("-", "UTC"),
        "budget.group.film.month": ("-", "20.00 credits"),
    }
    assert place.owner.request("GET", "/v1/reservations", shape=list) == []
    assert json.loads(place.command("policy", "apply", "--json").stdout) == would["changes"]
    assert "It would change nothing" in place.command("policy", "check", str(file)).stdout
    assert place.command("group", "set", "film", "--weight", "3", "--ceiling", "1").returncode == 0

    def sources() -> dict[str, tuple[str, str]]:
        rows = json.loads(place.command("policy", "show", "--json").stdout)
        return {row["key"]: (row["shown"], row["source"]) for row in rows if row["key"].startswith(("group", "budget"))}

    assert sources() == {
        "group.film.weight": ("3", "command (policy.toml line 2 has 2)"),
        "group.film.members": ("later, whole", "policy.toml line 3"),
        "group.film.ceiling": ("1", "command"),
        "budget.group.film.month": ("20.00 credits", "policy.toml line 10"),
    }
    file.write_text(WHOLE.replace("gpus = 1", "gpus = 2"))
    for words in (("check", str(file)), ("apply",)):
        refused = place.command("policy", *words)
        assert refused.returncode == 2, refused
        assert "may have 1 GPU, fewer than the 2 to be reserved" in refused.stderr
    assert sources()["group.film.weight"] == ("3", "command (policy.toml line 2 has 2)")
    place.apply("")
    assert sources() == {}
    assert place.owner.request("GET", "/v1/reservations", shape=list) == []


def test_another_file_takes_the_place_of_the_policy_or_leaves_it_as_it_was(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`apply FILE`: with a mistake in it, or a contradiction, nothing of it is kept for the next office either."""
    place.apply("[tenant]\nleases = 7\n")
    held, other = place.home / "policy.toml", tmp_path / "other.toml"
    before = held.read_bytes()
    for text, says in (
        ("[tenant]\nqueu = 3\n", f"{other}:2: [tenant] has no key 'queu'"),
        ("[group.film]\nfloor = 99\n", "floors would add up to 99 GPUs"),
    ):
        other.write_text(text)
        refused = place.command("policy", "apply", str(other))
        assert (refused.returncode, says in refused.stderr) == (2, True), refused
        assert held.read_bytes() == before
    assert "there is no file" in place.command("policy", "apply", str(tmp_path / "none")).stderr
    other.write_text("[tenant]\nleases = 8\n")
    with monkeypatch.context() as within:
        post = CommandOffice.post

        def refusing(office: CommandOffice, path: str, body: Any, **how: Any) -> Any:
            """What was right when it was checked may contradict what there is a moment later."""
            if path == "/v1/policy/apply":
                assert held.read_text() == other.read_text()
                raise InvalidRequest("floors would add up to 99 GPUs, and there are 2")
            return post(office, path, body, **how)

        within.setattr(CommandOffice, "post", refusing)
        assert place.command("policy", "apply", str(other)).returncode == 2
    assert held.read_bytes() == before
    told = place.command("policy", "apply", str(other), "--json")
    assert [(row["key"], row["before"], row["now"]) for row in json.loads(told.stdout)] == [("tenant.leases", "7", "8")]
    assert held.read_text() == other.read_text()
    assert [path.name for path in place.home.glob("policy.toml*")] == ["policy.toml"]
    place.apply("")


def test_a_policy_that_others_could_write_is_refused(tmp_path: Path) -> None:
    from sublet.engines.operator_limits import read_limits

    path = tmp_path / "policy.toml"
    path.write_text("[tenant]\nleases = 4\n")
    path.chmod(0o666)
    with pytest.raises(InvalidRequest, match="other users can write"):
        read_limits(path)
    path.chmod(0o644)
    assert read_limits(path).value("tenant.leases") == 4
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidRequest, match="is not a file"):
        read_limits(path)
