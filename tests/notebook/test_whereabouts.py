"""The folder and the environment of the notebook, where its cells run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sublet.notebook.whereabouts import Moved, Whereabouts, follow


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in tuple(os.environ):
        if name.startswith("TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TEST_A", "1")
    monkeypatch.setenv("TEST_B", "2")


def test_only_what_has_changed_is_told(tmp_path: Path) -> None:
    where, env = Whereabouts(), dict(os.environ)
    here = str(tmp_path)
    assert where.moved(here, env) is None
    assert where.moved("/", env) == Moved("/", {}, ())
    assert where.moved(here, env | {"TEST_A": "3", "TEST_C": "4"}) == Moved("", {"TEST_A": "3", "TEST_C": "4"}, ())
    del env["TEST_B"]
    assert where.moved(here, env) == Moved("", {}, ("TEST_B",))
    assert where.moved("", env) == Moved("", {}, ("TEST_B",))  # the folder was removed: the cell stays where it is


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SUBLET_LEASE"])
def test_what_the_lease_says_is_not_the_notebooks_to_change(name: str, tmp_path: Path) -> None:
    where = Whereabouts()
    env = {key: value for key, value in os.environ.items() if key != name}
    assert where.moved(str(tmp_path), env | {name: "9"}) in (None, Moved("", {}, ()))


def test_it_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sub").mkdir()
    follow(Moved(str(tmp_path / "sub"), {"TEST_A": "3"}, ("TEST_B", "TEST_NONE")))
    assert os.getcwd() == str(tmp_path / "sub")
    assert (os.environ["TEST_A"], "TEST_B" in os.environ) == ("3", False)
    follow(Moved(str(tmp_path / "gone"), {}, ()))
    assert os.getcwd() == str(tmp_path / "sub")
    assert "this cell is not in" in capsys.readouterr().err
