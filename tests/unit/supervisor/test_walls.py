"""Which folder of an interpreter a tenant may have shown to its guest."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.errors import Unsupported
from sublet.supervisor.walls import prefix_of


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
