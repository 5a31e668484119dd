"""Whatever is lent is really free, and whoever is in the way is named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sublet.node.agent.foreign import NAMED_MAX, REPEAT_NS, STEP, ForeignNews, Own, foreign_use, merged
from sublet.node.agent.nvml import MPS_SERVER, CardReading, UsedBy
from sublet.values import GIB, MIB, NodeId, ResourceId
from sublet.wire.orders import Foreign

NODE = NodeId("local")
CARD = ResourceId("local/GPU-1")
CAPACITY = 80 * GIB
NAMES = {4711: ("python", "ada"), 4712: ("Xorg", "root"), 4713: (MPS_SERVER, "root")}
NOTHING = Foreign(node=NODE, resource=CARD)


def look(
    used: int | None,
    processes: dict[int, int | None],
    own: Own | None = None,
    *,
    sees_processes: bool = True,
    allowed: bool = False,
) -> Foreign:
    listed = tuple(UsedBy(pid=pid, bytes=size) for pid, size in processes.items())
    return foreign_use(
        CardReading(uuid="GPU-1", used=used, processes=listed),
        Own() if own is None else own,
        node=NODE,
        resource=CARD,
        capacity=CAPACITY,
        name_of=lambda pid: NAMES.get(pid, ("", "")),
        sees_processes=sees_processes,
        allowed=allowed,
    )


def test_an_idle_card_has_nothing_of_others() -> None:
    assert look(0, {}) == NOTHING
    assert look(None, {}) == NOTHING, "a card that does not tell is not suspected"


def test_a_process_that_is_none_of_ours_is_named_with_what_it_has() -> None:
    found = look(int(2.1 * GIB), {4711: int(2.1 * GIB)})
    assert found.blocks
    assert found.amount == 34 * STEP
    assert found.detail == ("2.12GiB of GPU-1 is used by process 4711 (python) of user ada, which Sublet did not start")


def test_a_process_of_ours_is_no_stranger_and_neither_is_what_its_lease_has_beyond_it() -> None:
    """A context has memory that the driver counts to no process; it lies within the lease."""
    own = Own(pids=frozenset({10, 11}), leased=8 * GIB)
    assert look(7 * GIB, {10: 6 * GIB}, own) == NOTHING


def test_what_a_guest_leaves_while_its_lease_is_torn_down_is_not_taken_for_a_strangers() -> None:
    assert look(5 * GIB, {}, Own(leased=8 * GIB)) == NOTHING


def test_a_desktop_has_its_memory_and_keeps_nobody_from_the_card() -> None:
    reading = CardReading(uuid="GPU-1", used=GIB, processes=(UsedBy(pid=4711, bytes=GIB, draws=True),))
    found = foreign_use(reading, Own(), node=NodeId("n"), resource=ResourceId("n/GPU-1"), capacity=80 * GIB)
    assert (found.amount, found.blocks) == (GIB, False)
    assert "process 4711" in found.detail


def test_what_nobody_can_be_named_for_is_subtracted_and_blocks_as_well() -> None:
    found = look(3 * GIB, {})
    assert (found.amount, found.blocks) == (3 * GIB, True)
    assert found.detail == "3GiB of GPU-1 is used by processes that cannot be seen from here"


def test_in_a_container_the_drivers_pids_are_compared_with_nothing() -> None:
    """They are those of the machine; the same number here is another process."""
    own = Own(pids=frozenset({4711}), leased=GIB)
    found = look(6 * GIB, {4711: 6 * GIB}, own, sees_processes=False)
    assert found.amount == 5 * GIB
    assert "cannot be seen" in found.detail


def test_a_process_whose_share_the_driver_does_not_tell_still_blocks() -> None:
    found = look(0, {4712: None})
    assert (found.amount, found.blocks) == (0, True)
    assert found.detail == "GPU-1 is used by process 4712 (Xorg) of user root, which Sublet did not start"
    assert look(GIB, {4712: None}).amount == GIB


def test_the_operator_may_allow_a_card_for_oneself_beside_others_but_not_their_memory() -> None:
    found = look(GIB, {4711: GIB}, allowed=True)
    assert (found.amount, found.blocks) == (GIB, False)
    assert found.detail


def test_an_mps_server_keeps_no_lease_from_its_card() -> None:
    """Every program of the machine computes through it: no card beside one could ever be leased for oneself."""
    found = look(30 * MIB, {4713: 30 * MIB})
    assert (found.amount, found.blocks) == (STEP, False)
    assert "process 4713 (nvidia-cuda-mps) of user root" in found.detail
    assert look(GIB, {4713: 30 * MIB, 4711: GIB}).blocks, "a program of others does"


def test_of_many_a_few_are_named_and_the_others_counted() -> None:
    found = look(10 * MIB, dict.fromkeys(range(100, 110), MIB))
    assert found.detail.count("process ") == NAMED_MAX
    assert "process 102 and 7 more, which" in found.detail


def test_a_guest_beyond_its_lease_is_no_stranger_and_its_memory_is_not_free() -> None:
    found = look(5 * GIB, {10: 5 * GIB}, Own(pids=frozenset({10}), leased=4 * GIB))
    assert (found.amount, found.blocks) == (GIB, False)
    assert "beyond what their leases have" in found.detail


def test_a_card_of_another_office_is_all_in_use_whoever_is_on_it() -> None:
    taken = Foreign(node=NODE, resource=CARD, amount=CAPACITY, blocks=True, detail="GPU-1 is lent by the office of ada")
    assert merged(taken, NOTHING) == taken
    assert merged(NOTHING, NOTHING) == NOTHING
    both = merged(taken, look(GIB, {4711: GIB}))
    assert (both.amount, both.blocks) == (CAPACITY, True)
    assert both.detail.startswith("GPU-1 is lent by the office of ada; 1GiB of GPU-1 is used by process 4711")


SIZES = st.one_of(st.none(), st.integers(0, CAPACITY))


@given(
    st.one_of(st.none(), st.integers(0, CAPACITY)),
    st.dictionaries(st.integers(1, 9), SIZES, max_size=6),
    st.frozensets(st.integers(1, 9)),
    st.integers(0, CAPACITY),
    st.booleans(),
    st.booleans(),
)
def test_never_more_is_left_to_lend_than_is_free(
    used: int | None, processes: dict[int, int | None], ours: frozenset[int], leased: int, sees: bool, allowed: bool
) -> None:
    found = look(used, processes, Own(pids=ours, leased=leased), sees_processes=sees, allowed=allowed)
    left = CAPACITY - leased - found.amount
    strangers = [pid for pid in processes if pid not in ours] if sees else []
    assert 0 <= found.amount <= CAPACITY
    assert found.amount % STEP == 0 or found.amount == CAPACITY
    assert left <= max(0, CAPACITY - (used or 0)), "lent would be what is in use"
    assert found.amount >= min(CAPACITY, sum(processes[pid] or 0 for pid in strangers))
    if strangers:
        assert found.blocks is not allowed
    if allowed:
        assert not found.blocks
    assert bool(found.detail) == (found != NOTHING)
    assert found.detail.isprintable()


def test_what_did_not_change_is_said_once_a_minute_and_the_first_look_tells_everything() -> None:
    """An office that starts may remember from before what is no longer so."""
    news = ForeignNews()
    busy = look(GIB, {4711: GIB})
    assert news.of([NOTHING], 0) == [NOTHING]
    assert news.of([NOTHING], 1) == []
    assert news.of([busy], 2) == [busy]
    assert news.of([busy], 3) == []
    assert news.of([NOTHING], 4) == [NOTHING]
    assert news.of([NOTHING], REPEAT_NS) == [NOTHING]
    assert news.of([NOTHING], REPEAT_NS + 1) == []


def test_a_few_bytes_more_are_no_news() -> None:
    news = ForeignNews()
    news.of([look(GIB, {4711: GIB - 10})], 0)
    assert news.of([look(GIB, {4711: GIB - 20})], 1) == []
