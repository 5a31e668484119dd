"""What a guest reads of being parked, and what it says while it answers a call."""

from __future__ import annotations

import multiprocessing
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sublet.errors import LeaseNotActive, StaleEpoch
from sublet.guest.at_work import AtWork
from sublet.values import Epoch, LeaseId
from sublet.wire.page import PageReader, PageState, PageView, PageWriter, decode, encode
from sublet.wire.usage_counters import TallyFile

A, UNDER, AGAIN = LeaseId("a"), LeaseId("a-p1"), LeaseId("again")
FAR_NS = 1 << 62
PATIENCE_S = 120.0
BEFORE = PageView(lease=A, epoch=Epoch(1, 3), deadline_ns=FAR_NS, now_ns=1, devices=("n/gpu0",))
PARKED = PageView(
    lease=UNDER, epoch=Epoch(1, 5), deadline_ns=FAR_NS, now_ns=2, state=PageState.PARKED, since=Epoch(1, 3)
)
AFTER = PageView(lease=AGAIN, epoch=Epoch(1, 8), deadline_ns=FAR_NS, now_ns=3, devices=("n/gpu1",), since=Epoch(1, 3))


def written(view: PageView, path: Path) -> PageView:
    with PageWriter.create(str(path), view):
        found = decode(path.read_bytes())
    assert found is not None
    return found[1]


@pytest.mark.parametrize("view", [BEFORE, PARKED, AFTER])
def test_a_page_says_since_when_connections_are_good(view: PageView, tmp_path: Path) -> None:
    """And comes back as it was written; where nothing was ever parked there is nothing to say."""
    assert written(view, tmp_path / "page") == view
    own = replace(view, since=view.epoch)
    assert written(own, tmp_path / "page").since is None
    assert len(encode(view, 7)) <= 2032


def test_what_began_before_goes_on_afterwards() -> None:
    """A connection that came under the first lease is good under the one that resumed it, and no older one is."""
    AFTER.check(A, Epoch(1, 3), 5)
    AFTER.check(AGAIN, Epoch(1, 8), 5)
    for lease, epoch in ((A, Epoch(1, 2)), (AGAIN, Epoch(1, 9)), (A, Epoch(0, 3))):
        with pytest.raises(StaleEpoch):
            AFTER.check(lease, epoch, 5)
    with pytest.raises(StaleEpoch):
        replace(AFTER, since=None).check(A, Epoch(1, 3), 5)


def test_while_it_is_parked_nothing_may_be_done() -> None:
    """By whatever epoch, its own included."""
    for lease, epoch in ((A, Epoch(1, 3)), (UNDER, Epoch(1, 5))):
        with pytest.raises(LeaseNotActive, match="is parked under a-p1"):
            PARKED.check(lease, epoch, 5)


def test_a_reader_waits_until_it_goes_on(tmp_path: Path) -> None:
    """So a call that comes to a parked worker is answered late, and not refused."""
    path = tmp_path / "page"
    with PageWriter.create(str(path), PARKED) as writer:
        reader = PageReader(str(path))
        done: list[PageView] = []
        waiting = threading.Thread(target=lambda: done.append(reader.check(A, Epoch(1, 3))))
        waiting.start()
        time.sleep(0.05)
        assert not done
        writer.write(AFTER)
        waiting.join(PATIENCE_S)
        assert [view.lease for view in done] == [AGAIN]
        reader.close()


def _work(path: str, begin: object, finish: object) -> None:
    tally = TallyFile.open(path)
    working = AtWork(tally)
    with working, working:
        begin.set()  # type: ignore[attr-defined]
        finish.wait(PATIENCE_S)  # type: ignore[attr-defined]


def test_a_guest_at_work_is_seen_without_being_asked(tmp_path: Path) -> None:
    """From another process; and one that is killed in the middle is not at work any more."""
    path = str(tmp_path / "rows")
    tally = TallyFile.create(path)
    assert not tally.is_at_work()
    spawn = multiprocessing.get_context("spawn")
    for killed in (False, True):
        begin, finish = spawn.Event(), spawn.Event()
        process = spawn.Process(target=_work, args=(path, begin, finish))
        process.start()
        assert begin.wait(PATIENCE_S)
        assert tally.is_at_work()
        if killed:  # and nobody sets what it waited for: that would wait for an answer from the dead
            process.kill()
        else:
            finish.set()
        process.join(PATIENCE_S)
        assert not tally.is_at_work()
    tally.close()


def test_where_there_is_no_tally_there_is_nothing_to_say() -> None:
    """A lease without devices is never parked."""
    with AtWork(None):
        pass
