"""Two notebooks on one device at the same time, each within the VRAM that it asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.cli import main
from tests.integration.office_stage import OfficeStage
from tests.notebook.shell_stage import shell_on, stage_on, wait_for

pytestmark = pytest.mark.slow  # real kernels: one second each

MEET = """%%gpu {options}
import os, time
open({mine!r}, "w").close()
until = time.monotonic() + 100
while not os.path.exists({other!r}) and time.monotonic() < until:
    time.sleep(0.01)
met = os.path.exists({other!r})
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[OfficeStage]:
    with stage_on(tmp_path / "office", "1x1GiB") as stage:
        yield stage


def test_two_notebooks_share_a_device_by_option_and_by_configuration(
    stage: OfficeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell waits for the other one to run. The first asks with --shared; the second, and what it holds, follows
    from `sublet config`. An option of a cell goes before that."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    with shell_on(stage, tmp_path / "a") as first, shell_on(stage, tmp_path / "b") as second:
        first.ask(MEET.format(options="--vram 256MiB --shared --wait 100s", mine=one, other=two))
        wait_for(Path(one))
        monkeypatch.setenv("SUBLET_HOME", str(stage.office.home))
        assert main(["config", "set", "shared", "true"]) == 0
        assert main(["config", "set", "vram", "128M"]) == 0
        second.ask(MEET.format(options="--wait 100s", mine=two, other=one))
        for shell in (first, second):
            answer = shell.answer()
            assert answer["error"] == "", answer
            assert shell.value("met") is True
        assert "host device, no GPU), 256MiB, " in first.run("%gpu")["out"]
        assert "host device, no GPU), 128MiB, " in second.run("%gpu")["out"]
        first.run("%gpu release")
        answer = second.run("%%gpu --exclusive --vram 128MiB\nalone = [1]")
        assert answer["error"] == "", answer
        assert "host device, no GPU), 1GiB, " in second.run("%gpu")["out"], "the device is reserved whole"
        assert main(["config", "set", "vram", "128M"]) == 0
        (stage.office.home / "config.toml").write_text("vram = 8\n")
        answer = second.run("%%gpu\n1")
        assert "config.toml:1: the vram 8 has no unit" in answer["said"]
