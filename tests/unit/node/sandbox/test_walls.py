"""Which folder of an interpreter a tenant may have shown to its guest."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.errors import Unsupported
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.sandbox import Abilities, Ids, SandboxPart, Wish
from sublet.node.sandbox.abilities import PartFinding
from sublet.node.sandbox.walls import Walls, prefix_of
from sublet.values import Epoch, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.orders import Part


@pytest.fixture
def place() -> Iterator[Path]:
    """Everybody may look into it."""
    found = Path(tempfile.mkdtemp(dir="/tmp"))
    found.chmod(0o755)
    yield found.resolve()
    shutil.rmtree(found)


def installed(place: Path) -> str:
    (place / "bin").mkdir(parents=True)
    (place / "pyvenv.cfg").touch()
    return str(place / "bin/python")


def test_an_installation_that_everybody_may_read_is_shown(place: Path) -> None:
    assert prefix_of(installed(place / "venv"), ()) == (str(place / "venv"),)


def test_what_is_seen_anyway_and_what_is_looked_for_on_the_path_need_no_showing() -> None:
    assert prefix_of("/usr/bin/python3", ()) == ()
    assert prefix_of("python3", ()) == ()
    assert prefix_of("", ()) == ()


def test_the_installation_of_sublet_itself_is_shown() -> None:
    assert os.path.realpath(os.path.dirname(os.path.dirname(sys.executable))) in prefix_of(sys.executable, ("/",))


def test_a_folder_that_is_no_installation_is_not_shown(place: Path) -> None:
    with pytest.raises(Unsupported):
        prefix_of(f"{place}/bin/python", ())


@pytest.mark.parametrize("mode", [0o700, 0o710, 0o750, 0o751])
def test_what_is_not_everybodys_is_not_shown(place: Path, mode: int) -> None:
    python = installed(place / "venv")
    (place / "venv").chmod(mode)
    with pytest.raises(Unsupported, match="cannot be shown"):
        prefix_of(python, ())


def test_nor_is_what_lies_below_such_a_folder(place: Path) -> None:
    python = installed(place / "private/venv")
    (place / "private").chmod(0o700)
    with pytest.raises(Unsupported):
        prefix_of(python, ())


@pytest.mark.parametrize("hidden", ["venv", "venv/state", "."])
def test_nor_what_is_hidden_or_hides_something(place: Path, hidden: str) -> None:
    python = installed(place / "venv")
    with pytest.raises(Unsupported):
        prefix_of(python, (str(place / hidden),))


def test_a_link_is_taken_for_where_it_leads(place: Path) -> None:
    installed(place / "private/venv")
    (place / "private").chmod(0o700)
    (place / "link").symlink_to(place / "private/venv")
    with pytest.raises(Unsupported):
        prefix_of(f"{place}/link/bin/python", ())
    with pytest.raises(Unsupported):
        prefix_of("/nowhere/../bin/python/../x", ("/",))


@pytest.mark.parametrize("what", ["pipe", "socket", "device", "folder", "loop", "long"])
def test_what_lies_in_the_place_of_a_configuration_is_not_waited_for(place: Path, what: str) -> None:
    python = installed(place / "venv")
    found = place / "venv/pyvenv.cfg"
    found.unlink()
    if what == "pipe":
        os.mkfifo(found)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(found))
    elif what == "device":
        found.symlink_to("/dev/zero")
    elif what == "folder":
        found.mkdir()
    elif what == "loop":
        found.symlink_to(found)
    else:
        found.write_text("x" * (1 << 24))
    (place / "venv/lib/python3.12").mkdir(parents=True)
    assert prefix_of(python, ()) == (str(place / "venv"),)


def test_environments_that_stand_on_one_another_without_end_are_refused(place: Path) -> None:
    for one, other in ("ab", "ba"):
        installed(place / one)
        (place / one / "pyvenv.cfg").write_text(f"home = {place}/{other}/bin\n")
    with pytest.raises(Unsupported, match="stands on another one"):
        prefix_of(f"{place}/a/bin/python", ())


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root")
@pytest.mark.parametrize("whose", ["venv", "above/venv"])
def test_what_another_user_could_exchange_is_not_shown(place: Path, whose: str) -> None:
    python = installed(place / whose)
    os.chown(place / Path(whose).parts[0], 65534, 65534)
    with pytest.raises(Unsupported, match="belongs to"):
        prefix_of(python, ())


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_nor_what_others_can_write(place: Path, mode: int) -> None:
    python = installed(place / "venv")
    (place / "venv").chmod(mode)
    with pytest.raises(Unsupported, match="can write"):
        prefix_of(python, ())


def test_a_guest_does_without_the_walls_that_the_operator_allows_to_be_missing(tmp_path: Path) -> None:
    walls = Walls(runtime=str(tmp_path / "run"), state=str(tmp_path / "state"))
    findings = {part: PartFinding(active=part is not SandboxPart.SECCOMP) for part in SandboxPart}
    walls.abilities = Abilities(findings=findings, is_root=True, landlock_abi=4)
    wish = Wish(folder="/", tenant="ana", ids=Ids(1000, 1000))
    with pytest.raises(Unsupported, match="seccomp") as refused:
        walls.plan(wish)
    assert '[lease] allow_missing = ["seccomp"]' in refused.value.do
    walls.allow(("seccomp",))
    assert walls.plan(wish).missing == (SandboxPart.SECCOMP,)


def test_a_card_that_failed_with_a_guest_of_a_tenant_is_refused_to_the_next_one_with_the_reason(place: Path) -> None:
    """Each such guest would fail in its own way, long after the office knew."""
    walls = Walls(runtime=str(place / "run"), state=str(place / "state"))
    card = ResourceId("n/GPU-1")
    walls.card_troubles = {card: "cuInit said 100 (no device)"}
    lease = LeaseRuntime(
        lease=LeaseId("l"),
        tenant=TenantId("ana"),
        epoch=Epoch(1, 1),
        parts=(Part(resource=card, kind=Kind.GPU, amount=1),),
        deadline_ns=0,
        office="office",
    )
    with pytest.raises(Unsupported, match=r"a guest of a tenant cannot use GPU-1, .* cuInit said 100 .no device."):
        walls.nodes(lease)
