"""An idle lease that cannot be parked ends as soon as its guests are saved: a real office, real guests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import answers
from tests.integration import parked_functions
from tests.traces import until

PATIENCE_S = 60.0
TERMS: dict[str, Any] = {"min_vram": "64MiB", "ttl": "300s", "exclusivity": "device"}
"""A lease of this exclusivity is never parked."""
NOTICE_S = 300
EARLY_S = 120.0
"""So much of the notice is left where the end did not wait for it, however slow the machine is."""
OFFICE = f"""
import sys
from sublet.office.ledger import parking
parking.bound_ns = lambda step, lease: {NOTICE_S} * 10**9
from sublet.cli import main
sys.exit(main(["up", "--host-gpus", "1x1GiB", "--foreground"]))
"""
"""An office that gives idle holders more than the few seconds that it has for them by default."""


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sublet.Fabric]:
    home = tmp_path_factory.mktemp("home")
    env = os.environ | {"SUBLET_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", OFFICE], env=env, stderr=subprocess.DEVNULL) as office:
        try:
            until("an office", lambda: answers(socket_path(home.resolve())), PATIENCE_S)
            with sublet.connect(home=home) as made:
                yield made
                made.request("POST", "/v1/down", {"how": "now"}, shape=dict)
            office.wait(PATIENCE_S)
        finally:
            office.kill()
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


class Waits:
    """A second request for the device of a lease."""

    def __init__(self, fabric: sublet.Fabric, lease: sublet.Lease) -> None:
        keeper = fabric._keeper  # where it hears of the end alone, the lease never knows of the notice
        until("a holder that listens", lambda: keeper._news is not None and not keeper._behind, PATIENCE_S)
        self._fabric, self._lease = fabric, lease
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self._fabric.gpu(**TERMS, wait=NOTICE_S).release()

    def left_s(self) -> float:
        """How much of the notice was left when the lease ended."""
        until("the end of the idle lease", lambda: self._lease.end is not None, PATIENCE_S)
        self._thread.join(PATIENCE_S)
        notice, end = self._lease.notice, self._lease.end
        assert notice is not None
        assert end is not None
        ends_by = datetime.fromisoformat(notice.at).timestamp()
        return ends_by - datetime.fromisoformat(end.at).timestamp()


def test_one_with_nothing_to_save_ends_at_once(fabric: sublet.Fabric) -> None:
    lease = fabric.gpu(**TERMS)
    lease.run(parked_functions.pid)
    assert Waits(fabric, lease).left_s() > EARLY_S


def test_a_session_without_memory_has_nothing_to_save(fabric: sublet.Fabric) -> None:
    lease = fabric.gpu(**TERMS)
    with sublet.GpuSession(lease) as session:
        session.mem_free(session.mem_alloc(1000))
        session.sync()
        assert Waits(fabric, lease).left_s() > EARLY_S


def test_a_save_that_is_under_way_is_waited_for_and_no_longer(fabric: sublet.Fabric, tmp_path: Path) -> None:
    lease = fabric.gpu(**TERMS)
    lease.run(parked_functions.save_slowly, str(tmp_path))
    waits = Waits(fabric, lease)
    until("a save", (tmp_path / "begun").exists, PATIENCE_S)
    time.sleep(0.5)  # longer than between two looks at whether it is saved
    assert lease.end is None
    (tmp_path / "go").touch()
    assert waits.left_s() > EARLY_S
