"""The doctor says what is broken and how to mend it, and a check that fails does not keep the others from theirs."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import BinaryIO, cast

import pytest

from sublet.cli import main
from sublet.cli.doctor import _wrapped
from sublet.cli.doctor_devices import check_machine, device_checks, gpu_checks, nvidia_cards_on_the_bus
from sublet.cli.doctor_guests import Check, _in_scope, check_logout, guest_checks
from sublet.node.agent.nvml import IDLE_SHARE, survey
from sublet.node.agent.rehearsal import NO_NODES, Rehearsal, RehearsalStep
from sublet.node.agent.suspend_probe import Ability
from sublet.node.processes.cgroups import CgroupFinding
from sublet.node.supervisor.locks import DeviceLocks, all_held
from sublet.values import GIB
from tests.unit.node.agent.fake_nvml import FakeCard, FakeNvml


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("SUBLET_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def what_holds_guests() -> dict[str, Check]:
    """Tried for real, and once: each try makes groups, file systems and processes with walls, for most of a second."""
    return {subject: cache(check) for subject, check in guest_checks().items()}


@pytest.fixture(autouse=True)
def _is_known(what_holds_guests: dict[str, Check], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.cli.doctor_guests.guest_checks", lambda: what_holds_guests)


def findings(capsys: pytest.CaptureFixture[str], *, broken: bool) -> dict[str, dict[str, str]]:
    assert main(["doctor", "--json"]) == (1 if broken else 0)
    return {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_a_disk_that_is_full_is_named_with_what_to_do(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir(mode=0o700)

    def on_full_disk(**_: object) -> BinaryIO:
        return open("/dev/full", "wb", buffering=0)

    monkeypatch.setattr("sublet.cli.doctor.tempfile", SimpleNamespace(TemporaryFile=on_full_disk))
    found = findings(capsys, broken=True)["disk"]
    assert found["state"] == "broken"
    assert found["text"] == f"the disk is full at {home}: nothing can be written"
    assert "`sublet volume rm`" in found["do"]


def test_a_machine_without_anything_of_ours_is_whole(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(capsys, broken=False)
    assert found["office"]["state"] == "note"
    assert found["journal"]["text"] == "none yet"
    assert {subject.partition(": ")[0] for subject in found} >= {"guests", "leases", "tenants"}
    assert not home.exists(), "looking changes nothing"
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "Nothing is broken."


def test_a_folder_that_others_may_write_is_broken_with_its_remedy(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    home.chmod(0o777)
    finding = findings(capsys, broken=True)["state folder"]
    assert finding["state"] == "broken"
    assert finding["do"] == f"Take that right away: chmod go-w {home}"


def test_a_file_in_the_place_of_the_folder_is_broken_and_the_rest_is_still_checked(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.write_text("a file")
    found = findings(capsys, broken=True)
    assert found["state folder"]["state"] == "broken"
    assert found["platform"]["state"] == "ok"
    assert main(["doctor"]) == 1
    assert "broken" in capsys.readouterr().out


def test_a_folder_of_somebody_else_is_broken(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: home.stat().st_uid + 1)
    assert "not to you" in findings(capsys, broken=True)["state folder"]["text"]


def test_a_journal_that_is_none_is_broken(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir(mode=0o700)
    (home / "journal.db").write_bytes(b"not a journal")
    finding = findings(capsys, broken=True)["journal"]
    assert "damaged" in finding["text"]
    assert "restore" in finding["do"]


def test_a_journal_from_a_newer_version_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sublet.office.journal.schema import APPLICATION_ID, VERSION

    home.mkdir(mode=0o700)
    db = sqlite3.connect(home / "journal.db")
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.execute("CREATE TABLE t (x)")
    db.close()
    assert f"version {VERSION + 1}" in findings(capsys, broken=True)["journal"]["text"]


def test_a_python_that_is_too_old_and_a_platform_that_is_none_are_broken(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sublet.cli.doctor.sys.version_info", (3, 10, 0))
    assert findings(capsys, broken=True)["Python"]["state"] == "broken"
    monkeypatch.undo()
    monkeypatch.setenv("SUBLET_HOME", str(home))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert findings(capsys, broken=True)["platform"]["state"] == "broken"


def test_a_wall_clock_that_nobody_set_is_noted(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sublet.cli.doctor.time.gmtime", lambda: time.struct_time((1970, 1, 1, 0, 0, 0, 3, 1, 0)))
    assert findings(capsys, broken=False)["clock"]["state"] == "note"


def test_a_folder_of_sockets_that_others_may_write_is_broken(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr("sublet.cli.doctor.socket_path", lambda _: tmp_path / "open" / "office.sock")
    assert "written by other users" in findings(capsys, broken=True)["socket"]["text"]
    monkeypatch.setattr("sublet.cli.doctor.socket_path", lambda _: tmp_path / "open" / "run" / "office.sock")
    assert "other users can write" in findings(capsys, broken=True)["socket"]["text"]


def test_a_slow_disk_is_noted(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.cli.doctor.SYNC_SLOW_S", 0.0)
    assert "faster disk" in findings(capsys, broken=False)["disk"]["do"]


def with_library(monkeypatch: pytest.MonkeyPatch, library: FakeNvml) -> None:
    """The machine has this pretended driver, and no other."""
    monkeypatch.setattr("sublet.node.agent.nvml.is_driver_here", lambda _root: True)
    monkeypatch.setitem(sys.modules, "pynvml", cast(ModuleType, library))


def test_a_driver_that_does_not_answer_is_broken_and_none_at_all_is_noted(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    assert "no NVIDIA driver: host devices" in findings(capsys, broken=False)["GPU"]["text"]
    with_library(monkeypatch, FakeNvml([], broken=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    found = findings(capsys, broken=True)["GPU"]
    assert "different versions" in found["text"]
    assert "reboot" in found["do"]


def test_cards_are_listed_with_who_is_on_them_and_what_is_not_known(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [FakeCard(0, processes={os.getpid(): GIB}, used=GIB + IDLE_SHARE), FakeCard(1, instances={0: 10 * GIB})]
    library = FakeNvml(cards)
    with_library(monkeypatch, library)
    monkeypatch.setattr("sublet.cli.doctor_devices.sees_all_processes", lambda: True)
    found = findings(capsys, broken=False)
    assert found["GPU"]["text"] == ("driver 580.65.06: 1 × NVIDIA Pretend (79.94GiB), 1 × NVIDIA Pretend MIG (9.94GiB)")
    assert found["GPU health"]["text"] == "no error reported"
    assert f"1GiB in use by process {os.getpid()} (" in found["GPU in use"]["text"]
    assert "9.94GiB" in found["GPU partitions"]["text"]
    assert found["GPU libraries"]["text"] == "the bindings for CUDA are installed"
    monkeypatch.setattr("sublet.cli.doctor_devices.has_bindings", lambda: False)
    assert "sublet[gpu]" in findings(capsys, broken=False)["GPU libraries"]["text"]
    assert found["GPU suspend"]["text"].startswith("tried when an office starts")
    monkeypatch.setattr("sublet.cli.doctor_devices.sees_all_processes", lambda: False)
    assert "inside this container" in findings(capsys, broken=False)["GPU in use"]["text"]


@pytest.mark.parametrize(
    ("card", "subject", "said", "state"),
    [
        (FakeCard(0, rows=(0, 0, 0, 1)), "GPU health", "nothing left to replace it", "broken"),
        (FakeCard(0, rows=(0, 0, 1, 0)), "GPU health", "next reset", "note"),
        (FakeCard(0, uncorrected=2), "GPU health", "2 memory errors", "note"),
        (FakeCard(0, broken=15), "GPU", "GPU 0: the GPU is lost", "broken"),
        (FakeCard(0, instances={}), "GPU partitions", "no instance", "note"),
    ],
)
def test_a_card_that_is_not_well_is_said_to_be(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    card: FakeCard,
    subject: str,
    said: str,
    state: str,
) -> None:
    library = FakeNvml([card])
    with_library(monkeypatch, library)
    found = findings(capsys, broken=state == "broken")[subject]
    assert (found["state"], said in found["text"]) == (state, True)


def test_a_card_without_a_driver_is_not_overlooked(tmp_path: Path) -> None:
    for name, vendor, kind in [("a", "0x10de", "0x030000"), ("b", "0x10de", "0x040300"), ("c", "0x8086", "0x030000")]:
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
    assert nvidia_cards_on_the_bus(str(tmp_path)) == 1
    assert device_checks(root=str(tmp_path))["GPU"]()[0] == "note"
    assert "1 NVIDIA card on the bus" in device_checks(root=str(tmp_path))["GPU"]()[1]


def test_what_is_lent_on_this_machine_is_told_with_who_lends_it(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside offices of root on this machine, whose claims lie in root's folder: here that is an empty one."""
    roots = tmp_path / "roots"
    roots.mkdir(mode=0o700)
    monkeypatch.setattr("sublet.cli.doctor_devices.lock_folder", lambda: str(tmp_path))
    monkeypatch.setattr("sublet.cli.doctor_devices.all_held", partial(all_held, roots=str(roots)))
    assert "no device of this machine is lent" in findings(capsys, broken=False)["device locks"]["text"]
    locks = DeviceLocks("/srv/ada", folder=str(tmp_path), roots=str(roots))
    locks.take("host-lab-0")
    try:
        said = findings(capsys, broken=False)["device locks"]["text"]
    finally:
        locks.close()
    assert "host-lab-0 by the office of " in said
    assert f"(pid {os.getpid()}, /srv/ada)" in said


def test_less_than_the_machine_has_is_said_beside_what_it_has(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(f"{64 << 20}\n")
    said = check_machine(str(tmp_path))[1]
    assert "64MiB of memory (of the machine's " in said


def test_what_becomes_of_guests_after_a_logout_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4_000_000)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_logout(str(tmp_path))[0] == "ok"
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    level, text, mend = check_logout(str(tmp_path))  # type: ignore[misc]
    assert level == "note"
    assert "no scope of systemd" in text
    assert "enable-linger" in mend
    (tmp_path / "var/lib/systemd/linger").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/linger/4000000").touch()
    assert check_logout(str(tmp_path))[0] == "ok"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "no scope of systemd" in check_logout(str(tmp_path))[1]
    monkeypatch.setattr("sublet.wire.system_programs.SYSTEM_FOLDERS", (str(tmp_path),))
    program = tmp_path / "systemd-run"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    assert "no scope of systemd" in check_logout(str(tmp_path))[1], "it was asked, and refused"
    program.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    assert "a scope of its own" in check_logout(str(tmp_path))[1]


def test_what_groups_allow_is_tried_where_the_supervisor_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a scope that is given, and told by who was in it: here a stand-in, which says something of its own."""
    said = json.dumps([["memory", True, "in the scope"]])
    program = tmp_path / "systemd-run"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("sublet.wire.system_programs.SYSTEM_FOLDERS", (str(tmp_path),))
    assert _in_scope(str(tmp_path)) == [CgroupFinding("memory", True, "in the scope")]
    program.write_text("#!/bin/sh\necho nonsense\n")
    assert _in_scope(str(tmp_path)) is None
    assert _in_scope(str(tmp_path / "not-booted")) is None


def test_lines_are_as_wide_as_the_terminal_and_begin_behind_their_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file or a pipe a finding is one line, whatever its length."""
    text = "they go on: the supervisor has a session of its own, and no systemd is here that could end it"
    assert _wrapped(text, 43) == [text]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((80, 24)))
    assert _wrapped(text, 43) == [
        "they go on: the supervisor has a",
        "session of its own, and no systemd is",
        "here that could end it",
    ]
    assert _wrapped("", 43) == []
    assert _wrapped(text, 60) == [text], "too narrow to be of use"


def test_cards_that_failed_with_a_guest_are_told_with_the_guest_they_failed_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that guests of tenants cannot use is lent; one that no guest can use is not."""
    library = FakeNvml([FakeCard(0), FakeCard(1)])
    found = survey(library)
    steps = tuple(RehearsalStep(name=name, took_ns=10_000_000) for name in ("NVML", "cleaning", "guest"))
    first = Rehearsal(card=found.cards[0].uuid, steps=steps, shows_pids=True, walled="other users cannot read /opt")
    second = Rehearsal(card=found.cards[1].uuid, steps=steps[:2], failed="a guest could not use it", do="Look.")

    async def tried(cards: object, caps: object) -> list[Rehearsal]:
        return [first, second]

    async def suspends(cards: object, nodes: object) -> Ability:
        return Ability()

    monkeypatch.setattr("sublet.cli.doctor_devices.survey", lambda: found)
    monkeypatch.setattr("sublet.cli.doctor_devices.device_checks", dict)
    monkeypatch.setattr("sublet.cli.doctor_devices.rehearse_all", tried)
    monkeypatch.setattr("sublet.cli.doctor_devices.ability", suspends)
    checks = gpu_checks()
    state, text, *more = checks["GPU guests"]()
    assert (state, bool(more)) == ("note", True)
    assert f"they could not use {first.card}: other users cannot read /opt" in text
    state, text, *_ = checks["card 0"]()
    assert (state, "cleaning 0.01 s, guest 0.01 s" in text) == ("ok", True)
    state, text, *more = checks["card 1"]()
    assert (state, more) == ("broken", ["Look."])
    assert "not lent, a guest could not use it; before that: NVML 0.01 s, cleaning 0.01 s" in text


@pytest.mark.parametrize("is_wsl", [False, True])
def test_what_keeps_guests_of_tenants_from_all_cards_is_told_once(
    is_wsl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each card the same sentence stood there, with a program that WSL does not have."""
    monkeypatch.setenv("WSL_DISTRO_NAME", "Debian") if is_wsl else monkeypatch.delenv("WSL_DISTRO_NAME", raising=False)
    found = survey(FakeNvml([FakeCard(index) for index in range(4)]))
    names = [card.uuid for card in found.cards]

    async def tried(cards: object, caps: object) -> list[Rehearsal]:
        walled = [NO_NODES] * 3 + ["other users cannot read /opt"]
        return [Rehearsal(card=card, walled=why) for card, why in zip(names, walled, strict=True)]

    monkeypatch.setattr("sublet.cli.doctor_devices.survey", lambda: found)
    monkeypatch.setattr("sublet.cli.doctor_devices.device_checks", dict)
    monkeypatch.setattr("sublet.cli.doctor_devices.rehearse_all", tried)
    checks = gpu_checks()
    _, text, *do = checks["GPU guests"]()
    assert f"they could not use {', '.join(names[:3])}: {NO_NODES}; {names[3]}: other users cannot read /opt" in text
    assert ("nvidia-modprobe" in do[0], "WSL" in checks["GPU surroundings"]()[1]) == (not is_wsl, is_wsl)


@pytest.mark.parametrize("serves", [False, True])
def test_an_mps_server_of_this_machine_is_told_with_what_it_takes_away(
    serves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if serves:
        (tmp_path / "control").touch()  # the pipe of its control daemon
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    found = survey(FakeNvml([FakeCard(0)]))

    async def tried(cards: object, caps: object) -> list[Rehearsal]:
        return [Rehearsal(card=found.cards[0].uuid)]

    monkeypatch.setattr("sublet.cli.doctor_devices.survey", lambda: found)
    monkeypatch.setattr("sublet.cli.doctor_devices.device_checks", dict)
    monkeypatch.setattr("sublet.cli.doctor_devices.rehearse_all", tried)
    state, text, *do = gpu_checks()["GPU surroundings"]()
    if not serves:
        assert (state, "no MPS" in text, do) == ("ok", True, [])
        return
    assert (state, f"an MPS server at {tmp_path}" in text) == ("note", True)
    assert do[0].startswith("With MPS guests are not suspended")
