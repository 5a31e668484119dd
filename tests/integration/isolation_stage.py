"""Plays the supervisor for one kind of user: makes the world, lets every attempt loose in a guest and as its control.

A process of its own, with one thread, so that it may fork; it prints what came of it as JSON. Everything is imported
before the user changes, since the new one may not be able to read it.

    python isolation_stage.py root|ordinary|confined
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import multiprocessing.spawn
import subprocess

from sublet.node import sandbox as isolation
from sublet.node.prctl import set_pdeathsig
from sublet.node.sandbox import probe, syscalls
from sublet.node.sandbox.carried import enter_carried, to_text
from sublet.node.sandbox.enter import close_door_to_namespaces, new_user_namespace
from tests.integration.isolation_attempts import (
    ATTEMPTS,
    FILE_BYTES,
    FILES_MAX,
    PROCESSES_MAX,
    TMP_BYTES,
    Attempt,
)
from tests.integration.isolation_world import SECRET, World, fill_world, make_world

__all__ = ["main", "plan_for"]

LOADED = (multiprocessing.spawn, subprocess, select, probe)
ORDINARY = 65534
TENANT = 1_900_000_000
PATIENCE_S = 30.0
EVERYTHING = frozenset(part.value for part in isolation.SandboxPart)


def become(kind: str) -> None:
    if kind != "root" and os.geteuid() == 0:
        os.setgroups(())
        os.setresgid(ORDINARY, ORDINARY, ORDINARY)
        os.setresuid(ORDINARY, ORDINARY, ORDINARY)
    if kind == "confined":  # as on a machine that allows nobody a user namespace
        new_user_namespace()
        close_door_to_namespaces()
        syscalls.drop_bounding_set()
        syscalls.set_capabilities()
    syscalls.set_dumpable(True)  # as any process is after an exec


def plan_for(world: World, abilities: isolation.Abilities) -> isolation.SandboxPlan:
    policy = isolation.SandboxPolicy(
        allow_missing=EVERYTHING,
        files_max=FILES_MAX,
        tmp_bytes=TMP_BYTES,
        shm_bytes=TMP_BYTES,
        file_bytes=FILE_BYTES,
        processes_max=PROCESSES_MAX,
    )
    wish = isolation.Wish(
        folder=f"{world.base}/guest",
        writable=(world.own,),
        tenant="mallory",
        ids=isolation.Ids(TENANT, TENANT),
        hidden=(world.state, world.home, world.other),
    )
    plan = isolation.plan(isolation.SandboxProfile.TENANT, abilities, wish, policy)
    assert isinstance(plan, isolation.SandboxPlan)
    return plan


def in_child(body: Callable[[int], None]) -> str:
    """What the body wrote into its pipe, from a child that is waited for, however it ends."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(read)
            body(write)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(write, f"BROKEN {error!r}".encode())
        finally:
            os._exit(0)
    os.close(write)
    said, deadline = b"", time.monotonic() + PATIENCE_S
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(read, 65536)
        said += piece
        if not piece:
            break
    else:
        said += b"LATE"
        os.kill(pid, signal.SIGKILL)
    os.close(read)
    os.waitpid(pid, 0)
    return said.decode()


def answer(attempt: Attempt, world: World) -> str:
    try:
        got = attempt.run(world)
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # setrlimit refuses with a ValueError
        return f"refused {error}"
    return f"GOT {got}" if got else "refused"


def as_guest(attempt: Attempt, world: World, plan: isolation.SandboxPlan) -> str:
    parent, text = os.getpid(), to_text(plan)

    def body(write: int) -> None:
        above = enter_carried(text, parent)  # as a copy of a warm interpreter does; a plain start takes the same steps
        os.chdir(world.own)
        set_pdeathsig(signal.SIGKILL, above)
        like_an_exec(write)
        os.write(write, answer(attempt, world).encode())

    return in_child(body)


def like_an_exec(write: int) -> None:
    """As after an exec: descriptors closed, the process may be looked into again, the environment is the new one."""
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            if fd != write and not os.get_inheritable(fd):
                os.close(fd)
    syscalls.set_dumpable(True)
    os.environ.clear()
    os.environ.update(isolation.clean_env("mallory", home=os.getcwd(), extra={"MINE": "1"}))


def as_control(attempt: Attempt, world: World) -> str:
    def body(write: int) -> None:
        world.is_control = True
        os.environ["SECRET"] = SECRET.decode()
        os.write(write, answer(attempt, world).encode())

    return in_child(body)


def may_try(attempt: Attempt, abilities: isolation.Abilities) -> bool:
    """What is too harmful for a control is too harmful for a guest without a wall against it."""
    active = [part.value for part in isolation.SandboxPart if abilities.has(part)]
    harmless = attempt.control != "nobody" or not attempt.walls
    return harmless or bool(attempt.standing(active, abilities.landlock_abi))


def may_control(attempt: Attempt, kind: str, abilities: isolation.Abilities, world: World) -> bool:
    match attempt.control:
        case "anybody":
            return True
        case "namespaces":
            return abilities.has(isolation.SandboxPart.USER_NS)
        case "set-uid":
            return kind != "confined" and bool(world.set_uid)
        case "root":
            return kind == "root"
        case "nobody":
            return False


def main(kind: str) -> None:
    base = tempfile.mkdtemp(prefix="sublet-isolation-")
    set_uid = ""
    if os.geteuid() == 0:
        set_uid = f"{base}/id"
        shutil.copy("/usr/bin/id", set_uid)
        os.chmod(set_uid, 0o4755)
        if kind != "root":
            os.chown(base, ORDINARY, ORDINARY)
    os.chmod(base, 0o755)
    os.chdir(base)  # where every user may be: the checkout, from where this is started, often lies below a private home
    become(kind)
    uid = TENANT if kind == "root" else os.geteuid()
    abilities = probe.probe_abilities()
    world = make_world(base)
    try:
        fill_world(world, uid, set_uid)
        plan = plan_for(world, abilities)
        results: dict[str, Any] = {}
        for name, attempt in ATTEMPTS.items():
            results[name] = {
                "guest": as_guest(attempt, world, plan) if may_try(attempt, abilities) else "not tried",
                "control": as_control(attempt, world) if may_control(attempt, kind, abilities, world) else None,
                "alive": os.waitpid(world.neighbour, os.WNOHANG) == (0, 0),
            }
    finally:
        world.close()
    active = [part.value for part in isolation.SandboxPart if abilities.has(part)]
    found = {"active": active, "abi": abilities.landlock_abi, "lines": abilities.lines(), "results": results}
    print(json.dumps({**found, "steps": plan.steps, "missing": plan.missing}))


if __name__ == "__main__":
    main(sys.argv[1])
