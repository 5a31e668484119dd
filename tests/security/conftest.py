"""One office with two tenants for all tests of this folder: root's, or that of the user who runs them."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
from sublet.cli import main
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.node.storage.mounts import mounts_below
from sublet.wire.guests import GuestSpec
from tests.longest_first import begin_first
from tests.security.kernels import KERNELS, on_kernel
from tests.traces import supervisor_of, until


@dataclass
class Place:
    """The office, and one connection for each of its tenants."""

    home: Path
    owner: sublet.Fabric
    ana: sublet.Fabric = field(init=False)
    ben: sublet.Fabric = field(init=False)

    def connect(self, token: str) -> sublet.Fabric:
        """A connection as the tenant of this token."""
        return sublet.connect(home=self.home, token=token, as_tenant=True)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command line of the owner's, run in this process: to start an interpreter for it would take longer."""
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            patch.setenv("SUBLET_HOME", str(self.home))
            status = main(words)
        return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())

    def apply(self, policy: str) -> list[Any]:
        """These are the operator's limits from now on; what has changed."""
        (self.home / "policy.toml").write_text(policy)
        found: list[Any] = self.owner.request("POST", "/v1/policy/apply", {}, shape=list)
        return found


@contextlib.contextmanager
def office() -> Iterator[Place]:
    """An office of its own."""
    with tempfile.TemporaryDirectory(prefix="sublet-security-") as folder, contextlib.ExitStack() as stack:
        home = Path(folder) / "office"
        ensure_office(home, words=("up", "--host-gpus", "2x1GiB", "--foreground"))
        owner = stack.enter_context(sublet.connect(home=home))
        runtime = runtime_dir(home.resolve())
        stack.callback(shutil.rmtree, runtime, ignore_errors=True)
        stack.callback(until, "the end of the supervisor", lambda: supervisor_of(runtime) is None)
        stack.callback(until, "volumes that are put away", lambda: not mounts_below(str(home / "blocks")))
        stack.callback(owner.request, "POST", "/v1/down", {"how": "now"}, shape=dict)
        made = Place(home, owner)
        for name in ("ana", "ben"):
            token = owner.request("POST", "/v1/tenants", {"id": name}, shape=dict)["token"]
            setattr(made, name, stack.enter_context(made.connect(token)))
        yield made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls wait for a warm interpreter that is being made, as kernels do, instead of each starting a fresh one."""
    monkeypatch.setattr("sublet.compute.worker_guest.GuestSpec", partial(GuestSpec, patient=True))


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with on_kernel(request.param):
        yield request.param


@pytest.fixture(scope="session")
def place() -> Iterator[Place]:
    with office() as made:
        yield made


@contextlib.contextmanager
def going_by(place: Place, policy: str) -> Iterator[Place]:
    """These limits for a while."""
    place.apply(policy)
    try:
        yield place
    finally:
        place.apply("")


SECOND: Final = "test_o"
"""Files from here on, by their names, use an office of their own: one process for all of them would be the last to be
done."""
FIRST: Final = (
    "security_office_1",
    "security_office_2",
    "shared_socket_root",
    "shared_socket_ordinary",
    "ordinary_office",
    "test_copied_office.py",
    "test_warm_secrets.py",
    "test_canary.py",
    "test_full_disk.py",
    "test_doctor_strict.py",
)
"""What takes longest begins first: groups, and files of tests that stand alone."""


@pytest.hookimpl(tryfirst=True)  # before files with something of their own get groups of their own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever uses the office runs in one process of two: it is started once in each. Tests of other folders have
    a ``place`` of another kind."""
    folder = Path(__file__).parent
    for item in items:
        uses_it = item.path.parent == folder and "place" in getattr(item, "fixturenames", ())
        if uses_it and item.get_closest_marker("xdist_group") is None:
            number = 1 + (item.path.name >= SECOND)
            item.add_marker(pytest.mark.xdist_group(f"security_office_{number}"))
    begin_first(items, folder, FIRST)
