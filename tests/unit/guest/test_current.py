"""``sublet.current()``: read from the page, and a clear word where there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.guest import current as current_module
from sublet.lease_end import EndReason
from sublet.values import NS_PER_S, Epoch, LeaseId
from sublet.wire.page import PageState, PageView, PageWriter, time_namespace


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def view(**changes: object) -> PageView:
    facts: dict[str, object] = {
        "lease": LeaseId("l-7"),
        "epoch": Epoch(1, 42),
        "deadline_ns": now_ns() + 3600 * NS_PER_S,
        "now_ns": now_ns(),
        "devices": ("host-0",),
        "namespace": time_namespace(),
    }
    return PageView(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageWriter]:
    path = str(tmp_path / "page")
    monkeypatch.setenv("SUBLET_PAGE", path)
    monkeypatch.setattr(current_module, "_known", {})
    with PageWriter.create(path, view()) as made:
        yield made


def test_outside_a_guest_it_says_what_to_do() -> None:
    with pytest.raises(sublet.Unsupported, match=r"does not run under a lease.*sublet run"):
        sublet.current()


def test_a_guest_knows_its_lease(writer: PageWriter) -> None:
    here = sublet.current()
    assert (here.lease, here.epoch, here.devices) == ("l-7", Epoch(1, 42), ("host-0",))
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    remaining = here.remaining
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert here.deadline - after - 1 < remaining < here.deadline - before + 1
    assert 3500 < remaining <= 3600
    assert here.noticed is None
    assert here.end is None
    here.check()
    assert sublet.current() is here
    assert repr(here).startswith("<lease l-7 (epoch 1.42), live, ")


def test_what_is_asked_later_is_answered_from_the_present_page(writer: PageWriter) -> None:
    here = sublet.current()
    writer.write(view(epoch=Epoch(1, 50), deadline_ns=now_ns() + 7200 * NS_PER_S))
    assert here.epoch == Epoch(1, 50)
    assert here.remaining > 7000
    with pytest.raises(sublet.StaleEpoch):
        here.check(Epoch(1, 42))


def test_a_notice_says_when_and_why_and_takes_nothing_yet(writer: PageWriter) -> None:
    at_ns = now_ns() + 30 * NS_PER_S
    writer.write(view(state=PageState.NOTICED, reason=EndReason.PREEMPTED, take_at_ns=at_ns, detail="by interactive"))
    noticed = sublet.current().noticed
    assert noticed is not None
    assert (noticed.reason, noticed.detail) == (EndReason.PREEMPTED, "by interactive")
    assert abs(noticed.take_at - at_ns / NS_PER_S) < 1
    sublet.current().check()


def test_an_end_is_raised_with_its_reason(writer: PageWriter) -> None:
    writer.write(view(state=PageState.OVER, reason=EndReason.PREEMPTED, detail="by interactive"))
    with pytest.raises(sublet.LeaseRevoked, match="preempted: by interactive") as caught:
        sublet.current().check()
    assert caught.value.end is not None
    assert caught.value.end.reason is EndReason.PREEMPTED
    assert sublet.current().end is not None


def test_a_deadline_that_passed_is_an_end_though_nobody_wrote_it(writer: PageWriter) -> None:
    writer.write(view(deadline_ns=now_ns() - 1))
    assert sublet.current().remaining == 0
    with pytest.raises(sublet.LeaseExpired):
        sublet.current().check()


def test_in_another_time_namespace_less_is_promised_never_more(writer: PageWriter) -> None:
    """The supervisor's clock is a day ahead of ours: only the difference of its own two numbers counts."""
    theirs_ns = now_ns() + 86_400 * NS_PER_S
    writer.write(view(namespace=1, now_ns=theirs_ns, deadline_ns=theirs_ns + 100 * NS_PER_S))
    assert 90 < sublet.current().remaining <= 99
