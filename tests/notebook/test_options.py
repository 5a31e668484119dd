"""The line of ``%%gpu``."""

from __future__ import annotations

import os

import pytest

from sublet.errors import InvalidRequest
from sublet.notebook.magic import with_a_body
from sublet.notebook.options import OPTIONS, CellOptions, help_text, parse_line
from sublet.values import GIB, NS_PER_S, Tier


def test_every_option() -> None:
    said = "--vram 1GiB --ttl=5m --gpus 2 --in a,b --out y --tier spot --wait 10m --smaller-ok"
    said += " --python ~/p --with . --with /x"
    assert parse_line(said) == CellOptions(
        vram_bytes=GIB,
        ttl_ns=300 * NS_PER_S,
        gpus=2,
        takes=("a", "b"),
        gives=("y",),
        tier=Tier.SPOT,
        wait_ns=600 * NS_PER_S,
        smaller_ok=True,
        python=os.path.expanduser("~/p"),
        paths=(os.getcwd(), "/x"),
    )
    assert parse_line("") == CellOptions()
    assert parse_line("--no-wait").wait_ns == 0
    assert parse_line("--gpu 8GiB --spot") == parse_line("--vram 8GiB --tier spot")
    assert parse_line("--vram 2G").vram_bytes == parse_line("--vram 2g").vram_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--vrma 1GiB", "did you mean --vram?"),
        ("--vram", "--vram needs a value"),
        ("--vram --ttl 5m", "--vram needs a value"),
        ("--vram 0", "--vram"),
        ("--vram -1GiB", "--vram"),
        ("--vram lots", "--vram"),
        ("--vram 8", "the --vram 8 has no unit"),
        ("--vram 8", "Write 8GiB or 8MiB"),
        ("--vram 8", "For 8 devices add --gpus 8"),
        ("--ttl 0s", "--ttl"),
        ("--ttl nan", "--ttl"),
        ("--gpus 0", "not a number of devices"),
        ("--gpus 1.5", "not a number of devices"),
        ("--gpus 99999999999999999999", "not a number of devices"),
        ("--gpus ٣", "not a number of devices"),
        ("--time 5m", "did you mean --ttl?"),
        ("-g 8GiB", "did you mean --vram?"),
        ("--vram 1GiB --gpu 1GiB", "twice"),
        ("--spot --tier batch", "contradict"),
        ("--tier sopt", "did you mean spot?"),
        ("--in a,1b", "no name of a variable"),
        ("--in ,", "no name of a variable"),
        ("--wait 1m --no-wait", "contradict"),
        ("--no-wait --wait 1m", "contradict"),
        ("--vram 1GiB --vram 2GiB", "twice"),
        ("--smaller-ok=yes", "takes no value"),
        ("1GiB", "does not know what '1GiB' is"),
        ("--in 'a", "quotation"),
        ("–vram 1GiB", "does not know what '–vram' is"),
    ],
)
def test_a_mistake_is_said_with_what_was_meant(line: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_line(line)
    assert says in str(caught.value)


@pytest.mark.parametrize("cell", ["%%gpu --help", "\n%%gpu -h\n\n", "%%gpu help\n", "%%gpu ?"])
def test_a_cell_that_only_with_a_body_is_the_command_for_that(cell: str) -> None:
    assert with_a_body(cell.splitlines(keepends=True)) == ["%gpu help\n"]


@pytest.mark.parametrize("cell", ["%%gpu", "%%gpu\n", "\n%%gpu --vram  1GiB \n\n"])
def test_a_cell_without_code_is_given_a_body_so_that_our_own_error_is_shown(cell: str) -> None:
    line, body = with_a_body(cell.splitlines(keepends=True))
    assert (line.split(), body) == (cell.split(), "\n")


def test_a_cell_about_the_notebooks_shell_is_read_without_the_line_above_it() -> None:
    assert with_a_body(["\n", "%%gpu --ttl 5m\n", "%reset -f\n"]) == ["\n", "# %%gpu --ttl 5m\n", "%reset -f\n"]


@pytest.mark.parametrize("cell", ["%%gpu --help\nx", "", "%%gpu\nx", "%gpu --help", "%%gpus", "x"])
def test_any_other_cell_is_read_as_it_stands(cell: str) -> None:
    lines = cell.splitlines(keepends=True)
    assert with_a_body(lines) is lines


def test_its_help_names_every_option() -> None:
    assert [line.split()[0].rstrip(",") for line in help_text().splitlines()] == [option.flag for option in OPTIONS]


def test_it_says_what_is_asked_for() -> None:
    assert str(parse_line("--vram 2GiB --gpus 2 --ttl 5m --tier spot")) == "VRAM 2GiB, 2 devices, for 5m, tier spot"
    assert str(CellOptions()) == "a device"
