"""Root runs nothing that another user can change: interpreter, package, what the environment names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sublet
from sublet.errors import InvalidRequest
from sublet.wire.program_files import changeable, check_program, environment_for_root, program_files

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="it is asked of root alone")

STRANGER = 65534
PACKAGE = Path(sublet.__file__).parent


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sublet-files-"))
    yield path
    shutil.rmtree(path)


def give(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def to_all(path: Path) -> None:
    path.chmod(0o777)


def to_a_group(path: Path) -> None:
    os.chown(path, 0, STRANGER)
    path.chmod(0o775)


@pytest.mark.parametrize("spoil", [give, to_all, to_a_group])
@pytest.mark.parametrize("what", ["a/b/file", "a/b", "a"])
def test_what_another_user_can_change_is_named(folder: Path, what: str, spoil: Callable[[Path], None]) -> None:
    file = folder / "a" / "b" / "file"
    file.parent.mkdir(parents=True)
    file.write_text("")
    assert changeable(str(file)) == ""
    spoil(folder / what)
    if spoil is to_a_group and what.endswith("file"):
        assert str(folder / what) in changeable(str(file))
    assert changeable(str(file)).startswith(str(folder / what))


def test_where_a_link_leads_and_who_made_it_counts(folder: Path) -> None:
    (folder / "his").mkdir()
    (folder / "his" / "python").write_text("")
    (folder / "bin").mkdir()
    link = folder / "bin" / "python"
    link.symlink_to("../his/python")
    assert changeable(str(link)) == ""
    give(folder / "his")
    assert str(folder / "his") in changeable(str(link))
    os.chown(folder / "his", 0, 0)
    give(link)
    assert changeable(str(link)).startswith(str(link))
    (folder / "loop").symlink_to("loop")
    assert "one link too many" in changeable(str(folder / "loop"))


def test_a_name_that_is_not_there_is_as_safe_as_its_folder(folder: Path) -> None:
    assert changeable(str(folder / "not" / "there")) == ""
    give(folder)
    assert changeable(str(folder / "not" / "there")) != ""


def test_this_program_passes_and_all_that_it_loaded_is_looked_at() -> None:
    check_program()
    found = program_files()
    assert {sys.executable, sys.prefix, str(PACKAGE), str(PACKAGE / "guest" / "work.py")} <= {*found}
    assert sys.modules["pytest"].__file__ in found


def test_the_second_look_is_at_what_was_loaded_since(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed is looked at once: after that only root could add to it."""
    check_program()
    monkeypatch.setattr(os, "walk", None)
    check_program()
    module = types.ModuleType("sublet_loaded_since")
    module.__file__ = str(folder / "since.py")
    Path(module.__file__).touch()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    give(Path(module.__file__))
    with pytest.raises(InvalidRequest, match=f"{module.__file__} belongs to"):
        check_program()
    os.chown(module.__file__, 0, 0)
    check_program()


def as_root(source: Path, home: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = {"SUBLET_HOME": str(home), "PYTHONPATH": str(source), "PATH": os.environ["PATH"], "HOME": "/root"}
    program = [sys.executable, "-m", "sublet", *words]
    return subprocess.run(program, capture_output=True, text=True, env=own | env, cwd="/")


def test_an_office_of_root_does_not_start_from_a_package_of_another_user(folder: Path) -> None:
    source = folder / "src"
    shutil.copytree(PACKAGE, source / "sublet")  # compiled files too: to compile the office again takes a second
    module = source / "sublet" / "guest" / "work.py"  # loaded by no office
    give(module)
    done = as_root(source, folder / "home", "up", "--foreground", PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode != 0
    assert "does not run from files that another user can change" in done.stderr
    assert str(module) in done.stderr
    assert "chown -R root:root" in done.stderr
    assert not (folder / "home" / "journal.db").exists(), "nothing was begun"
    main = "sublet.node.supervisor.__main__"
    code = f"import sys; sys.path.insert(0, sys.argv[1]); from {main} import main; sys.exit(main(''))"
    program = [sys.executable, "-I", "-S", "-B", "-c", code, str(source)]
    done = subprocess.run(program, capture_output=True, text=True, env={}, cwd="/")
    assert done.returncode == os.EX_NOPERM, done
    assert str(module) in done.stderr.splitlines()[-1], "its office shows the last line"


def test_roots_office_takes_nothing_over_that_loads_code_of_others(folder: Path) -> None:
    mine, his = folder / "mine", folder / "his"
    for made in (mine, his):
        made.mkdir()
    give(his)
    found = environment_for_root(
        {
            "LANG": "C",
            "LD_PRELOAD": f"{mine}/x.so",
            "LD_AUDIT": f"{mine}/x.so",
            "LD_LIBRARY_PATH": f"{his}:{mine}:relative:",
            "PYTHONPATH": f"{his}::.",
            "PYTHONHOME": str(mine),
            "PYTHONPYCACHEPREFIX": str(mine),
            "PYTHONWARNINGS": "error",
        }
    )
    assert found == {"LANG": "C", "LD_LIBRARY_PATH": str(mine), "PYTHONWARNINGS": "error"}
