"""Which crash points the suite meets: every pair of call, file and fault, and not all that there are."""

from __future__ import annotations

import pytest

from tests.crash import points
from tests.crash.points import FAULTS, Point, each_kind, pairs_of

PLACES = ("/volume/log", "/volume/packs/#", "/volume")
CALLS = ("write", "fsync", "rename")
POINTS = [
    Point(story, call, n, fault, place=place)
    for story in ("saves", "copies")
    for call in CALLS
    for place in PLACES
    for fault in FAULTS
    for n in (1, 2)
]


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_is_met_with_fewer_points_than_there_are(seed: int) -> None:
    chosen = each_kind(POINTS, seed)
    met = {pair for point in chosen for pair in pairs_of(point)}
    assert met == {pair for point in POINTS for pair in pairs_of(point)}
    assert len(met) == 2 * (len(CALLS) * len(PLACES) + (len(CALLS) + len(PLACES)) * len(FAULTS))
    assert len(chosen) < len(POINTS) // 2
    assert chosen == each_kind(reversed(POINTS), seed)


def test_all_are_met_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "ALL", True)
    assert len(each_kind(POINTS, 1)) == len(POINTS)
