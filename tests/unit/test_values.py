"""Sizes: one parser for options, cells, files and Python arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet.client.requests import ask_block, ask_gpu, ask_memory
from sublet.errors import InvalidRequest
from sublet.values import GIB, MIB, format_size, parse_memory, parse_size


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        ("8G", 8 * GIB),
        ("80g", 80 * GIB),
        ("512M", 512 * MIB),
        ("2Gi", 2 * GIB),
        ("64k", 64 << 10),
        ("1T", 1 << 40),
        ("8GB", 8 * 10**9),
        ("500mb", 500 * 10**6),
        ("1.5GiB", 3 * GIB // 2),
        ("1.5G", 3 * GIB // 2),
        ("0.1GB", 10**8),
        (" 8 GiB ", 8 * GIB),
        ("8\tGiB", 8 * GIB),
        ("300B", 300),
        ("008GiB", 8 * GIB),
    ],
)
def test_a_size_is_a_number_with_a_unit(text: str, amount: int) -> None:
    assert parse_size(text) == amount


@pytest.mark.parametrize("amount", [1, 300, MIB, 3 * GIB // 2, 80 * GIB, 5 << 40])
def test_a_size_that_was_printed_can_be_read(amount: int) -> None:
    assert parse_size(format_size(amount)) == amount


@pytest.mark.parametrize(
    ("text", "do"),
    [
        ("8", "Write 8GiB or 8MiB; if bytes are meant, 8B."),
        (" 512 ", "Write 512GiB or 512MiB; if bytes are meant, 512B."),
        ("1.5", "Write 1.5GiB or 1.5MiB."),
        ("17179869184", "If bytes are meant, write 16GiB."),
        ("16000000000", "If bytes are meant, write 16GB."),
        ("17179869185", "If bytes are meant, write 17179869185B."),
    ],
)
def test_a_number_without_a_unit_is_refused_with_what_it_may_mean(text: str, do: str) -> None:
    with pytest.raises(InvalidRequest, match="has no unit") as caught:
        parse_size(text, "--vram")
    assert caught.value.do == do


def test_a_small_number_may_be_meant_as_a_number_of_devices() -> None:
    with pytest.raises(InvalidRequest, match="the --vram 8 has no unit") as caught:
        parse_size("8", "--vram", counted_by="--gpus")
    assert caught.value.do.endswith(" For 8 devices add --gpus 8.")
    with pytest.raises(InvalidRequest) as caught:
        parse_size("8192", "--vram", counted_by="--gpus")
    assert "--gpus" not in caught.value.do


REFUSED = [
    *(
        "",
        " ",
        "\x00",
        "GiB",
        "-1GiB",
        "+1GiB",
        "0GiB",
        "0.0000001KiB",
        "1e3GiB",
        "1,5GiB",
        "1_000MiB",
        ".5GiB",
        "5.GiB",
    ),
    *(
        "1.5.2GiB",
        "1GiBs",
        "1 Gi B",
        "8 G 8 G",
        "٨GiB",
        "８GiB",
        "8ＧiB",
        "9" * 30 + "B",
        "9" * 20 + "PiB",
        "nan",
        "infGiB",
    ),
    *(None, True, 1.5, b"8GiB", ["8GiB"], 0, -1, 1 << 61, 10**5000),
]


@pytest.mark.parametrize("value", REFUSED, ids=range(len(REFUSED)))
def test_everything_else_is_refused_in_one_short_sentence(value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_size(value)  # type: ignore[arg-type]
    assert caught.value.do
    assert len(caught.value.message) < 120


def test_an_int_is_bytes() -> None:
    assert parse_size(4096) == 4096
    assert parse_memory(16 * 1024**3) == 16 * GIB


def _gpu(min_vram: int | str, *, or_smaller: bool | int | str = False) -> object:
    return ask_gpu({}, min_vram=min_vram, count=1, exclusivity=None, model=None, or_smaller=or_smaller)


@pytest.mark.parametrize("amount", [1, 8, 16384, MIB - 1])
def test_an_int_of_vram_or_memory_below_one_mebibyte_is_refused(amount: int) -> None:
    asked: list[Callable[[], object]] = [
        lambda: _gpu(amount),
        lambda: _gpu(GIB, or_smaller=amount),
        lambda: ask_memory({}, size=amount, or_smaller=False),
    ]
    for ask in asked:
        with pytest.raises(InvalidRequest, match=f"{amount} is {amount} bytes") as caught:
            ask()
        assert f'"{amount}GiB"' in caught.value.do


def test_one_mebibyte_and_a_text_in_bytes_are_taken() -> None:
    _gpu(MIB)
    _gpu("8B")
    ask_memory({}, size=MIB, or_smaller=False)


def test_a_volume_is_at_least_one_block() -> None:
    ask_block({}, size=4096, min_blocks=None)
    with pytest.raises(InvalidRequest, match="512 is 512 bytes") as caught:
        ask_block({}, size=512, min_blocks=None)
    assert "min_blocks=512" in caught.value.do
