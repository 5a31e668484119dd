"""The guest's page: what is written is what is read, whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import (
    Disconnected,
    InvalidRequest,
    LeaseExpired,
    LeaseNotActive,
    LeaseRevoked,
    NotFound,
    StaleEpoch,
    SubletError,
)
from sublet.lease_end import EndReason
from sublet.values import NS_PER_S, Epoch, LeaseId
from sublet.wire import page as page_module
from sublet.wire.page import (
    PAGE_BYTES,
    UPDATE_NS,
    PageReader,
    PageState,
    PageView,
    PageWriter,
    decode,
    encode,
    time_namespace,
)

LEASE = LeaseId("l-7")
EPOCH = Epoch(1, 42)


def view(**changes: object) -> PageView:
    facts: dict[str, object] = {
        "lease": LEASE,
        "epoch": EPOCH,
        "deadline_ns": 100 * NS_PER_S,
        "now_ns": 90 * NS_PER_S,
        "namespace": time_namespace(),
    }
    return PageView(**{**facts, **changes})  # type: ignore[arg-type]


instants = st.integers(min_value=0, max_value=(1 << 63) - 1)
numbers = st.integers(min_value=0, max_value=10**18 - 1)
names = st.text(st.characters(codec="ascii", exclude_categories=["C", "Z"]), min_size=1, max_size=30)
views = st.builds(
    PageView,
    lease=names.map(LeaseId),
    epoch=st.builds(Epoch, numbers, numbers),
    deadline_ns=instants,
    now_ns=instants,
    state=st.sampled_from(PageState),
    reason=st.none() | st.sampled_from(EndReason),
    take_at_ns=instants,
    devices=st.lists(names, max_size=8).map(tuple),
    office=names,
    detail=st.text(max_size=40),
    namespace=st.integers(min_value=0, max_value=(1 << 64) - 1),
)


def bytes_of(one: PageView | None, other: PageView | None, number: int = 7) -> bytearray:
    """A page with these two in its slots; the second is the newer."""
    page = bytearray(page_module._HEAD.pack(page_module.MAGIC, page_module.VERSION).ljust(PAGE_BYTES, b"\0"))
    for at, what in enumerate((one, other)):
        if what is not None:
            slot = encode(what, number + at)
            start = page_module._SLOTS[(number + at) % 2]
            page[start : start + len(slot)] = slot
    return page


@given(views, views)
def test_what_is_encoded_comes_back_and_the_newest_wins(old: PageView, new: PageView) -> None:
    assert decode(bytes(bytes_of(old, new))) == (8, new)
    assert decode(bytes(bytes_of(old, None))) == (7, old)


@given(views, views, st.data())
def test_a_page_that_was_half_written_shows_the_state_before(old: PageView, new: PageView, data: st.DataObject) -> None:
    """Cut the write of the newer slot at any byte: the older state is believed, or (all was written) the newer."""
    slot = encode(new, 8)
    cut = data.draw(st.integers(min_value=0, max_value=len(slot)))
    page = bytes_of(old, None)
    start = page_module._SLOTS[0]
    page[start : start + cut] = slot[:cut]
    assert decode(bytes(page)) in ((7, old), (8, new))
    assert cut < len(slot) - 8 or decode(bytes(page)) is not None


@given(st.integers(min_value=page_module._HEAD.size, max_value=PAGE_BYTES - 1), st.integers(min_value=0, max_value=7))
def test_a_flipped_bit_is_never_believed(at: int, bit: int) -> None:
    old, new = view(detail="old"), view(detail="new")
    page = bytes_of(old, new)
    page[at] ^= 1 << bit
    assert decode(bytes(page)) in ((7, old), (8, new))


def test_with_no_slot_whole_there_is_nothing() -> None:
    assert decode(bytes(bytes_of(None, None))) is None


@pytest.mark.parametrize("page", [b"", b"x" * PAGE_BYTES, b"\0" * PAGE_BYTES, b"SUBLETPG"])
def test_what_is_no_page_is_refused(page: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not the page of a guest"):
        decode(page)


def test_a_page_of_another_version_is_refused() -> None:
    page = bytes_of(view(), None)
    page[8] = 99
    with pytest.raises(InvalidRequest, match="version 99"):
        decode(bytes(page))


@pytest.mark.parametrize(
    "too_much",
    [{"lease": LeaseId("l" * 129)}, {"office": "o" * 129}, {"devices": tuple("GPU" * 10 for _ in range(40))}],
)
def test_what_does_not_fit_is_refused_and_not_cut(too_much: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="has room for"):
        encode(view(**too_much), 1)


def test_a_detail_is_cut_and_still_text() -> None:
    found = decode(bytes(bytes_of(view(detail="é" * 300), None)))
    assert found is not None
    assert found[1].detail.startswith("é" * 100)


# ------------------------------------------------------------------------------------------------------------ the law


@pytest.mark.parametrize(
    ("state", "asked", "now_s", "error"),
    [
        (view(), (LEASE, EPOCH), 99, None),
        (view(), (LEASE, EPOCH), 100, LeaseExpired),
        (view(), (LEASE, Epoch(1, 41)), 99, StaleEpoch),
        (view(), (LEASE, Epoch(2, 1)), 99, StaleEpoch),
        (view(), (LeaseId("l-8"), EPOCH), 99, StaleEpoch),
        (view(state=PageState.NOTICED, reason=EndReason.PREEMPTED), (LEASE, EPOCH), 99, None),
        (view(state=PageState.OVER, reason=EndReason.PREEMPTED), (LEASE, EPOCH), 99, LeaseRevoked),
        (view(state=PageState.OVER, reason=EndReason.EXPIRED), (LEASE, EPOCH), 99, LeaseExpired),
        (view(state=PageState.OVER, reason=EndReason.RELEASED), (LEASE, EPOCH), 99, LeaseNotActive),
        (view(state=PageState.OVER), (LEASE, EPOCH), 99, LeaseExpired),
        (view(state=PageState.LEAVING, reason=EndReason.PREEMPTED), (LEASE, EPOCH), 99, LeaseRevoked),
        (view(state=PageState.LEAVING), (LEASE, EPOCH), 99, LeaseExpired),
        (view(state=PageState.PARKED), (LEASE, EPOCH), 99, LeaseNotActive),
    ],
)
def test_only_the_live_pair_may_act_and_only_until_the_deadline(
    state: PageView, asked: tuple[LeaseId, Epoch], now_s: int, error: type[SubletError] | None
) -> None:
    if error is None:
        state.check(*asked, now_s * NS_PER_S)
    else:
        with pytest.raises(error):
            state.check(*asked, now_s * NS_PER_S)


@given(views, instants, st.integers(min_value=0, max_value=UPDATE_NS), st.integers(min_value=0, max_value=1 << 50))
def test_the_time_of_another_namespace_is_never_read_as_earlier(
    page: PageView, offset_ns: int, late_ns: int, elapsed_ns: int
) -> None:
    """Whatever the offset, and however late (within an update) the state was seen: never before the real time."""
    seen_ns = page.now_ns + late_ns + offset_ns
    real_ns = page.now_ns + late_ns + elapsed_ns
    read_ns = page.at(seen_ns + elapsed_ns, seen_ns, page.namespace + 1)
    assert real_ns <= read_ns <= real_ns + UPDATE_NS
    assert page.at(real_ns, 0, page.namespace) == real_ns


# ------------------------------------------------------------------------------------------------------ a real file


def test_a_page_is_seen_whole_and_kept_up_to_date(tmp_path: Path) -> None:
    path = str(tmp_path / "page")
    with PageWriter.create(path, view()) as writer:
        assert os.listdir(tmp_path) == ["page"]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o444
        reader = PageReader(path)
        assert reader.read() == view()
        newer = view()
        for n in range(5):
            newer = view(now_ns=n, state=PageState.NOTICED, reason=EndReason.QUOTA, devices=("GPU-1", "GPU-2"))
            writer.write(newer)
            assert reader.read() == newer
    writer.close()
    assert reader.read() == newer
    reader.close()


def test_a_page_is_made_for_its_owner_alone_where_that_is_asked(tmp_path: Path) -> None:
    PageWriter.create(str(tmp_path / "page"), view(), mode=0o400).close()
    assert stat.S_IMODE(os.stat(tmp_path / "page").st_mode) == 0o400


def test_a_page_that_could_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        PageWriter.create(str(tmp_path / "page"), view(lease=LeaseId("l" * 200)))
    assert os.listdir(tmp_path) == []


def test_the_guest_cannot_write_through_its_mapping(tmp_path: Path) -> None:
    PageWriter.create(str(tmp_path / "page"), view()).close()
    with pytest.raises(TypeError):
        PageReader(str(tmp_path / "page"))._map[0] = 1


def test_no_page_is_told_from_a_page_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no page"):
        PageReader(str(tmp_path / "page"))
    (tmp_path / "page").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match="not the page"):
        PageReader(str(tmp_path / "page"))


def test_a_page_never_whole_is_said_and_one_that_was_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(bytes(bytes_of(None, None)))
    with pytest.raises(Disconnected):
        PageReader(str(tmp_path / "page")).read()
    writer = PageWriter.create(str(tmp_path / "good"), view())
    reader = PageReader(str(tmp_path / "good"))
    assert reader.read() == view()
    os.pwrite(writer._fd, bytes(PAGE_BYTES - 16), 16)
    assert reader.read() == view()
    writer.close()


def test_the_deadline_is_judged_by_the_present_not_by_the_last_update(tmp_path: Path) -> None:
    own_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    writer = PageWriter.create(str(tmp_path / "page"), view(deadline_ns=own_ns + 3600 * NS_PER_S, now_ns=own_ns))
    reader = PageReader(str(tmp_path / "page"))
    assert reader.check(LEASE, EPOCH).epoch == EPOCH
    writer.write(view(deadline_ns=own_ns, now_ns=own_ns - 5 * NS_PER_S))
    with pytest.raises(LeaseExpired):
        reader.check(LEASE, EPOCH)
    writer.close()


WRITER = """
import select, sys
from sublet.values import Epoch
from sublet.wire.page import PageView, PageWriter
def state(n):
    return PageView(lease="l-%d" % n, epoch=Epoch(n, n), deadline_ns=n, now_ns=n, take_at_ns=n, detail=str(n) * 20,
                    devices=tuple(str(n) for _ in range(n % 7)))
with PageWriter.create(sys.argv[1], state(1)) as writer:
    print("there", flush=True)
    n = 1
    while not select.select([sys.stdin], [], [], 0)[0]:
        for n in range(n + 1, n + 101):
            writer.write(state(n))
print(n)
"""


MEETINGS: Final = 20
"""States that the reader sees at least."""


@pytest.mark.slow
def test_a_reader_never_sees_two_states_mixed(tmp_path: Path) -> None:
    """A writer in another process, as fast as it can, for a second, and until the two have met often enough."""
    path, pipe = str(tmp_path / "page"), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdin=pipe, stdout=pipe, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "there\n"
        reader, last, seen, until_s = PageReader(path), 0, set[int](), time.monotonic() + 1.0
        while writer.poll() is None:
            if time.monotonic() > until_s and len(seen) > MEETINGS and not writer.stdin.closed:
                writer.stdin.close()
            found = reader.read()
            n = found.now_ns
            assert found == PageView(
                lease=LeaseId(f"l-{n}"),
                epoch=Epoch(n, n),
                deadline_ns=n,
                now_ns=n,
                take_at_ns=n,
                detail=str(n) * 20,
                devices=tuple(str(n) for _ in range(n % 7)),
            )
            assert n >= last
            last = n
            seen.add(n)
        written = int(writer.stdout.read())
        assert writer.returncode == 0
    assert reader.read().now_ns == written
