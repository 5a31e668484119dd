"""An office goes on from the state folder of an earlier version: leases, volumes, tenants and their tokens.

``older_state`` has one as the program of that commit left it when it was killed: root's, on a machine that was started
anew since. Its folders have the rights that they were given then, and its volumes are images.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.errors import InvalidRequest
from sublet.node.sandbox.uids import BLOCK
from sublet.node.storage.mounts import mounts_below
from sublet.node.storage.stores_work import why_no_image
from tests.traces import end_office, until

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the state of root's office"),
    pytest.mark.skipif(bool(why_no_image()), reason=f"no images here: {why_no_image()}"),
    # One after the other: all have the name of the same office, and a supervisor that begins ends what has its name.
    pytest.mark.xdist_group("tests/integration/test_older_state.py"),
]
MOVED_BY: Final = (1000 + os.getpid() % 50_000) * BLOCK
STATES: Final = sorted((Path(__file__).parent / "older_state").iterdir())


@pytest.fixture(params=STATES, ids=lambda path: path.name.partition(".")[0])
def state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sublet-older-") as folder:
        with tarfile.open(request.param) as packed:
            packed.extractall(folder, filter="tar")
        _move_tenants(Path(folder) / "office")
        monkeypatch.setenv("XDG_STATE_HOME", f"{folder}/xdg")  # the heads of its audit chain
        home = Path(folder) / "office"
        yield Path(folder)
        down = [sys.executable, "-m", "sublet", "down", "--now"]
        subprocess.run(down, env={**os.environ, "SUBLET_HOME": str(home)}, check=True, timeout=120)
        end_office(runtime_dir(home))
        until("volumes that are put away", lambda: not mounts_below(str(home)))


def _move_tenants(home: Path) -> None:
    """To user numbers that no other office of this run has, nor this test in another process: who has a number may end
    all processes of it. No file that was packed belongs to a tenant."""
    said = json.loads((home / "uids").read_text())
    said["uids"] = {tenant: number + MOVED_BY for tenant, number in said["uids"].items()}
    (home / "uids").write_text(json.dumps(said))


def test_leases_volumes_tenants_and_tokens_go_on(state: Path) -> None:
    home, made = state / "office", json.loads((state / "made.json").read_text())
    ensure_office(home, words=("up", "--host-gpus", "2x1GiB", "--foreground"))
    with (
        sublet.connect(home=home) as owner,
        sublet.connect(home=home, token=made["tokens"]["ana"], as_tenant=True) as ana,
    ):
        assert {one.name: (one.id, one.tenant) for one in owner.leases()} == {
            "kept": (made["leases"]["kept"], "local"),
            "notes": (made["leases"]["notes"], "local"),
            "training": (made["leases"]["training"], "ana"),
            "ckpt": (made["leases"]["ckpt"], "ana"),
        }
        tenants = {one["id"]: one["quota"]["leases"] for one in owner.request("GET", "/v1/tenants", shape=list)}
        assert tenants == {"local": None, "ana": 3, "ben": None}
        for fabric, name, answer in ((owner, "notes", 42), (ana, "ckpt", 43)):
            with fabric.attach(made["leases"][name]) as volume:
                volume.renew()
                value: Any = sublet.Durable.restore(volume).value
                assert value == {"answer": answer}
        with ana.gpu(min_vram="64MiB") as lease:
            assert lease.run(abs, -3) == 3, "within the quota that was set then"
        assert {line.currency for line in owner.bill()} == {"EUR"}


def test_rights_that_are_refused_today_are_said_with_the_remedy(state: Path) -> None:
    """And once that was done the office starts."""
    home = state / "office"
    home.chmod(0o775)
    with pytest.raises(InvalidRequest, match=f"others may write into {home}") as caught:
        sublet.connect(home=home).leases()
    assert caught.value.do == f"Take that right away with `chmod go-w {home}`."
    home.chmod(0o755)
    with sublet.connect(home=home) as owner:
        assert len(owner.leases()) == 4
