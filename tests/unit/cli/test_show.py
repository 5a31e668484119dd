"""What people see is aligned, sober, and cannot be painted over by a name."""

from __future__ import annotations

import io
import json

import pytest

from sublet.cli import exit_status, show
from sublet.cli.declare import UsageError
from sublet.client.model import Offer
from sublet.errors import (
    CapacityExceeded,
    Disconnected,
    InvalidRequest,
    LeaseRevoked,
    NotFound,
    QuotaExceeded,
    SubletError,
    Unauthorized,
)
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import Kind


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_is_aligned_and_has_no_trailing_blanks() -> None:
    text = show.table(["NAME", "SIZE"], [["a", "10"], ["longer", "9"]], right=["SIZE"])
    assert text.splitlines() == ["NAME    SIZE", "a         10", "longer     9"]


def test_an_empty_table_is_its_head() -> None:
    assert show.table(["A", "B"], []) == "A  B"


def test_a_name_cannot_move_the_cursor_or_start_a_line() -> None:
    """Names come from other tenants; control characters and escapes are shown as dots."""
    assert show.visible("a\x1b[2Kb\nc") == "a·[2Kb·c"
    assert "\x1b" not in show.table(["N"], [["\x1b[31mred"]])


@pytest.mark.parametrize(
    ("no_color", "term", "coloured"), [("", "xterm", True), ("1", "xterm", False), ("", "dumb", False)]
)
def test_colour_is_for_terminals_that_want_it(
    monkeypatch: pytest.MonkeyPatch, no_color: str, term: str, coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", term)
    assert ("\x1b" in show.paint("x", "red", stream=Terminal())) is coloured
    assert show.paint("x", "red", stream=io.StringIO()) == "x"


def test_a_host_device_is_never_taken_for_a_gpu() -> None:
    part = {"resource": "local/gpu0", "kind": "gpu", "host": True, "model": "host"}
    assert show.where(part) == "local/gpu0 (host device, no GPU)"
    assert show.where({**part, "host": False, "model": "NVIDIA H200"}) == "local/gpu0 (NVIDIA H200)"
    assert show.where({**part, "kind": "cpu"}) == "local/gpu0"


END = LeaseEnd(reason=EndReason.PREEMPTED, at="2026-01-01T00:00:00.000Z", detail="by interactive")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("x"), 2),
        (InvalidRequest("x"), 2),
        (NotFound("x"), 1),
        (CapacityExceeded("x"), 75),
        (QuotaExceeded("x"), 75),
        (LeaseRevoked("x", end=END), 76),
        (Unauthorized("x"), 1),
        (Disconnected("x"), 1),
        (SubletError("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_status(error: SubletError, status: int) -> None:
    assert exit_status.status_of(error) == status


def test_an_error_is_one_sentence_of_what_happened_and_one_of_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status.print_error(NotFound("there is no lease x", do="See the list."), as_json=False) == 1
    said = capsys.readouterr()
    assert said.err == "sublet: there is no lease x\n  See the list.\n"
    assert said.out == ""


def test_with_json_the_error_is_a_document_on_stderr_and_stdout_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the shape the office sends, with the numbers of a refusal and the reason of an end."""
    offer = Offer(kind=Kind.GPU, asked=8, offered=4)
    exit_status.print_error(CapacityExceeded("GPU unavailable", offer=offer, estimate=12.5), as_json=True)
    said = capsys.readouterr()
    assert said.out == ""
    assert json.loads(said.err)["error"] == {
        "kind": "CapacityExceeded",
        "message": "GPU unavailable",
        "do": CapacityExceeded.default_do,
        "transient": True,
        "reason": None,
        "would_fit": 4,
        "estimate": 12.5,
    }
    exit_status.print_error(LeaseRevoked("taken", end=END), as_json=True)
    assert json.loads(capsys.readouterr().err)["error"]["end"] == {
        "reason": "preempted",
        "at": END.at,
        "detail": "by interactive",
    }
