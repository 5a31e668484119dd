"""Warm interpreters that are begun before anybody asks for a guest, and guests that wait for one that is being made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.errors import Unsupported
from sublet.node.agent.starting import FindOrStart, package_folder
from sublet.node.supervisor.service import SOCKET_NAME
from sublet.notebook import warming
from sublet.values import Epoch, Kind, LeaseId, ResourceId
from sublet.wire.codec import dumps, loads
from sublet.wire.guests import Admit, Front, GuestSpec, HolderReply, Profile, Start, Started
from sublet.wire.jupyter import KERNEL_IMPORTS
from sublet.wire.link_events import Replied
from sublet.wire.orders import Grant, Part
from sublet.wire.settings import SupervisorSettings
from sublet.wire.version import WIRE_OLDEST, WIRE_VERSION
from sublet.wire.zygote import WARM_VARIABLE, Warm, fingerprint
from tests.integration.supervisor_stage import PATH, TENANT, HolderLine, SupervisorStage, supervisor_at
from tests.left_open import threads_now
from tests.traces import Traces, now_ns, until

A, E5 = LeaseId("lease-a"), Epoch(1, 5)
TTL = 300 * 1_000_000_000
PROBE = """
import os, sys
def main():
    with open(os.environ["SAID"] + ".new", "w") as file:
        file.write("warm" if "imported" in sys.modules else "fresh")
    os.rename(os.environ["SAID"] + ".new", os.environ["SAID"])
"""


def zygotes_of(supervisor: int) -> list[int]:
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    found = []
    for name in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if b"sublet.guest.zygote" in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


# ---- guests that wait


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisorStage]:
    with supervisor_at(tmp_path_factory.mktemp("stage")) as made:
        part = Part(kind=Kind.CPU, amount=1, resource=ResourceId("bench/cpu"))
        made.office_line.order(
            Grant(lease=A, epoch=E5, number=1, tenant=TENANT, parts=(part,), deadline_ns=now_ns() + TTL, ttl_ns=TTL)
        )
        yield made


def spec_of(folder: Path, said: str, code: str, *, patient: bool) -> GuestSpec:
    """What it imports lies apart: a folder that changes makes what was imported from it out of date."""
    modules = folder / "modules"
    if not modules.exists():
        modules.mkdir()
        (modules / "probe.py").write_text(PROBE)
        (modules / "imported.py").write_text(code)
    env = {"PATH": PATH, "PYTHONPATH": str(modules), "PYTHONDONTWRITEBYTECODE": "1", "SAID": str(folder / said)}
    return GuestSpec(entry="probe:main", imports=("imported",), cwd="/", env=env, patient=patient)


def said(folder: Path, name: str) -> str:
    until("a guest that has run", (folder / name).exists)
    return (folder / name).read_text()


class Answer:
    """What comes of a call, once it is waited for."""

    def __init__(self, holder: HolderLine, call: int) -> None:
        self._holder = holder
        self._call = call
        holder.talk.flush()

    def __call__(self) -> HolderReply:
        found: list[HolderReply] = []

        def came() -> bool:
            replies = [one for one in self._holder.talk.wait(1.0) if isinstance(one, Replied)]
            found.extend(loads(HolderReply, one.body) for one in replies if one.call == self._call)
            return bool(found)

        until("an answer", came)
        return found[0]


def begin(holder: HolderLine, spec: GuestSpec) -> Answer:
    return Answer(holder, holder.talk.link.call(dumps(Start(spec=spec))))


def test_who_needs_what_is_being_imported_waits_for_it_and_others_do_not(
    stage: SupervisorStage, tmp_path: Path
) -> None:
    code = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)"
    holder = stage.holder(A, E5)
    assert isinstance(holder.ask(Start(spec=spec_of(tmp_path, "first", code, patient=False))), Started)
    assert said(tmp_path, "first") == "fresh"
    answer = begin(holder, spec_of(tmp_path, "second", code, patient=True))
    assert isinstance(holder.ask(Start(spec=spec_of(tmp_path, "third", code, patient=False))), Started)
    assert said(tmp_path, "third") == "fresh"
    assert not (tmp_path / "second").exists()
    (tmp_path / "go").touch()
    assert isinstance(answer(), Started)
    assert said(tmp_path, "second") == "warm"


def test_who_waits_for_one_that_cannot_be_had_starts_by_itself(stage: SupervisorStage, tmp_path: Path) -> None:
    """It opens a device, or is killed."""
    holder = stage.holder(A, E5)
    unclean = spec_of(tmp_path, "unclean", "import os\nleft = os.open('/dev/full', os.O_WRONLY)", patient=True)
    assert isinstance(holder.ask(Start(spec=unclean)), Started)
    assert said(tmp_path, "unclean") == "fresh"
    (tmp_path / "more").mkdir()
    killed = spec_of(tmp_path / "more", "killed", "import time\ntime.sleep(300)", patient=True)
    before = set(zygotes_of(stage.pid))
    answer = begin(holder, killed)
    until("one that is being made", lambda: set(zygotes_of(stage.pid)) - before)
    for pid in set(zygotes_of(stage.pid)) - before:
        os.kill(pid, signal.SIGKILL)
    assert isinstance(answer(), Started)
    assert said(tmp_path / "more", "killed") == "fresh"


def test_only_this_machines_own_user_wishes_for_one(stage: SupervisorStage) -> None:
    mine, theirs = socket.socketpair()
    front = Front(tenant=TENANT, operator=True, profile=Profile.TENANT)
    stage.office_line.ask(Admit(front=front, oldest=WIRE_OLDEST, newest=WIRE_VERSION), (theirs.detach(),))
    holder = HolderLine(mine)
    with pytest.raises(Unsupported, match="own user"):
        holder.ask(Warm(imports=("decimal",)))
    holder.close()


# ---- begun before anybody asks


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Traces]:
    made = Traces(f"t{os.urandom(4).hex()}", tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "state").mkdir()
    yield made
    made.clear()


def finding_at(folder: Path) -> FindOrStart:
    runtime, state = str(folder / "run"), str(folder / "state")
    return FindOrStart(
        SupervisorSettings(office="", runtime=runtime, state=state, package=package_folder(), version="t")
    )


@pytest.mark.anew
def test_a_supervisor_begins_with_what_was_wished_for_and_is_told_whose_it_is(
    place: Traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WARM_VARIABLE, dumps(Warm(imports=("decimal",), env={"LANG": "C.UTF-8"})).decode())
    finding = finding_at(tmp_path)
    finding.begin()
    assert finding._begun is not None
    pid = finding._begun._pid
    try:
        assert WARM_VARIABLE not in os.environ
        until("a warm interpreter", lambda: zygotes_of(pid))
        zygote = zygotes_of(pid)[0]
        assert b"decimal" in Path(f"/proc/{zygote}/cmdline").read_bytes()
        assert b"LANG=C.UTF-8" in Path(f"/proc/{zygote}/environ").read_bytes()
        assert not (tmp_path / "run" / SOCKET_NAME).exists()
        finding.whose(place.office)
        asyncio.run(finding()).close()
        finding.abandon()  # it was called for
        assert zygote in zygotes_of(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.anew
@pytest.mark.parametrize("wish", ["", "{}"])
def test_one_that_nobody_called_for_ends(
    place: Traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    """And a wish that cannot be read is no more than a wish."""
    monkeypatch.setenv(WARM_VARIABLE, wish)
    finding = finding_at(tmp_path)
    finding.begin()
    assert finding._begun is not None
    pid = finding._begun._pid
    finding.abandon()
    assert not Path(f"/proc/{pid}").exists()
    assert not (tmp_path / "run" / SOCKET_NAME).exists()


# ---- from a notebook


def test_a_notebook_wishes_only_where_the_office_is_its_own(tmp_path: Path) -> None:
    home = {"SUBLET_HOME": str(tmp_path)}
    before = threads_now("sublet-warm")
    for elsewhere in ({"SUBLET_URL": "https://gpu.example.org"}, {"SUBLET_URL": "nonsense"}, {"SUBLET_TOKEN": "t"}):
        assert warming.begin({**home, **elsewhere}) is None
    assert not threads_now("sublet-warm") - before


def test_what_a_notebook_wishes_for_is_what_its_kernels_come_from() -> None:
    wish = warming.wish_of({"HOME": "/h", "OMP_NUM_THREADS": "1", "SECRET": "s", "NAME": "n"})
    assert wish == Warm(imports=KERNEL_IMPORTS, env=dict(fingerprint({"HOME": "/h", "OMP_NUM_THREADS": "1"})))


def test_kernels_on_devices_load_no_debugger_and_programs_may() -> None:
    code = """
import sys
import sublet.guest.kernel_app
import ipykernel.debugger
print("debugpy" in sys.modules, ipykernel.debugger._is_debugpy_available)
import debugpy
print(debugpy.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False", "debugpy"]
