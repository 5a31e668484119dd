"""The command line against a real office: what is printed, which exit status, what it changed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sublet.cli import main
from sublet.client.home import runtime_dir
from sublet.office.journal.schema import APPLICATION_ID, VERSION
from tests.commands import run_sublet
from tests.crash.office_process import release_all
from tests.traces import plain_env, until

GIB = 1 << 30


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self
        assert self.err == "", self
        return json.loads(self.out)


class Shell:
    """Runs `sublet` as a person's shell would."""

    def __init__(self, home: Path, **env: str) -> None:
        self.home = home
        self.env = plain_env()
        self.env |= {"SUBLET_HOME": str(home), "XDG_STATE_HOME": str(home.parent), "COLUMNS": "200", **env}

    def __call__(self, *words: str, timeout: float = 60.0) -> Done:
        done = run_sublet(*words, env=self.env, timeout=timeout)
        out, err = done.out.decode(), done.err.decode()
        assert "Traceback" not in err, err
        return Done(done.status, out, err)

    def end(self) -> None:
        """End the office, whatever is left of it, and remove the folder of its socket."""
        self("down", "--now")
        shutil.rmtree(runtime_dir(self.home.resolve()), ignore_errors=True)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "sublet", *words]

    def with_token(self, token: str) -> Shell:
        return Shell(self.home, SUBLET_TOKEN=token, SUBLET_AS_TENANT="1")


def runs(pid: int) -> bool:
    """A process that has ended may still be listed, as a zombie, until whoever is process 1 here looks after it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """An office with two host devices of 4 GiB, started as a person would."""
    shell = Shell(tmp_path_factory.mktemp("office"))
    started = shell("up", "--host-gpus", "2x4GiB")
    assert started.status == 0, started
    yield shell
    shell.end()


@pytest.fixture
def sublet(office: Shell) -> Iterator[Shell]:
    """The same office, without leases before and after."""
    yield office
    release_all(office.home)


def test_config_shows_what_holds_and_where_it_is_from_and_needs_no_office(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "none")
    assert {row["source"] for row in shell("config", "--json").json} == {"default"}
    assert not (tmp_path / "none").exists()
    path = str(tmp_path / "none" / "config.toml")
    assert shell("config", "path").out == f"{path}\n"
    assert shell("config", "set", "vram", "8GiB").out == f"vram is 8GiB now, in {path}.\n"
    assert shell("config", "show", "vram").out.splitlines()[1].split()[:3] == ["vram", "8GiB", f"{path}:1"]
    assert shell("config", "unset", "vram").out == "vram is not set any more: the default is 1GiB.\n"
    assert shell("status").status == 1, "no office was started"


# ---- the office ----


def test_up_says_what_it_has_and_a_second_up_with_the_same_settings_succeeds(sublet: Shell) -> None:
    pid = sublet("status", "--json").json["pid"]
    again = sublet("up", "--host-gpus", "2x4GiB")
    assert again.status == 0
    assert str(pid) in again.out
    assert "2 × host device (no GPU)" in again.out
    assert sublet("up").status == 0
    assert sublet("up", "--json").json["pid"] == pid


def test_up_with_other_settings_fails_and_says_which(sublet: Shell) -> None:
    done = sublet("up", "--host-gpus", "1x2GiB")
    assert done.status == 1
    assert done.err.splitlines()[0].startswith("sublet: the office that runs")
    assert "2x4GiB" in done.err
    assert "1x2GiB" in done.err


def test_a_second_office_on_the_same_folder_is_refused(sublet: Shell) -> None:
    done = sublet("up", "--foreground")
    assert done.status == 1
    assert "runs already" in done.err


def test_status_is_one_document_with_integer_bytes_and_the_pid(sublet: Shell) -> None:
    view = sublet("status", "--json").json
    assert runs(view["pid"])
    gpus = [device for device in view["devices"] if device["kind"] == "gpu"]
    assert [(device["capacity"], device["free"], device["host"]) for device in gpus] == [(4 * GIB, 4 * GIB, True)] * 2
    for_people = sublet("status").out
    assert f"pid {view['pid']}" in for_people
    assert "host device, no GPU" in for_people
    assert "\x1b" not in for_people, "colour is for terminals"


def test_status_starts_nothing_and_says_how_to(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "none")
    done = shell("status")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("sublet: no office is running")
    assert "sublet up" in done.err
    assert not (tmp_path / "none").exists()
    assert shell("down").status == 0


def test_no_office_is_started_to_say_that_there_is_nothing(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "none")
    for words in (["ps"], ["lease", "ls"], ["lease", "ls", "--all"], ["bill"], ["volume", "ls"], ["fence", "ls"]):
        done = shell(*words)
        assert (done.status, done.err) == (0, ""), words
        assert shell(*words, "--json").json == []
    assert "nothing runs under a lease" in shell("ps").out
    assert not (tmp_path / "none").exists()


def test_without_an_office_records_are_read_and_leases_that_go_on_are_not_denied(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "home")
    lease = shell("lease", "acquire", "--cpu", "1", "--ttl", "5m", "--json").json["id"]
    try:
        assert shell("down", "--keep").status == 0
        for words in (["ps"], ["lease", "ls"]):
            done = shell(*words)
            assert (done.status, done.out) == (1, "")
            assert "leases of an earlier one may go on" in done.err
        assert [line["key"] for line in shell("bill", "--json").json] == [lease]
        assert shell("status").status == 0, "the bill is in the journal, and an office has read it"
    finally:
        shell.end()


def test_the_first_lease_starts_an_office_and_down_waits_until_it_is_gone(tmp_path: Path) -> None:
    """One that started by itself says so; `up` makes it stay; `down` is refused while a lease lives."""
    shell = Shell(tmp_path / "home")
    lease = shell("lease", "acquire", "--cpu", "1", "--ttl", "1m", "--json").json
    status = shell("status", "--json").json
    assert status["embedded"] is True
    in_use = shell("up")
    assert in_use.status == 1
    assert "in use" in in_use.err

    refused = shell("down")
    assert refused.status == 1
    assert "--drain" in refused.err
    assert shell("lease", "release", lease["id"]).status == 0
    until("no lease", lambda: shell("lease", "ls", "--json").json == [])
    up = shell("up", "--json").json
    assert up["embedded"] is False
    assert up["pid"] != status["pid"]
    assert shell("down", "--json").json == {"pid": up["pid"], "leases": 0}
    assert not runs(up["pid"])
    shell.end()


# ---- leases ----


def test_a_lease_from_request_to_end(sublet: Shell) -> None:
    """Acquire, list, show, renew, release: each prints the lease as one document with its id."""
    words = ["--gpu", "2GiB", "--ttl", "10m", "--name", "first", "--label", "course=ml1"]
    lease = sublet("lease", "acquire", *words, "--json").json
    assert lease["status"] == "active"
    assert lease["ttl"] == 600
    assert lease["labels"] == {"course": "ml1"}
    assert [entry["id"] for entry in sublet("lease", "ls", "--json").json] == [lease["id"]]
    assert sublet("lease", "show", lease["id"], "--json").json["epoch"] == lease["epoch"]

    renewed = sublet("lease", "renew", lease["id"], "--ttl", "11m", "--json").json
    assert renewed["id"] == lease["id"]
    assert renewed["deadline"] > lease["deadline"] + 50

    table = sublet("lease", "ls").out.splitlines()
    assert table[0].split()[:2] == ["LEASE", "TENANT"]
    assert "host device, no GPU" in table[1]
    assert "first" in table[1]
    shown = sublet("lease", "show", lease["id"]).out
    assert "course=ml1" in shown

    assert sublet("lease", "release", lease["id"]).status == 0
    until("no lease", lambda: sublet("lease", "ls", "--json").json == [])
    ended = {entry["id"]: entry["end"]["reason"] for entry in sublet("lease", "ls", "--all", "--json").json}
    assert ended[lease["id"]] == "released"


def test_the_answer_for_people_says_what_to_do_next(sublet: Shell) -> None:
    said = sublet("lease", "acquire", "--gpu", "1GiB", "--ttl", "1m").out
    lease = re.search(r"Lease (\S+) was granted for 1m", said)
    assert lease is not None, said
    assert "host device, no GPU" in said
    assert f"sublet lease release {lease[1]}" in said


def test_a_lease_that_ended_is_exit_status_76_with_its_reason(sublet: Shell) -> None:
    lease = sublet("lease", "acquire", "--gpu", "1GiB", "--json").json
    assert sublet("lease", "revoke", lease["id"], "--detail", "maintenance").status == 0
    done = sublet("lease", "renew", lease["id"])
    assert (done.status, done.out) == (76, "")
    assert "operator" in done.err
    document = json.loads(sublet("lease", "renew", lease["id"], "--json").err)
    assert document["error"]["end"]["reason"] == "operator"


def test_what_is_not_free_is_exit_status_75_at_once_or_after_the_wait(sublet: Shell) -> None:
    """More than exists; nothing free; nothing free within the wait. The error document has the numbers."""
    too_big = sublet("lease", "acquire", "--gpu", "1TiB", "--json")
    assert (too_big.status, too_big.out) == (75, "")
    assert json.loads(too_big.err)["error"]["would_fit"] == 4 * GIB

    sublet("lease", "acquire", "--gpu", "4GiB", "--gpus", "2", "--ttl", "10m", "--json").json  # noqa: B018
    at_once = sublet("lease", "acquire", "--gpu", "1GiB")
    assert at_once.status == 75
    assert at_once.err.startswith("sublet: GPU unavailable")
    waited = sublet("lease", "acquire", "--gpu", "1GiB", "--wait", "1s")
    assert waited.status == 75
    assert "queued, place 1" in waited.err
    assert sublet("lease", "acquire", "--gpu", "1GiB", "--wait", "1s", "--json").status == 75
    assert len(sublet("lease", "ls", "--json").json) == 1


def test_a_smaller_offer_is_taken_if_smaller_is_ok(sublet: Shell) -> None:
    shared = ["--exclusivity", "shared", "--ttl", "10m"]
    for _ in range(2):
        assert sublet("lease", "acquire", "--gpu", "3GiB", *shared).status == 0
    assert sublet("lease", "acquire", "--gpu", "2GiB", *shared).status == 75
    assert sublet("lease", "acquire", "--gpu", "2GiB", *shared, "--smaller-ok", "--at-least", "1.5GiB").status == 75
    done = sublet("lease", "acquire", "--gpu", "2GiB", *shared, "--smaller-ok")
    assert done.status == 0
    assert "offered 1GiB instead of 2GiB" in done.err
    assert "1GiB of local/gpu" in done.out


def test_ctrl_c_leaves_the_queue(sublet: Shell) -> None:
    """Nothing is left behind in the line, and the exit status is that of an interrupt."""
    assert sublet("lease", "acquire", "--gpu", "4GiB", "--gpus", "2", "--ttl", "10m").status == 0
    words = sublet.command("lease", "acquire", "--gpu", "1GiB", "--wait", "forever")
    waiting = subprocess.Popen(words, env=sublet.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert waiting.stderr is not None
    assert "place 1" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (130, "")
    assert "Traceback" not in err
    until("an empty queue", lambda: sublet("status", "--json").json["queued"] == 0)
    ended = [entry for entry in sublet("lease", "ls", "--all", "--json").json if entry["status"] == "ended"]
    assert "withdrawn" in {entry["end"]["reason"] for entry in ended}


def test_on_a_terminal_the_place_in_the_queue_keeps_counting(sublet: Shell) -> None:
    """The line is painted again and again, and wiped when the lease is there."""
    holder = sublet("lease", "acquire", "--gpu", "4GiB", "--gpus", "2", "--ttl", "10m", "--json").json
    assert holder["status"] == "active"
    screen, terminal = pty.openpty()
    words = sublet.command("lease", "acquire", "--gpu", "1GiB", "--ttl", "1m", "--wait", "5m")
    waiting = subprocess.Popen(words, env=sublet.env | {"TERM": "xterm"}, stderr=terminal, stdout=subprocess.PIPE)
    os.close(terminal)
    with os.fdopen(screen, "rb", buffering=0) as painting:
        painted = _read(painting, lambda painted: painted.count(b"queued, place 1") >= 3)
        assert sublet("lease", "release", holder["id"]).status == 0
        out, _ = waiting.communicate(timeout=60)
        painted += _read(painting, lambda _: False)
    assert waiting.returncode == 0
    assert b"was granted" in out
    assert painted.count(b"queued, place 1") >= 3
    assert painted.endswith(b"\r\x1b[2K")


def _read(painting: io.FileIO, is_enough: Callable[[bytes], bool]) -> bytes:
    painted = b""
    with contextlib.suppress(OSError):  # a terminal whose other side is closed says EIO at its end
        while not is_enough(painted) and (piece := painting.read(65536)):
            painted += piece
    return painted


# ---- people ----


def test_a_budget_is_set_credited_listed_and_removed(sublet: Shell) -> None:
    """In the currency of the prices, which without a file are credits."""
    made = sublet("budget", "set", "12.5", "--group", "default", "--per", "day")
    assert (made.status, made.err) == (0, "")
    assert made.out == "The budget of group default is set: 12.50 credits a day, 0.00 used.\n"
    more = sublet("budget", "credit", "0.25", "--group", "default", "--per", "day", "--json").json
    assert (more["amount"], more["credit"], more["level"]) == ("12.50", "0.25", "open")
    assert "group default" in sublet("budget", "ls").out
    (view,) = sublet("budget", "ls", "--json").json
    assert (view["id"], view["currency"], view["tenant"]) == ("group/default/day", "credits", None)
    for words in (["set", "-3", "--group", "default"], ["set", "3", "--group", "default", "--currency", "EUR"]):
        assert sublet("budget", *words).status == 2
    negative = sublet("budget", "set", "-5", "--group", "default").err
    assert "the amount -5 is negative" in negative
    gone = sublet("budget", "rm", "--group", "default", "--per", "day")
    assert gone.out.startswith("The budget of group default is removed: 12.50 credits a day and 0.25 credit, ")
    assert sublet("budget", "rm", "--group", "default", "--per", "day").status == 1
    assert sublet("budget", "ls", "--json").json == []


def test_gpus_are_reserved_listed_and_given_up(sublet: Shell) -> None:
    words = ("exam", "2100-01-04 10:00-12:00", "--group", "default", "--gpus", "1", "--zone", "Europe/Berlin")
    added = sublet("reservation", "add", *words)
    assert added.status == 0, added.err
    assert added.out == (
        "Reservation exam: 1 GPU for default, 2100-01-04 10:00-12:00 (Europe/Berlin), "
        "first from 2100-01-04 09:00 UTC to 2100-01-04 11:00 UTC.\n"
    )
    (view,) = sublet("reservation", "ls", "--json").json
    assert (view["id"], view["state"], view["devices"]) == ("exam", "planned", [])
    assert "exam" in sublet("reservation", "ls").out
    assert sublet("reservation", "add", *words).status == 2
    assert sublet("reservation", "rm", "exam").out == "Reservation exam is removed.\n"
    assert sublet("reservation", "rm", "exam").status == 1
    assert sublet("reservation", "ls", "--json").json == []


def test_a_token_is_printed_once_and_opens_only_its_own_tenants_things(sublet: Shell) -> None:
    added = sublet("tenant", "add", "ana", "--leases", "1")
    assert added.status == 0
    token = added.out.strip()
    assert added.out == f"{token}\n", "the token stands alone on stdout"
    assert token not in sublet("tenant", "ls").out + sublet("tenant", "ls", "--json").out

    ana = sublet.with_token(token)
    own = ana("lease", "acquire", "--gpu", "1GiB", "--ttl", "10m", "--json").json
    foreign = sublet("lease", "acquire", "--gpu", "1GiB", "--ttl", "10m", "--json").json
    assert own["tenant"] == "ana"
    assert [entry["id"] for entry in ana("lease", "ls", "--json").json] == [own["id"]]
    no_such_thing = ana("lease", "show", foreign["id"])
    assert no_such_thing.status == 1
    assert no_such_thing.err.replace(foreign["id"], "X") == ana("lease", "show", "L-none").err.replace("L-none", "X")

    over = ana("lease", "acquire", "--gpu", "1GiB")
    assert over.status == 75
    assert "quota" in over.err
    assert sublet("tenant", "set", "ana", "--leases", "none", "--gpus", "1").status == 0
    quota = next(t for t in sublet("tenant", "ls", "--json").json if t["id"] == "ana")["quota"]
    assert (quota["leases"], quota["gpus"]) == (None, 1)
    assert ana("tenant", "ls").status == 1

    fresh = sublet("tenant", "set", "ana", "--new-token").out.strip()
    assert ana("lease", "ls").status == 1, "the old token stopped"
    assert sublet.with_token(fresh)("lease", "ls", "--json").json[0]["id"] == own["id"]
    assert sublet.with_token(fresh)("lease", "release", own["id"]).status == 0
    assert sublet("tenant", "add", "ana").status != 0


# ---- upkeep ----


def test_the_operators_commands(sublet: Shell) -> None:
    """Nothing in quarantine; a drained node lends nothing until that is undone; the audit chain holds."""
    assert sublet("fence", "ls", "--json").json == []
    assert "Nothing is in quarantine" in sublet("fence", "ls").out
    assert sublet("fence", "clear", "local/none").status == 1
    assert sublet("drain", "local", "--json").json["state"] == "draining"
    assert sublet("lease", "acquire", "--gpu", "1GiB").status == 75
    assert sublet("drain", "local", "--undo").status == 0
    assert sublet("lease", "acquire", "--gpu", "1GiB", "--ttl", "1m").status == 0
    assert sublet("drain", "elsewhere").status == 1
    report = sublet("audit", "verify", "--json").json
    assert report["ok"] is True
    assert report["records"] > 0
    assert report["head"] in sublet("audit", "verify").out
    log = sublet("audit", "log", "--of", "local", "--lines", "1000", "--json").json
    kinds = [(entry["kind"], entry["by"]) for entry in log]
    assert ("node_drained", "operator:local") in kinds
    assert ("node_joined", "office") in kinds
    assert "node_drained" in sublet("audit", "log", "--lines", "50").out
    assert "No such records" in sublet("audit", "log", "--of", "nobody").out


def test_the_audit_log_names_groups_budgets_and_reservations(sublet: Shell) -> None:
    """Each is found by its name, a budget also by the name of its group; with the group its budgets go."""
    sublet("group", "add", "audited")
    sublet("budget", "set", "3", "--group", "audited", "--per", "day")
    sublet("budget", "credit", "1", "--group", "audited", "--per", "day")
    far = ("2100-01-04 10:00-12:00", "--gpus", "1", "--zone", "UTC")
    sublet("reservation", "add", "viva", *far, "--group", "audited")
    sublet("reservation", "rm", "viva")
    gone = sublet("group", "rm", "audited")
    assert gone.out == ("Group audited is removed.\n  With it its budget of 3.00 credits a day, 0.00 used.\n")

    def of(name: str) -> list[list[str]]:
        lines = sublet("audit", "log", "--of", name).out.splitlines()
        return [line.split()[3:] for line in lines[1:]]

    budget = "group/audited/day"
    assert of("audited") == [
        ["group_set", "audited"],
        ["budget_set", budget],
        ["budget_credited", budget],
        ["reservation_set", "viva"],
        ["group_removed", "audited"],
    ]
    assert of(budget) == [["budget_set", budget], ["budget_credited", budget]]
    assert of("viva") == [["reservation_set", "viva"], ["reservation_removed", "viva"]]


def test_the_bill_comes_as_table_csv_and_json_with_the_same_numbers(sublet: Shell) -> None:
    lease = sublet("lease", "acquire", "--gpu", "1GiB", "--label", "course=bills", "--json").json
    time.sleep(0.2)
    sublet("lease", "release", lease["id"])
    until("its end", lambda: sublet("lease", "show", lease["id"], "--json").json["status"] == "ended")
    by_lease = {line["key"]: line for line in sublet("bill", "--json").json}
    line = by_lease[lease["id"]]
    assert line["held_seconds"] > 0.1
    assert line["end"] == "released"
    rows = {row["key"]: row for row in csv.DictReader(io.StringIO(sublet("bill", "--csv").out))}
    assert float(rows[lease["id"]]["held_seconds"]) == line["held_seconds"]
    assert rows[lease["id"]]["live"] in ("False", "false")
    label = {entry["key"]: entry for entry in sublet("bill", "--by", "label:course", "--json").json}
    assert label["bills"]["held_seconds"] == line["held_seconds"]
    table = sublet("bill", "--by", "tenant").out.splitlines()
    assert table[0].startswith("TENANT")
    assert table[-1].startswith("total")
    assert sublet("bill", "--until", "2020-01-01", "--json").json == []
    noisy = sublet("bill", "--noisy", "--json").json
    assert noisy["neighbours"] == []
    assert set(noisy["rules"]) == {"use", "failures", "churn"}
    assert "use: a tenant that had at least 2 times its entitlement" in sublet("bill", "--noisy").out


def test_a_backup_restores_into_a_new_incarnation(sublet: Shell, tmp_path: Path) -> None:
    """The copy is made while the office runs; the office that grows from it gives only higher epochs."""
    before = sublet("lease", "acquire", "--gpu", "1GiB", "--ttl", "1m", "--json").json
    copy = tmp_path / "copy.sublet"
    saved = sublet("backup", str(copy), "--json").json
    assert saved == {"path": str(copy), "bytes": copy.stat().st_size}
    assert sublet("backup", str(copy)).status != 0, "a backup never writes over a file"
    assert sublet("restore", str(copy)).status == 1, "not while an office runs"

    other = Shell(tmp_path / "other")
    assert other("restore", str(tmp_path / "none")).status != 0
    assert other("restore", str(copy)).status == 0
    try:
        assert other("up", "--host-gpus", "2x4GiB").status == 0
        after = other("lease", "acquire", "--gpu", "1GiB", "--ttl", "1m", "--json").json
        assert after["epoch"] > before["epoch"]
        assert after["epoch"][0] > before["epoch"][0]
    finally:
        other.end()


# ---- what makes no sense ----

NONSENSE = [
    *(
        ["lease", "acquire", "--gpu", text]
        for text in ("0", "-1", "nan", "inf", "1e9", "9" * 25, "two", "", "1.2.3GiB")
    ),
    *(["lease", "acquire", "--cpu", text] for text in ("0", "-1", "1.5", "nan", "9999999999999")),
    *(["lease", "acquire", "--gpu", "1GiB", "--ttl", text] for text in ("0", "-5s", "nan", "soon", "99999999d", "")),
    *(["lease", "acquire", "--gpu", "1GiB", "--wait", text] for text in ("-1", "never", "nan")),
    ["lease", "acquire", "--gpu", "1GiB", "--ttl", "1ms"],
    ["lease", "acquire", "--gpu", "1GiB", "--tier", "platinum"],
    ["lease", "acquire", "--gpu", "1GiB", "--tier", "batch", "--spot"],
    ["lease", "acquire", "--gpu", "1GiB", "--exclusivity", "mine"],
    ["lease", "acquire", "--gpu", "1GiB", "--gpus", "0"],
    ["lease", "acquire", "--gpu", "1GiB", "--name", "No Spaces"],
    ["lease", "acquire", "--gpu", "1GiB", "--label", "nothing"],
    ["lease", "acquire", "--gpu", "1GiB", "--label", "a=1", "--label", "a=2"],
    ["lease", "acquire", "--gpu", "1GiB", "--at-least", "1MiB"],
    ["lease", "acquire", "--gpu", "1GiB", "--smaller-ok", "--at-least", "2GiB"],
    ["lease", "acquire", "--cpu", "1", "--model", "H200"],
    ["lease", "acquire", "--tpu", "1"],
    ["lease", "acquire"],
    ["lease", "renew"],
    ["lease", "renew", "x", "--epoch", "one"],
    ["lease", "revoke", "x", "--notice", "-1"],
    ["lease", "own", "x"],
    ["tenant", "add", "Not A Name"],
    ["tenant", "add", "bob", "--gpus", "-1"],
    ["tenant", "add", "bob", "--group", "of nobody"],
    ["group", "add", "Not A Name"],
    ["group", "add", "lab", "--weight", "0"],
    ["group", "set", "lab", "--ceiling", "-1"],
    ["reservation", "add", "lab", "every Teusday 10:00-12:00", "--group", "default", "--gpus", "1", "--zone", "UTC"],
    ["reservation", "add", "lab", "every Tue 10:00-12:00", "--group", "default", "--gpus", "1", "--zone", "Berlin"],
    ["reservation", "add", "lab", "every Tue 10:00-12:00", "--group", "default", "--gpus", "0", "--zone", "UTC"],
    ["reservation", "add", "lab", "every Tue 10:00-12:00", "--group", "default", "--gpus", "1"],
    ["budget", "set", "5"],
    ["budget", "set", "5", "--tenant", "local", "--group", "default"],
    ["budget", "set", "5", "--tenant", "local", "--per", "week"],
    ["budget", "set", "much", "--tenant", "local"],
    ["budget", "credit", "1.0000001", "--tenant", "local"],
    ["tenant", "add", "bob", "--tier-max", "gold"],
    ["tenant", "set", "bob", "--operator", "--no-operator"],
    ["bill", "--by", "mood"],
    ["bill", "--noisy", "--by", "tenant"],
    ["bill", "--since", "yesterday"],
    ["bill", "--since", "2026-01-02", "--until", "2026-01-01"],
    ["up", "--host-gpus", "many"],
    ["down", "--now", "--keep"],
    ["frobnicate"],
    ["config", "set", "vram", "8"],
    ["config", "set", "vram"],
    ["config", "set", "colour", "red"],
    ["config", "unset", "colour"],
    ["config", "unset", "vram", "8GiB"],
    ["config", "path", "vram"],
    ["config", "vram"],
]


def test_nonsense_is_exit_status_2_with_a_sentence_and_a_remedy(
    sublet: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is changed: the audit chain has no more of anybody's doing. (What the office does by itself, such as
    to see that what an earlier test had is gone, may come meanwhile. In this process, for there are many.)"""
    monkeypatch.setenv("SUBLET_HOME", str(sublet.home))
    last = sublet("audit", "log", "--json").json[-1]["seq"]
    for words in NONSENSE:
        assert main(words) == 2, words
        said = capsys.readouterr()
        assert said.out == "", words
        what, do = said.err.splitlines()
        assert what.startswith("sublet: "), words
        assert re.match(r"  \S", do), words
    since = [record for record in sublet("audit", "log", "--lines", "1000", "--json").json if record["seq"] > last]
    assert not [record for record in since if record["by"] != "office"]


def test_a_stale_epoch_is_refused(sublet: Shell) -> None:
    lease = sublet("lease", "acquire", "--gpu", "1GiB", "--ttl", "1m", "--json").json
    stale = f"{lease['epoch'][0]}.{lease['epoch'][1] - 1}"
    done = sublet("lease", "renew", lease["id"], "--epoch", stale)
    assert done.status == 1
    assert done.err.startswith("sublet: ")


def test_an_unknown_token_is_refused(sublet: Shell) -> None:
    done = sublet.with_token("sublet-nonsense")("lease", "ls")
    assert done.status == 1
    assert "SUBLET_TOKEN" in done.err


def test_a_state_folder_that_cannot_be_one_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """A file in its place, a folder below a file, a folder others may write into."""
    file = tmp_path / "file"
    file.write_text("not a folder")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for home in (file, file / "below", shared):
        shell = Shell(home)
        for words in (["up"], ["lease", "acquire", "--cpu", "1"]):
            done = shell(*words)
            assert done.status in (1, 2), (home, done)
            assert done.err.startswith("sublet: "), done
            assert len(done.err.splitlines()) == 2
        assert shell("doctor").status == 1


def test_a_damaged_or_newer_journal_is_told_in_one_sentence_and_left_as_it_is(tmp_path: Path) -> None:
    """Whether the office was asked for by name or would have started by itself."""
    shell = Shell(tmp_path / "home")
    shell.home.mkdir(mode=0o700)
    journal = shell.home / "journal.db"
    newer = bytearray(b"SQLite format 3\0".ljust(100, b"\0"))
    newer[68:72] = APPLICATION_ID.to_bytes(4)
    newer[60:64] = (VERSION + 1).to_bytes(4)
    for content, word in ((b"not a journal", "damaged"), (bytes(newer), f"version {VERSION + 1}")):
        journal.write_bytes(content)
        for words in (["up"], ["up", "--foreground"], ["lease", "acquire", "--cpu", "1"]):
            done = shell(*words)
            assert done.status == 1, done
            assert word in done.err.splitlines()[0]
            assert len(done.err.splitlines()) == 2, done
            assert journal.read_bytes() == content


def test_an_office_that_speaks_another_version_is_told_apart(
    sublet: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says which side must be brought up to date, and answers nothing else."""
    monkeypatch.setenv("SUBLET_HOME", str(sublet.home))
    monkeypatch.setattr("sublet.cli.call.WIRE_VERSION", 99)
    assert main(["lease", "ls"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "version" in said.err


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    for url in ("ftp://x", "http://example.org", "https://", "nonsense"):
        done = Shell(tmp_path, SUBLET_URL=url)("status")
        assert done.status == 2, url
        assert done.err.startswith("sublet: ")


def test_doctor_finds_nothing_broken_here(sublet: Shell) -> None:
    done = sublet("doctor")
    assert done.status == 0, done.out
    assert "Nothing is broken." in done.out
    findings = {finding["subject"]: finding["state"] for finding in sublet("doctor", "--json").json}
    assert findings["office"] == "ok"
    assert set(findings.values()) <= {"ok", "note"}


def test_output_that_nobody_reads_any_more_is_no_error(sublet: Shell) -> None:
    """`sublet … | head -0`: no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        sublet.command("doctor"), env=sublet.env, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    assert done.stderr == ""
