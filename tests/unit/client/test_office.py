"""What is said of an office that did not come up."""

from __future__ import annotations

from pathlib import Path

from sublet.client.office import _failed


def test_one_that_could_not_write_a_word_is_asked_for(tmp_path: Path) -> None:
    """Most often there is no room for it; else nobody knows."""
    log = tmp_path / "office.log"
    log.touch()
    assert str(_failed(log, 0, "it did not start").message) == "it did not start: it wrote nothing to its log"
    assert [path.name for path in tmp_path.iterdir()] == ["office.log"]
    (tmp_path / "full").symlink_to("/proc/self")
    said = _failed(tmp_path / "full" / "limits", 1 << 20, "it did not start").message
    assert said == f"it did not start: no such file or directory in {tmp_path}/full"
