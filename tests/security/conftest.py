"""An office of root's with two tenants, for the tests of one file."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.supervisor.mounts import mounts_below
from tests.traces import until


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


@contextlib.contextmanager
def office(policy: str = "") -> Iterator[Place]:
    """An office of its own, with this ``policy.toml``."""
    with tempfile.TemporaryDirectory(prefix="sublet-security-") as folder, contextlib.ExitStack() as stack:
        home = Path(folder) / "office"
        if policy:
            home.mkdir(mode=0o700)
            (home / "policy.toml").write_text(policy)
        ensure_office(home, words=("up", "--host-gpus", "2x1GiB", "--foreground"))
        owner = stack.enter_context(sublet.connect(home=home))
        stack.callback(shutil.rmtree, runtime_dir(home.resolve()), ignore_errors=True)
        stack.callback(until, "volumes that are put away", lambda: not mounts_below(str(home / "blocks")))
        stack.callback(owner.request, "POST", "/v1/down", {"how": "now"}, shape=dict)
        made = Place(home, owner)
        for name in ("ana", "ben"):
            token = owner.request("POST", "/v1/tenants", {"id": name}, shape=dict)["token"]
            setattr(made, name, stack.enter_context(made.connect(token)))
        yield made


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with office() as made:
        yield made
