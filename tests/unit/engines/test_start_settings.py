"""How an office was started, as a file: read back whole, or refused with what to do."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from sublet.engines.start_settings import (
    SETTINGS_NAME,
    OfficeDiffers,
    SettingsUnusable,
    StartSettings,
    agreed,
    forget_settings,
    read_settings,
    write_settings,
)
from sublet.logs import LogFormat
from sublet.node.agent.inventory import HostGpus, parse_host_gpus
from sublet.values import GIB

FOUR = parse_host_gpus("4x4GiB")
ODD = HostGpus(count=2, size=3 * GIB + 1, namespace="lab")
ALL = [
    StartSettings(),
    StartSettings(host_gpus=FOUR),
    StartSettings(host_gpus=ODD),
    StartSettings(shared=Path("/srv/sub let")),
    StartSettings(log_format=LogFormat.JSON),
    StartSettings(host_gpus=FOUR, shared=Path("/srv/sublet")),
]


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_what_is_written_is_read_back(tmp_path: Path, settings: StartSettings) -> None:
    assert read_settings(tmp_path) is None
    write_settings(tmp_path, settings)
    assert read_settings(tmp_path) == settings
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS_NAME]
    assert (tmp_path / SETTINGS_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_no_truncated_file_is_taken_for_settings_nor_one_with_a_flipped_bit(
    tmp_path: Path, settings: StartSettings
) -> None:
    """The remedy is named, and works."""
    write_settings(tmp_path, settings)
    path = tmp_path / SETTINGS_NAME
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))]
    damaged += [
        whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :] for at in range(len(whole)) for bit in range(8)
    ]
    damaged += [whole + b"\n", whole * 2, b"x" * 10_000]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(SettingsUnusable, match="damaged") as refused:
            read_settings(tmp_path)
        assert str(path) in refused.value.message
        assert "sublet down" in refused.value.do
    assert forget_settings(tmp_path)
    assert read_settings(tmp_path) is None
    assert not forget_settings(tmp_path)


@pytest.mark.parametrize(
    "body", ["[]", "{}", "null", '{"host_gpus": 4}', '{"host_gpus": "many"}', '{"host_gpus": ["4x4GiB"]}', "{"]
)
def test_what_another_program_put_there_is_refused(tmp_path: Path, body: str) -> None:
    text = body.encode() + b"\n"
    (tmp_path / SETTINGS_NAME).write_bytes(f"sublet-started-with 1 {zlib.crc32(text):08x}\n".encode() + text)
    with pytest.raises(SettingsUnusable, match="names no settings"):
        read_settings(tmp_path)


def test_only_a_plain_file_of_ours_is_read(tmp_path: Path) -> None:
    path = tmp_path / SETTINGS_NAME
    path.mkdir()
    with pytest.raises(SettingsUnusable):
        read_settings(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(SettingsUnusable, match="not a file of yours"):
        read_settings(tmp_path)
    path.unlink()
    write_settings(tmp_path, StartSettings())
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsUnusable):
        read_settings(tmp_path)


def test_a_file_that_was_begun_and_not_finished_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / f"{SETTINGS_NAME}.new").write_bytes(b"half")
    assert read_settings(tmp_path) is None
    write_settings(tmp_path, StartSettings(host_gpus=FOUR))
    assert read_settings(tmp_path) == StartSettings(host_gpus=FOUR)


def test_they_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without its content would be a damaged file after a loss of power."""
    done: list[str] = []
    rename, fsync = os.rename, os.fsync

    def synced(fd: int) -> None:
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def renamed(old: Path, new: Path) -> None:
        done.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    write_settings(tmp_path, StartSettings())
    assert done == [f"{SETTINGS_NAME}.new", "rename", tmp_path.name]


def test_a_full_disk_is_no_reason_against_settings_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(tmp_path, StartSettings())

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    write_settings(tmp_path, StartSettings())
    with pytest.raises(SettingsUnusable, match="No space left") as refused:
        write_settings(tmp_path, StartSettings(host_gpus=FOUR))
    assert refused.value.do
    assert read_settings(tmp_path) == StartSettings()


def test_other_devices_than_the_remembered_ones_are_refused_and_both_are_named(tmp_path: Path) -> None:
    assert agreed(tmp_path, None) == StartSettings()
    assert agreed(tmp_path, FOUR) == StartSettings(host_gpus=FOUR)
    write_settings(tmp_path, StartSettings(host_gpus=FOUR))
    assert agreed(tmp_path, None) == agreed(tmp_path, FOUR) == StartSettings(host_gpus=FOUR)
    with pytest.raises(OfficeDiffers) as refused:
        agreed(tmp_path, ODD)
    assert "`sublet up --host-gpus 4x4GiB`" in refused.value.message
    assert f"--host-gpus 2x{3 * GIB + 1}B@lab" in refused.value.message, (
        "exact, since rounded it would be refused again"
    )
    assert "`sublet down`" in refused.value.do
    write_settings(tmp_path, StartSettings())
    with pytest.raises(OfficeDiffers, match="`sublet up`"):
        agreed(tmp_path, FOUR)


def test_the_format_of_the_log_may_change_at_each_start(tmp_path: Path) -> None:
    """It stays where nothing is said, and the rest stays as it was."""
    write_settings(tmp_path, StartSettings(host_gpus=FOUR))
    other = agreed(tmp_path, None, None, LogFormat.JSON)
    assert other == StartSettings(host_gpus=FOUR, log_format=LogFormat.JSON)
    write_settings(tmp_path, other)
    assert agreed(tmp_path, FOUR) == other
    assert other.option_text().endswith(" --log-format json")


def test_the_shared_folder_is_one_of_the_settings(tmp_path: Path) -> None:
    shared = StartSettings(host_gpus=FOUR, shared=Path("/srv/sub let"))
    assert shared.command().endswith("up --host-gpus 4x4GiB --shared '/srv/sub let'"), shared.command()
    write_settings(tmp_path, shared)
    assert agreed(tmp_path, None) == agreed(tmp_path, None, shared.shared) == shared
    with pytest.raises(OfficeDiffers, match="--shared /srv/other"):
        agreed(tmp_path, None, Path("/srv/other"))
    write_settings(tmp_path, StartSettings())
    with pytest.raises(OfficeDiffers):
        agreed(tmp_path, None, shared.shared)
