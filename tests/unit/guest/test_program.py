"""What a guest may be asked to run, and what other processes see of it."""

from __future__ import annotations

import pytest

from sublet.errors import InvalidRequest
from sublet.guest.after_fork import shown_marks
from sublet.guest.program import Program, read_entry
from sublet.guest.zygote_checks import mapped_device, open_device


def test_an_entry_point_is_a_module_and_a_name() -> None:
    assert read_entry("train.loop:main", '{"epochs": 3}') == (("train.loop", "main"), {"epochs": 3})
    assert read_entry("m:Class.method", "") == (("m", "Class.method"), {})


@pytest.mark.parametrize("entry", ["", "train", ":main", "train:", "a b:c", "os.path:join()", "..x:y", "a:b:c"])
def test_what_is_no_entry_point_is_refused(entry: str) -> None:
    with pytest.raises(InvalidRequest, match="not an entry point"):
        read_entry(entry, "")


@pytest.mark.parametrize("args", ["{", "[1]", "3", "null"])
def test_arguments_are_a_json_object(args: str) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        read_entry("m:f", args)


@pytest.mark.parametrize("argv", [(), ("-",), ("-m",), ("-c",)])
def test_a_command_line_without_a_program_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        Program(argv=argv).run()


def test_marks_fill_the_room_exactly_and_never_more() -> None:
    marks = {"SUBLET_LEASE": "l-7", "SUBLET_LONG": "x" * 100, "SUBLET_EPOCH": "1.42"}
    shown = shown_marks(marks, 64)
    assert len(shown) == 64
    assert shown.rstrip(b"\0").split(b"\0") == [b"", b"SUBLET_LEASE=l-7", b"SUBLET_EPOCH=1.42"]
    assert shown_marks(marks, 3) == b"\0\0\0"


MAPS = """\
7f00-7f01 r-xp 00000000 fe:00 1234  /usr/lib/libcuda_lookalike.so
7f01-7f02 rw-s 00000000 00:05 88    /dev/shm/segment
7f02-7f03 rw-s 00000000 00:01 12    /dev/zero (deleted)
7f03-7f04 rw-p 00000000 00:00 0     /memfd:/dev/x (deleted)
"""


def test_a_mapped_device_is_found_and_memory_is_none() -> None:
    assert mapped_device(MAPS.splitlines()) is None
    assert mapped_device([*MAPS.splitlines(), "7f04-7f05 rw-s 00000000 00:05 9 /dev/nvidia0"]) == "/dev/nvidia0"


def test_only_a_device_with_a_state_counts_as_open() -> None:
    with open("/dev/null", "rb") as null, open("/dev/full", "rb") as full, open(__file__, "rb") as file:
        links = {one: f"/proc/self/fd/{one.fileno()}" for one in (null, full, file)}
        assert open_device([links[null], links[file], "/proc/self/fd/9999"]) is None
        assert open_device(links.values()) == "/dev/full"
