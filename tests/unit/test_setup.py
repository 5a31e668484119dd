"""What `make` says on a machine that lacks something: one sentence, with the command that mends it.

The real tools/setup.sh runs here, against pretend Pythons on a PATH that has nothing else.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
TOOLS: Final = ("sh", "dirname", "date", "grep", "rm", "tail")

Setup = Callable[..., "subprocess.CompletedProcess[str]"]


def pretend_python(where: Path, version: str, *, venv: bool = True) -> None:
    """A program that answers the two questions set-up asks, and fails on any other."""
    where.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        f'*version_info*) echo "{version}" ;;\n'
        f"*ensurepip*) exit {0 if venv else 1} ;;\n"
        '*) echo "pretend python called with: $*"; exit 9 ;;\n'
        "esac\n"
    )
    where.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH with the few tools that set-up itself uses, and no Python at all."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        real = shutil.which(tool)
        assert real, f"{tool} belongs to every Linux"
        (folder / tool).symlink_to(real)
    return folder


@pytest.fixture
def setup(tmp_path: Path, path: Path) -> Setup:
    """Run set-up in a project of its own, so that the environment of this one is left alone."""
    project = tmp_path / "project"
    (project / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup.sh", project / "tools")
    (project / "requirements.lock").write_text("")

    def _setup(python: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [path / "sh", "tools/setup.sh"],
            cwd=project,
            env={"PATH": str(path), "PYTHON": python},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return _setup


def one_sentence(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return line


def test_without_any_python_the_command_that_brings_one_is_said(setup: Setup) -> None:
    sentence = one_sentence(setup())
    assert "needs Python 3.11 to 3.13, and no python3 was found" in sentence
    assert "apt install python3.11 python3.11-venv" in sentence


@pytest.mark.parametrize("version", ["3.6.15", "3.10.13", "3.14.0", "2.7.18"])
def test_a_python_out_of_range_is_named_with_its_version(setup: Setup, path: Path, version: str) -> None:
    pretend_python(path / "python3", version)
    sentence = one_sentence(setup())
    assert f"python3 is {version}" in sentence
    assert "apt install" in sentence


def test_a_missing_venv_module_is_said_with_its_package(setup: Setup, path: Path) -> None:
    pretend_python(path / "python3", "3.11.2", venv=False)
    assert "apt install python3.11-venv" in one_sentence(setup())


def test_a_launcher_that_only_pretends_to_be_a_python_is_passed_over(setup: Setup, path: Path) -> None:
    (path / "python3").write_text("#!/bin/sh\necho 'no version set' >&2\nexit 127\n")
    (path / "python3").chmod(0o755)
    assert "no python3 was found" in one_sentence(setup())


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3": "3.12.1"}, "3.12.1 (python3)"),
        ({"python3": "3.10.13", "python3.11": "3.11.7"}, "3.11.7 (python3.11)"),
        ({"python3": "3.14.0", "python3.11": "3.11.7", "python3.13": "3.13.0"}, "3.13.0 (python3.13)"),
        ({"python3": "3.11.2", "python3.12": "3.12.1"}, "3.11.2 (python3)"),
    ],
)
def test_the_best_python_in_range_is_chosen(setup: Setup, path: Path, pythons: dict[str, str], chosen: str) -> None:
    for name, version in pythons.items():
        pretend_python(path / name, version)
    assert f"[1/4] Python {chosen}" in setup().stderr


def test_a_python_without_venv_yields_to_one_that_has_it(setup: Setup, path: Path) -> None:
    pretend_python(path / "python3", "3.11.2", venv=False)
    pretend_python(path / "python3.12", "3.12.1")
    assert "[1/4] Python 3.12.1 (python3.12)" in setup().stderr


def test_a_named_python_is_taken_or_refused_but_never_replaced(setup: Setup, path: Path) -> None:
    pretend_python(path / "python3", "3.11.7")
    pretend_python(path / "mine", "3.9.18")
    pretend_python(path / "bare", "3.12.1", venv=False)
    assert "PYTHON=mine is 3.9.18" in one_sentence(setup("mine"))
    assert "apt install python3.12-venv" in one_sentence(setup("bare"))
    assert "PYTHON=nowhere does not run" in one_sentence(setup("nowhere"))


def test_an_environment_that_cannot_be_made_leaves_no_mark_of_success(setup: Setup, path: Path, tmp_path: Path) -> None:
    pretend_python(path / "python3", "3.12.1")
    result = setup()
    assert result.returncode == 1
    assert "The environment could not be made" in result.stderr
    assert not (tmp_path / "project" / ".venv" / ".ready").exists()
