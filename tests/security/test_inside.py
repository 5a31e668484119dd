"""From inside a guest, of whichever kind, hundreds of attempts to get out come to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.node.sandbox.plan import SEALED
from sublet.node.sandbox.system_calls import names, number_of, refused_names
from tests.security import inside
from tests.security.conftest import Place
from tests.traces import until

SOURCE: Final = Path(inside.__file__).read_text()
PYTHON: Final = os.path.realpath(sys.executable)
PATIENCE_S: Final = 120.0
ATTEMPTS_MIN: Final = 300


def asked(**more: Any) -> str:
    def numbers(found: frozenset[str]) -> dict[str, int]:
        machine = os.uname().machine
        return {name: number for name in sorted(found) if (number := number_of(name, machine)) is not None}

    return json.dumps({"numbers": numbers(names()), "refused": numbers(refused_names()), **more})


IS_WARM: Final = "'sublet.guest.zygote' in __import__('sys').modules"
IN_WORKER: Final = f"({IS_WARM}, exec(source, space), space['main'](text))"
"""For ``eval``, which every interpreter has: a function of ours would need cloudpickle there."""


def in_command(fabric: sublet.Fabric) -> dict[str, str]:
    with fabric.cpu(1) as lease:
        command = lease.start([PYTHON, "-c", SOURCE, asked()], cwd="/")
        said = b"".join(piece.data for piece in command.output())
        assert command.wait(timeout=PATIENCE_S) == 0, said
    found: dict[str, str] = json.loads(said)
    return found


def in_worker(fabric: sublet.Fabric, *, warm: bool) -> dict[str, str]:
    """What is read when an interpreter starts no warm one can take on; without that, one is made at the first wish."""
    with fabric.cpu(1) as lease:
        env = {} if warm else {"OMP_NUM_THREADS": "1"}
        if warm:
            until("a warm worker", lambda: lease.options(env={"N": os.urandom(4).hex()}).run(eval, IS_WARM), PATIENCE_S)
        known = {"source": SOURCE, "space": {"__name__": "inside"}, "text": asked()}
        is_warm, _, said = lease.options(env=env).run(eval, IN_WORKER, known)
    assert is_warm is warm
    found: dict[str, str] = json.loads(said)
    return found


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


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("warm", [False, True], ids=["plain", "from a warm interpreter"])
def test_in_a_worker_nothing_is_to_be_had(place: Place, warm: bool) -> None:
    check(in_worker(place.ben, warm=warm))


def test_without_walls_the_kernel_answers() -> None:
    """Else the refusals above would prove little."""
    done = subprocess.run(
        [sys.executable, "-c", SOURCE, asked(control=True)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    found = json.loads(done.stdout)
    reached = {name for name, said in found.items() if "the kernel said" in said}
    assert len(reached) >= 30, found
    expected = {f"call {name}" for name in ("setns", "mount", "keyctl", "ptrace", "move_pages", "kcmp")}
    assert expected - {name for name in expected if found[name] == "refused ENOSYS"} <= reached, (
        "of what this kernel has"
    )
