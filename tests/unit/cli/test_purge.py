"""What `sublet purge` may remove: names that are Sublet's, in a folder that can be a state folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from sublet.cli import main
from sublet.cli import purge as purging
from sublet.cli.purge import entries, refuse_place
from sublet.errors import InvalidRequest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder without an office, with a file that is not Sublet's."""
    home = tmp_path / "user" / "state"
    home.mkdir(parents=True, mode=0o700)
    for name in ("journal.db", "journal.db-wal", "incarnation", "office.log.1", "config.toml", "notes.txt", "keys.txt"):
        (home / name).write_bytes(b"x" * 5000)
    for name in ("blocks", "keys", "guests", "replaced-3", "mine"):
        (home / name).mkdir()
        (home / name / "file").write_text("x")
    monkeypatch.setenv("SUBLET_HOME", str(home))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    return home


def test_names_of_ours_are_told_from_others(home: Path) -> None:
    found = entries(home)
    assert {entry.name for entry in found if not entry.kind} == {"notes.txt", "keys.txt", "mine"}
    assert [bool(entry.kind) for entry in found] == sorted((bool(entry.kind) for entry in found), reverse=True)
    assert next(entry.nbytes for entry in found if entry.name == "journal.db") >= 5000


def test_what_is_mounted_is_counted_by_its_image_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says it removes is then what the disk has more."""
    mounted = home / "blocks" / "mounted"
    mounted.mkdir()
    (mounted / "file").write_bytes(b"x" * 1_000_000)
    device = purging._device
    monkeypatch.setattr(purging, "_device", lambda path: -2 if path == str(mounted) else device(path))
    assert next(entry.nbytes for entry in entries(home) if entry.name == "blocks") < 1_000_000


def test_no_program_can_start_an_office_from_before_the_end_of_this_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program whose lease goes on starts an office again as soon as it misses it."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setattr(purging, "runtime_dir", lambda _: runtime)
    tried: list[bool] = []

    def end(*_: object, **__: object) -> None:
        with open(runtime / "start.lock", "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tried.append(True)

    monkeypatch.setattr(purging, "_end", end)
    assert main(["purge", "--yes"]) == 0
    assert tried == [True]
    assert not runtime.exists()


def test_it_removes_what_is_ours_and_names_what_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["purge", "--yes"]) == 0
    said = capsys.readouterr().out
    assert sorted(os.listdir(home)) == ["keys.txt", "mine", "notes.txt"]
    assert (home / "mine" / "file").exists()
    assert "Not Sublet's, and left alone: keys.txt, mine, notes.txt" in said
    assert f"{home} stays" in said
    assert main(["purge", "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_an_empty_folder_goes_as_well(home: Path) -> None:
    for name in ("notes.txt", "keys.txt", "mine/file"):
        (home / name).unlink()
    (home / "mine").rmdir()
    assert main(["purge", "--yes"]) == 0
    assert not home.exists()
    assert main(["purge", "--yes"]) == 0


def test_links_are_removed_and_never_followed(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    (home / "jobs").symlink_to(precious)
    (home / "blocks" / "inner").symlink_to(precious)
    (home / "supervisor.log").symlink_to(precious / "thesis.tex")
    assert main(["purge", "--yes"]) == 0
    assert "a link (what it points to stays)" in capsys.readouterr().out
    assert (precious / "thesis.tex").read_text() == "x"
    assert not (home / "jobs").is_symlink()


def test_it_asks_first(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir(home))
    assert main(["purge"]) == 2, "stdin is no terminal"
    assert "Use --yes" in capsys.readouterr().err

    class Terminal:
        answer = "\n"

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self.answer

    terminal = Terminal()
    monkeypatch.setattr("sys.stdin", terminal)
    for terminal.answer in ("\n", "n\n", "", "yesterday\n"):
        assert main(["purge"]) == 1
        said = capsys.readouterr().out
        assert "Remove all this? [y/N]" in said
        assert "Nothing was removed." in said
        assert sorted(os.listdir(home)) == before
    terminal.answer = "Y\n"
    assert main(["purge"]) == 0
    assert not (home / "journal.db").exists()


@pytest.mark.parametrize("where", ["/", "user", ""])
def test_a_home_folder_is_refused_even_if_an_office_was_in_it(
    where: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``/``, the user's home, and what holds it; also where SUBLET_HOME is a link to it."""
    place = Path(where) if where == "/" else tmp_path / where
    link = tmp_path / "link"
    link.symlink_to(place)
    if where != "/":
        (place / "journal.db").write_text("x")
    for text in (str(place), f"{place}/.", str(link)):
        monkeypatch.setenv("SUBLET_HOME", text)
        assert main(["purge", "--yes", "--now"]) == 2
        assert "is a home folder or holds one" in capsys.readouterr().err
    assert (home / "journal.db").exists()
    assert where == "/" or (place / "journal.db").exists()


def test_a_folder_that_is_not_ours_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="belongs to another user"):
        refuse_place(home, os.getuid() + 1)
    other = tmp_path / "project"
    (other / "keys").mkdir(parents=True)  # a name of ours, and no state folder
    with pytest.raises(InvalidRequest, match="no state folder"):
        refuse_place(other, os.getuid())
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="is not a folder"):
        refuse_place(tmp_path / "file", os.getuid())


def test_an_office_elsewhere_is_not_purged(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("SUBLET_URL", "https://gpu.example.org")
    assert main(["purge", "--yes"]) == 2
    assert (home / "journal.db").exists()
