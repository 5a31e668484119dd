"""From inside a guest, of whichever kind, hundreds of attempts to get out come to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.agent.starting import package_folder
from sublet.supervisor.isolation.plan import SEALED
from sublet.supervisor.isolation.system_calls import names, number_of, refused_names
from tests.security import inside
from tests.security.conftest import Place
from tests.traces import end_office, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="tenants with user numbers, and other users, need root")

SOURCE: Final = Path(inside.__file__).read_text()
ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = os.path.realpath(sys.executable)
SYSTEMS: Final = "/usr/bin/python3"
"""For guests of another user, where ours lies in a private folder."""
PATIENCE_S: Final = 120.0
OTHER: Final = 65534
ATTEMPTS_MIN: Final = 300
READS: Final = "-all,+dac_read_search"
"""The checkout may lie where another user cannot come: he may look, and nothing else."""


def asked(**more: Any) -> str:
    def numbers(found: frozenset[str]) -> dict[str, int]:
        machine = os.uname().machine
        return {name: number for name in sorted(found) if (number := number_of(name, machine)) is not None}

    return json.dumps({"numbers": numbers(names()), "refused": numbers(refused_names()), **more})


IS_WARM: Final = "'sublet.guest.zygote' in __import__('sys').modules"
IN_WORKER: Final = f"({IS_WARM}, exec(source, space), space['main'](text))"
"""For ``eval``, which every interpreter has: a function of ours would need cloudpickle there."""


def in_command(fabric: sublet.Fabric, python: str = PYTHON) -> dict[str, str]:
    with fabric.cpu(1) as lease:
        command = lease.start([python, "-c", SOURCE, asked()], cwd="/")
        said = b"".join(piece.data for piece in command.output())
        assert command.wait(timeout=PATIENCE_S) == 0, said
    found: dict[str, str] = json.loads(said)
    return found


def in_worker(fabric: sublet.Fabric, *, warm: bool, python: str | None = None) -> dict[str, str]:
    """What is read when an interpreter starts no warm one can take on; without that, one is made at the first wish."""
    with fabric.cpu(1) as lease:
        env = {} if warm else {"OMP_NUM_THREADS": "1"}
        if warm:
            until("a warm worker", lambda: lease.options(env={"N": os.urandom(4).hex()}).run(eval, IS_WARM), PATIENCE_S)
        known = {"source": SOURCE, "space": {"__name__": "inside"}, "text": asked()}
        is_warm, _, said = lease.options(env=env, python=python).run(eval, IN_WORKER, known)
    assert is_warm is warm
    found: dict[str, str] = json.loads(said)
    return found


@pytest.fixture(scope="module")
def users_office() -> Iterator[dict[str, dict[str, str]]]:
    """What came of it in an office of an ordinary user, where all guests are his, in namespaces of his."""
    with tempfile.TemporaryDirectory(prefix="sublet-user-", dir="/tmp") as folder:
        home = Path(folder)
        os.chown(home, OTHER, OTHER)
        ids = [f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
        done = subprocess.run(
            [
                *("setpriv", *ids, f"--inh-caps={READS}", f"--ambient-caps={READS}"),
                *(sys.executable, "-m", "tests.security.users_office", str(home / "office")),
            ],
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "HOME": str(home),
                "PYTHONPATH": f"{package_folder()}:{ROOT}",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            cwd="/",
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        for runtime in home.glob("**/run"):
            end_office(runtime)
        assert done.returncode == 0, done.stderr[-4000:]
        yield json.loads(done.stdout)


def is_everybodys(path: str) -> bool:
    """Whether any user can run it."""
    while os.stat(path).st_mode & 0o001:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False


def check(found: dict[str, str]) -> None:
    assert len(found) >= ATTEMPTS_MIN
    assert {name: said for name, said in found.items() if not said.startswith("refused ")} == {}
    for name in refused_names():
        if number_of(name, os.uname().machine) is not None:
            assert found[f"call {name}"] in ("refused EPERM", "refused ENOSYS"), name


def test_in_a_command_nothing_is_to_be_had(place: Place) -> None:
    check(in_command(place.ben))


def test_what_can_be_turned_is_read_only_by_its_mount_as_well(place: Place) -> None:
    """Whatever rights a guest should come to."""
    with place.ben.cpu(1) as lease:
        command = lease.start(["cat", "/proc/self/mountinfo"], cwd="/")
        said = b"".join(piece.data for piece in command.output()).decode()
    options = {line.split()[4]: line.split()[5].split(",") for line in said.splitlines()}
    there = [path for path in SEALED if os.path.exists(path)]
    assert len(there) >= 3
    assert [path for path in there if "ro" not in options.get(path, ())] == []


@pytest.mark.parametrize("warm", [False, True], ids=["plain", "from a warm interpreter"])
def test_in_a_worker_nothing_is_to_be_had(place: Place, warm: bool) -> None:
    check(in_worker(place.ben, warm=warm))


@pytest.mark.needs("setpriv")
@pytest.mark.skipif(not (is_everybodys(PYTHON) or os.path.exists(SYSTEMS)), reason="no Python that every user can run")
@pytest.mark.parametrize("kind", ["command", "worker", "warm worker"])
def test_in_an_ordinary_users_office_nothing_is_to_be_had(users_office: dict[str, dict[str, str]], kind: str) -> None:
    if kind == "warm worker" and not is_everybodys(PYTHON):
        assert kind not in users_office  # warm interpreters are those that Sublet runs in
    else:
        check(users_office[kind])


def test_without_walls_the_kernel_answers() -> None:
    """Else the refusals above would prove little."""
    done = subprocess.run(
        [sys.executable, "-c", SOURCE, asked(control=True)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    found = json.loads(done.stdout)
    reached = {name for name, said in found.items() if "the kernel said" in said}
    assert len(reached) >= 30, found
    assert {f"call {name}" for name in ("setns", "mount", "keyctl", "ptrace", "move_pages", "kcmp")} <= reached
