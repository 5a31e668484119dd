"""A tenant fills the disk of the office, and then the disk is full to the last byte: what still works, as one document.

Run by ``test_full_disk`` as the user whose office it is: the argument is the state folder, on a small disk of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import answers, ensure_office
from sublet.errors import SubletError
from sublet.node.processes.procs import Procs
from tests.traces import end_office, until

MIB: Final = 1 << 20
REQUESTS: Final = int(os.environ.get("SUBLET_FULL_DISK_REQUESTS", "20"))
LEFT: Final = 3 * MIB
PRINTED: Final = 16 * MIB
WORDS: Final = ("up", "--host-gpus", "1x64MiB", "--foreground")


def block_bytes(fabric: sublet.Fabric) -> int:
    devices = fabric.request("GET", "/v1/status", shape=dict)["devices"]
    return int(next(one["capacity"] for one in devices if one["kind"] == "block"))


def office_pid(fabric: sublet.Fabric) -> int:
    return int(fabric.request("GET", "/v1/status", shape=dict)["pid"])


def refusal_of(fabric: sublet.Fabric) -> str:
    """Why nothing is to be had; empty if something was."""
    try:
        with fabric.memory("1MiB", wait=0):
            return ""
    except SubletError as error:
        return str(error)


def fill(path: Path) -> int:
    """All that is left, to the last byte."""
    size = 0
    with open(path, "wb", buffering=0) as file:
        for piece in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    size += file.write(bytes(piece))
    return size


def kill_office(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until("a dead office", lambda: Procs().stat(pid) is None)


def story(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ensure_office(home, words=WORDS)
    tokens = {}
    with sublet.connect(home=home) as owner:
        pid = office_pid(owner)
        found["offered"] = block_bytes(owner)
        for name in ("ana", "ben"):
            tokens[name] = owner.request("POST", "/v1/tenants", {"id": name}, shape=dict)["token"]
    with (
        sublet.connect(home=home, token=tokens["ana"], as_tenant=True) as ana,
        sublet.connect(home=home, token=tokens["ben"], as_tenant=True) as ben,
        contextlib.ExitStack() as stack,
    ):

        def is_refused() -> bool:
            found["refused"] = refusal_of(ana)
            return bool(found["refused"])

        kept = stack.enter_context(ana.cpu(1, ttl="10m"))
        given_back = ana.memory("1MiB", ttl="10m")
        block = stack.enter_context(ben.block(found["offered"] - LEFT, ttl="10m"))
        printing = block.start(["head", "-c", str(PRINTED), "/dev/zero"], cwd="/")
        found["printed"] = printing.wait(timeout=120)
        found["granted"] = sum(not refusal_of(ben) for _ in range(REQUESTS))
        kept.renew()
        found["same office"] = office_pid(owner_of(stack, home)) == pid

        found["filled"] = fill(home / "ballast") > 0
        until("a lease is refused", is_refused)
        for _ in range(REQUESTS):  # each is in the journal
            kept.renew()
        given_back.release()
        with sublet.connect(home=home) as owner:
            until("the end of what was given back", lambda: is_over(owner, given_back.id))
            found["same office when full"] = office_pid(owner) == pid
        kill_office(pid)
        try:
            ensure_office(home, words=WORDS)
        except SubletError as error:
            found["not started"] = f"{error} {error.do}"
            return found
        kept.renew()
        found["renewed by the next office"] = kept.remaining > 500
        found["refused by the next office"] = refusal_of(ana)
        (home / "ballast").unlink()
        until("a lease is granted again", lambda: not refusal_of(ana))
        found["file is back"] = (home / "journal.reserve").exists()
    with sublet.connect(home=home) as owner:
        found["verified"] = owner.request("GET", "/v1/audit/verify", shape=dict)["ok"]
    return found


def owner_of(stack: contextlib.ExitStack, home: Path) -> sublet.Fabric:
    return stack.enter_context(sublet.connect(home=home))


def is_over(owner: sublet.Fabric, lease: str) -> bool:
    return bool(owner.request("GET", f"/v1/leases/{lease}", shape=dict)["lease"]["status"] == "ended")


def main() -> None:
    home = Path(sys.argv[1])
    began_s = time.monotonic()
    try:
        found = story(home)
    finally:
        with contextlib.suppress(OSError, SubletError):
            if answers(runtime_dir(home) / "office.sock"):
                with sublet.connect(home=home) as owner:
                    pid = office_pid(owner)
                    owner.request("POST", "/v1/down", {"how": "now"}, shape=dict)
                until("an office that has ended", lambda: Procs().stat(pid) is None)
        end_office(runtime_dir(home))
    print(json.dumps(found | {"took_s": time.monotonic() - began_s}))


if __name__ == "__main__":
    main()
