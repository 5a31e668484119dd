"""What `sublet session` says while it waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sublet.cli.session import _hold
from sublet.client.model import Place
from sublet.values import LeaseId


@pytest.mark.parametrize(
    ("estimate", "error_s", "says"),
    [
        (300.0, 20.0, "queued, place 3, about 5m to go (nine tenths of such estimates were within 20s): two are first"),
        (300.0, None, "queued, place 3, about 5m to go: two are first"),
        (None, 20.0, "queued, place 3: two are first"),
    ],
)
def test_a_start_that_waits_shows_its_place_and_how_good_estimates_were(
    estimate: float | None, error_s: float | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a cell and the page do; it waited in silence."""
    taken: list[object] = []

    def acquire(ident: str, more: dict[str, Any], on_offer: object) -> str:
        if "on_place" in more:
            more["on_place"](Place(lease=LeaseId("l-1"), position=3, reason="two are first", estimate=estimate))
        return "held"

    estimates = None if error_s is None else SimpleNamespace(p90_error=error_s)
    fabric = cast("Any", SimpleNamespace(status=lambda: SimpleNamespace(estimates=estimates)))
    sessions = cast("Any", SimpleNamespace(acquire=acquire, set_down=lambda *what: taken.append(what)))
    session = cast("Any", SimpleNamespace(id="s-1"))
    _hold(fabric, sessions, session, 60.0, as_json=False)
    assert capsys.readouterr().err == f"{says} (Ctrl-C leaves the queue)\n"
    _hold(fabric, sessions, session, 60.0, as_json=True)
    assert capsys.readouterr().err == "", "for a program stderr is for what went wrong"
    assert taken == [("s-1", "held")] * 2
