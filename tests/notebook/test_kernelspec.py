"""A kernel of ours in Jupyter's menu: put there, replaced, taken away, and never in the place of another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager

from sublet.cli import main
from sublet.errors import InvalidRequest, NotFound, Unsupported
from sublet.notebook import kernel_mode

SAME_FILES = {"kernel.json", "logo-svg.svg"}


def test_jupyter_finds_it_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kernel_mode.install("sublet-4g", ["--vram", "4GiB", "--tier", "spot"], prefix=str(tmp_path))
    assert set(os.listdir(folder)) == SAME_FILES
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    spec = KernelSpecManager().get_kernel_spec("sublet-4g")
    assert spec.argv == [
        *(sys.executable, "-m", "sublet.notebook.kernel_mode", "-f", "{connection_file}", "--"),
        *("--vram", "4GiB", "--tier", "spot"),
    ]
    assert spec.display_name == "Python on a leased GPU (VRAM 4GiB, tier spot)"
    assert spec.language == "python"


def test_it_is_replaced_and_taken_away_and_leaves_nothing(tmp_path: Path) -> None:
    kernel_mode.install("sublet", [], prefix=str(tmp_path))
    folder = kernel_mode.install("sublet", ["--ttl", "2m"], prefix=str(tmp_path))
    assert json.loads((folder / "kernel.json").read_text())["argv"][-1] == "2m"
    assert kernel_mode.uninstall("sublet", prefix=str(tmp_path)) == folder
    assert not list(folder.parent.iterdir())
    with pytest.raises(NotFound, match="no kernel 'sublet'"):
        kernel_mode.uninstall("sublet", prefix=str(tmp_path))


def test_a_kernel_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "share" / "jupyter" / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text('{"argv": ["python", "-m", "ipykernel_launcher"]}')
    with pytest.raises(InvalidRequest, match="not Sublet's"):
        kernel_mode.install("python3", [], prefix=str(tmp_path))
    with pytest.raises(InvalidRequest, match="not Sublet's"):
        kernel_mode.uninstall("python3", prefix=str(tmp_path))
    assert (other / "kernel.json").exists()


def test_where_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    assert kernel_mode.folder_of("k", user=True) == tmp_path / "data" / "kernels" / "k"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    assert kernel_mode.folder_of("k") == tmp_path / "env" / "share" / "jupyter" / "kernels" / "k"
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert kernel_mode.folder_of("k") == tmp_path / "data" / "kernels" / "k"


@pytest.mark.parametrize("name", ["", "../k", "My Kernel", "a/b", "x" * 65])
def test_a_name_that_cannot_be_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be the name"):
        kernel_mode.install(name, [], prefix=str(tmp_path))


def test_a_bad_option_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        kernel_mode.install("sublet", ["--vram", "much"], prefix=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "share").write_text("a file")
    with pytest.raises(Unsupported, match="cannot be written"):
        kernel_mode.install("sublet", [], prefix=str(tmp_path))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernelspec", "install", "--gpu", "2GiB", "--ttl", "2m", "--prefix", str(tmp_path)]) == 0
    assert "Python on a leased GPU (VRAM 2GiB, for 2m)" in capsys.readouterr().out
    assert main(["kernelspec", "install", "--user", "--prefix", str(tmp_path)]) == 2
    assert "contradict" in capsys.readouterr().err
    assert main(["kernelspec", "uninstall", "--prefix", str(tmp_path)]) == 0
    assert "gone" in capsys.readouterr().out
    assert main(["kernelspec", "uninstall", "--prefix", str(tmp_path)]) == 1
    assert "jupyter kernelspec list" in capsys.readouterr().err
