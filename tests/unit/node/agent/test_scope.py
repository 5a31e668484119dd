"""The supervisor in a scope of systemd where there is one, with a stand-in for ``systemd-run``; else without."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sublet.errors import InvalidRequest, SubletError
from sublet.node.agent import scope, starting
from sublet.node.agent.scope import scope_prefix
from sublet.node.agent.starting import FindOrStart, package_folder
from sublet.wire import system_programs
from sublet.wire.settings import SupervisorSettings
from sublet.wire.zygote import TENANT_WARM_VARIABLE
from tests.traces import Traces

GIVES = '#!/bin/sh\necho "$@" > "$0.asked"\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'
REFUSES = '#!/bin/sh\necho "$@" > "$0.asked"\necho "Failed to connect to bus" >&2\nexit 1\n'


@pytest.fixture
def booted(tmp_path: Path) -> Path:
    found = tmp_path / "booted"
    found.mkdir()
    return found


def stand_in(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "systemd-run"
    program.write_text(text)
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("uid", "more", "whose"),
    [
        (0, {}, "--system"),
        (0, {"SUBLET_SCOPE": "no"}, None),
        (0, {"SUBLET_SCOPE": ""}, "--system"),
        (1000, {}, None),
        (1000, {"XDG_RUNTIME_DIR": "0"}, None),
        (1001, {}, None),
    ],
)
def test_who_gets_one(
    tmp_path: Path, booted: Path, monkeypatch: pytest.MonkeyPatch, uid: int, more: dict[str, str], whose: str | None
) -> None:
    """A user has a manager, or has not; not somebody else's. Root's is asked by the system's own program."""
    program = stand_in(tmp_path, GIVES)
    monkeypatch.setattr(system_programs, "SYSTEM_FOLDERS", (str(program.parent),) if uid == 0 else ())
    prefix = scope_prefix({"PATH": str(program.parent), **more}, uid=uid, booted=str(booted), users=str(tmp_path))
    if whose is None:
        assert prefix == []
    else:
        assert prefix[:3] == [str(program), whose, "--scope"]
        assert "--property=Delegate=yes" in prefix
        assert prefix[-1] == "--"


def test_the_manager_of_a_user_is_found_without_being_told(tmp_path: Path, booted: Path) -> None:
    """After ``su``, in a job of cron or in a service nobody says where it is, or says where somebody else's is."""
    program = stand_in(tmp_path, GIVES)
    for uid in ("0", "1000"):
        (tmp_path / uid / "systemd").mkdir(parents=True)
    (tmp_path / "1000/systemd/private").touch()
    path = f"{program.parent}:{os.defpath}"

    def asked(**env: str) -> list[str]:
        return scope_prefix({"PATH": path, **env}, uid=1000, booted=str(booted), users=str(tmp_path))

    told = asked(XDG_RUNTIME_DIR=str(tmp_path / "1000"))
    assert told[:3] == [str(program), "--user", "--scope"]
    for prefix in (asked(), asked(XDG_RUNTIME_DIR=str(tmp_path / "0"))):
        assert os.path.basename(prefix[0]) == "env"
        assert f"XDG_RUNTIME_DIR={tmp_path / '1000'}" in prefix
        assert prefix[3:] == told


def test_without_systemd_there_is_none(tmp_path: Path, booted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_programs, "SYSTEM_FOLDERS", ())
    program = stand_in(tmp_path, GIVES)
    assert scope_prefix({"PATH": str(program.parent)}, uid=0, booted=str(tmp_path / "not-booted")) == []
    assert scope_prefix({"PATH": str(tmp_path)}, uid=0, booted=str(booted)) == []


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisorSettings]:
    monkeypatch.setattr(starting, "PATIENCE_S", 120.0)
    runtime = tempfile.mkdtemp(prefix="sublet-test-")  # the path of a socket is short
    state = tmp_path / "state"
    state.mkdir()
    yield SupervisorSettings(
        office="test-" + secrets.token_hex(4),
        runtime=runtime,
        state=str(state),
        package=package_folder(),
        version="0",
    )
    shutil.rmtree(runtime, ignore_errors=True)


@pytest.mark.anew
@pytest.mark.parametrize("text", [GIVES, REFUSES], ids=["gives", "refuses"])
def test_a_supervisor_comes_either_way(
    tmp_path: Path, booted: Path, settings: SupervisorSettings, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The process is the one that was started, as without a scope; where none is given it is started plainly."""
    program = stand_in(tmp_path, text)
    prefix = [str(program), "--scope", "--"]
    monkeypatch.setattr(starting, "scope_prefix", lambda env: prefix)
    finding = FindOrStart(settings)
    sock = asyncio.run(finding())
    started = finding._started
    assert started is not None
    try:
        sock.close()
        asked = Path(f"{program}.asked").read_text()
        assert "sublet.node.supervisor" in asked
        argv = Path(f"/proc/{started._pid}/cmdline").read_bytes().split(b"\0")
        assert argv[0].decode() == sys.executable
        log = str(Path(settings.state) / starting.LOG_NAME)
        assert [os.readlink(f"/proc/{started._pid}/fd/{number}") for number in (1, 2)] == [log, log]
        assert (finding._scope == prefix) is (text == GIVES)
    finally:
        os.kill(started._pid, signal.SIGKILL)
        os.waitpid(started._pid, 0)
        Traces(settings.office, Path(settings.runtime)).clear()  # its groups would stay on the machine


def test_one_that_cannot_begin_is_told_with_its_last_word(settings: SupervisorSettings) -> None:
    """A status alone would say nothing, and the log may be far away. What an earlier one said is not its word."""
    log = Path(settings.state) / starting.LOG_NAME
    log.write_text("an earlier one is here\n")
    with pytest.raises(
        SubletError, match=r"ended with status 1: ModuleNotFoundError: No module named 'sublet'"
    ) as told:
        asyncio.run(FindOrStart(replace(settings, package=settings.state))())
    assert str(log) in told.value.do
    assert starting._last_lines(str(log), log.stat().st_size, 1) == [""]
    assert starting._last_lines(str(log) + ".none", 0, 2) == ["", ""]


def test_the_switch_is_described() -> None:
    assert scope.SWITCH in (Path(__file__).parents[4] / "docs" / "guests.md").read_text()


def test_a_bound_for_warm_interpreters_that_is_no_size_is_refused_before_anything_is_started(
    settings: SupervisorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TENANT_WARM_VARIABLE, "much")
    with pytest.raises(InvalidRequest, match="'much' is not a size in SUBLET_TENANT_WARM"):
        FindOrStart(settings)
