"""A tenant's guest from a warm interpreter stands behind the same walls as one that was started plainly."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from tests.traces import until

pytestmark = [
    pytest.mark.slow,  # a warm interpreter is made
    pytest.mark.skipif(os.geteuid() != 0, reason="only root's office gives tenants a user number"),
]
PATIENCE_S = 60.0


@pytest.fixture
def tenant(tmp_path: Path) -> Iterator[sublet.Fabric]:
    home = tmp_path / "home"
    ensure_office(home, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    with sublet.connect(home=home) as owner:
        token = owner.request("POST", "/v1/tenants", {"id": "ada"}, shape=dict)["token"]
        with sublet.connect(home=home, token=token, as_tenant=True) as made:
            yield made
        owner.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


def facts() -> dict[str, Any]:
    """What a guest can find out of where it is. It goes by value, so it imports what it needs itself."""
    import os
    import resource
    import socket
    import sys
    from pathlib import Path

    def tried(what: Any, *words: Any) -> str:
        try:
            return str(what(*words))
        except (OSError, ValueError) as error:  # setrlimit refuses with a ValueError
            return type(error).__name__

    own, home = Path("/proc/self"), os.path.expanduser("~")
    lease = os.path.dirname(home)
    status = dict(line.split(":\t", 1) for line in (own / "status").read_text().splitlines() if ":\t" in line)
    told = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "NSpid")
    mounts = [line.split(" - ")[0].split(" ", 4)[4] for line in (own / "mountinfo").read_text().splitlines()]
    links = [tried(os.readlink, f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return {
        "is_warm": "sublet.guest.zygote" in sys.modules,
        "status": {name: " ".join(status.get(name, "").split()) for name in told},
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
        "maps": [(own / name).read_text() for name in ("uid_map", "gid_map", "setgroups", "limits")],
        "root": sorted(os.listdir("/")),
        "mounts": sorted(mount.replace(lease, "~") for mount in mounts),
        "processes": [name for name in os.listdir("/proc") if name.isdigit()],
        "network": len(Path("/proc/net/dev").read_text().splitlines()),
        "host": socket.gethostname(),
        "environment": sorted(os.environ),
        "home": [os.getcwd() == home, tried(os.mkdir, home + "/made")],
        "refused": [
            tried(os.open, "/etc/shadow", os.O_RDONLY),
            tried(os.mkdir, "/usr/made"),
            tried(socket.socket, socket.AF_PACKET, socket.SOCK_RAW),
            tried(os.setuid, 0),
            tried(os.kill, 1, 9),
            tried(resource.setrlimit, resource.RLIMIT_NOFILE, (1 << 20, 1 << 20)),
        ],
        "descriptors": sorted(link.replace(lease, "~").partition(":")[0] for link in links),
        "umask": os.umask(0o077),
        "own_memory": tried(os.stat, "/proc/self/pagemap").count("st_size"),
        "session": os.getsid(0) == os.getpid(),
        "search path": [path.replace(lease, "~") for path in sys.path],
    }


def test_it_can_find_no_difference(tenant: sublet.Fabric) -> None:
    def look() -> dict[str, Any]:
        with tenant.gpu(min_vram="64MiB", wait="1m") as lease:
            return lease.run(facts)

    plain = look()
    assert not plain.pop("is_warm")
    found: list[dict[str, Any]] = []

    def is_warm() -> bool:
        found.append(look())
        return bool(found[-1].pop("is_warm"))

    until("guests come from a warm interpreter", is_warm, PATIENCE_S)
    for name, value in plain.items():
        assert found[-1][name] == value, name
    assert all(one.endswith("Error") for one in plain["refused"]), plain["refused"]
