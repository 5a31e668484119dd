"""The tables of the law: every state against every event, and what must hold of the tables as wholes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path

import pytest

from sublet.errors import InvalidRequest
from sublet.lease import drawing
from sublet.lease.drawing import MACHINES, StateTable
from sublet.lease.states import (
    COUPLING,
    GUEST_TABLE,
    HOLDER_TABLE,
    LEASE_TABLE,
    SLICE_TABLE,
    VOLUME_TABLE,
    GuestEvent,
    GuestState,
    HolderEvent,
    LeaseEvent,
    LeaseStatus,
    SliceEvent,
    SliceState,
    TransitionError,
    VolumeEvent,
    VolumeState,
    next_guest,
    next_holder,
    next_lease,
    next_slice,
    next_volume,
)

PAGE = Path(__file__).parents[3] / "docs" / "states.md"
NEXT: dict[str, Callable[..., enum.StrEnum]] = {
    "lease": next_lease,
    "holder": next_holder,
    "slice": next_slice,
    "guest": next_guest,
    "volume": next_volume,
}
every_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)


@every_machine
def test_every_state_answers_every_event_with_its_next_state_or_a_named_error(machine: StateTable) -> None:
    """No third way: an event the table does not know names subject, state and event."""
    known = {(state, event): then for state, event, then in machine.arrows}
    step = NEXT[machine.name]
    for state in machine.states:
        for event in machine.events:
            if (state, event) in known:
                assert step(state, event, "L-1") is known[state, event]
            else:
                with pytest.raises(TransitionError, match=rf"L-1 is {state}: {event} is not possible now"):
                    step(state, event, "L-1")


@every_machine
def test_every_state_is_reached_and_every_event_is_used(machine: StateTable) -> None:
    """Jeopardy is the one exception, and on purpose: the ledger never has it."""
    elsewhere = {LeaseStatus.JEOPARDY} if machine.name == "lease" else set()
    assert set(machine.states) - machine.reachable() == elsewhere
    assert {event for _, event, _ in machine.arrows} == set(machine.events)


@every_machine
def test_from_every_state_an_end_is_in_reach(machine: StateTable) -> None:
    """Nothing is lent, started or believed for ever."""
    goal = {LeaseStatus.ENDED, GuestState.GONE, SliceState.FREE, VolumeState.REMOVED}
    for state in machine.reachable():
        onward = StateTable(
            name="", states=machine.states, events=machine.events, start=state, arrows=machine.arrows
        ).reachable()
        assert onward & goal, state


def test_only_the_ends_are_last() -> None:
    assert [set(machine.last()) for machine in MACHINES] == [
        {LeaseStatus.ENDED},
        {LeaseStatus.ENDED},
        set(),
        {GuestState.GONE},
        {VolumeState.REMOVED},
    ]


def test_free_is_entered_by_verification_or_a_stated_word_only() -> None:
    """L4: no lapse of time, and no vanishing, makes a slice free."""
    into = {(state, event) for (state, event), then in SLICE_TABLE.items() if then is SliceState.FREE}
    assert into == {
        (SliceState.TEARDOWN, SliceEvent.VERIFIED),
        (SliceState.QUARANTINED, SliceEvent.CLEARED),
        (SliceState.DRAINING, SliceEvent.UNDRAIN),
    }


def test_nothing_leaves_a_lease_that_was_leased_but_through_teardown() -> None:
    assert {event for (state, event) in SLICE_TABLE if state is SliceState.LEASED} == {SliceEvent.TEARDOWN}


def test_what_is_kept_becomes_free_through_teardown_only() -> None:
    """V4: neither time nor a word frees a volume; its agent has looked that it is off the disk."""
    ways = {event: then for (state, event), then in SLICE_TABLE.items() if state is SliceState.RETAINED}
    assert ways == {
        SliceEvent.TAKE: SliceState.LEASED,
        SliceEvent.TEARDOWN: SliceState.TEARDOWN,
        SliceEvent.VANISH: SliceState.LOST,
    }
    gone = {state for (state, event), then in VOLUME_TABLE.items() if then is VolumeState.REMOVED}
    assert {state for state in gone if (state, VolumeEvent.TAKE) in VOLUME_TABLE} == {VolumeState.LIVE}


def test_what_is_being_removed_is_taken_by_nobody() -> None:
    assert not {event for (state, event) in VOLUME_TABLE if state is VolumeState.REMOVING} & {
        VolumeEvent.TAKE,
        VolumeEvent.MAKE,
        VolumeEvent.KEEP,
    }


def test_a_lease_that_held_something_ends_through_ending() -> None:
    into_ended = {state for (state, _), then in LEASE_TABLE.items() if then is LeaseStatus.ENDED}
    assert into_ended == {LeaseStatus.QUEUED, LeaseStatus.ENDING}


@pytest.mark.parametrize("state", [LeaseStatus.ENDING, LeaseStatus.ENDED])
def test_no_renewal_and_no_attach_in_the_end_states(state: LeaseStatus) -> None:
    """L8: no resurrection, on either side."""
    alive = {LeaseStatus.ACTIVE, LeaseStatus.NOTICED, LeaseStatus.JEOPARDY, LeaseStatus.GRANTED, LeaseStatus.QUEUED}
    assert not [event for (known, event), then in LEASE_TABLE.items() if known is state and then in alive]
    assert not [event for (known, event), then in HOLDER_TABLE.items() if known is state and then in alive]


def test_whatever_the_holder_sees_it_can_end() -> None:
    for state in LeaseStatus:
        if state is not LeaseStatus.ENDED:
            assert HOLDER_TABLE[state, HolderEvent.ENDED] is LeaseStatus.ENDED


def test_a_guest_can_be_ended_and_can_die_wherever_it_is() -> None:
    for state in set(GuestState) - {GuestState.ENDING, GuestState.GONE}:
        assert GUEST_TABLE[state, GuestEvent.END] is GuestState.ENDING
        assert GUEST_TABLE[state, GuestEvent.EXITED] is GuestState.GONE


def test_a_guest_that_is_ending_can_be_told_again_and_does_nothing_else() -> None:
    """It may live under several leases, and each may end; none of them brings it back."""
    ways = {event: then for (state, event), then in GUEST_TABLE.items() if state is GuestState.ENDING}
    assert ways == {GuestEvent.END: GuestState.ENDING, GuestEvent.EXITED: GuestState.GONE}


def test_a_park_and_a_resume_can_fail_without_losing_the_guest() -> None:
    """Each leads back to where the guest came from."""
    assert next_guest(GuestState.PARKING, GuestEvent.STAYED, "g1") is GuestState.RUNNING
    assert next_guest(GuestState.RESUMING, GuestEvent.PARKED, "g1") is GuestState.PARKED
    assert GUEST_TABLE[GuestState.PARKED, GuestEvent.RESUME] is GuestState.RESUMING


def test_the_coupling_says_something_for_every_event_of_a_lease() -> None:
    assert set(COUPLING) == set(LeaseEvent)


def test_the_coupling_fits_the_slice_of_a_lease_in_that_state() -> None:
    """Walk a lease along every arrow, its slice beside it: the coupled event is always one the slice knows.

    From the queue a lease has no slice (left-overs of an offer are in teardown already), so its end couples to none.
    """
    slice_of = {
        LeaseStatus.QUEUED: SliceState.FREE,
        LeaseStatus.GRANTED: SliceState.LEASED,
        LeaseStatus.ACTIVE: SliceState.LEASED,
        LeaseStatus.NOTICED: SliceState.LEASED,
        LeaseStatus.ENDING: SliceState.TEARDOWN,
    }
    for (state, event), then in LEASE_TABLE.items():
        coupled = COUPLING[event][0]
        if coupled is None or (state is LeaseStatus.QUEUED and event is LeaseEvent.END):
            continue
        expected = SliceState.TEARDOWN if then is LeaseStatus.QUEUED else slice_of[then]
        assert next_slice(slice_of[state], coupled, "gpu0") is expected


@every_machine
def test_the_drawing_has_every_arrow(machine: StateTable) -> None:
    text, picture = drawing.plain(machine), drawing.mermaid(machine)
    assert text.count("→") == len(machine.arrows)
    for state, event, then in machine.arrows:
        if state is not then:
            line = next(line for line in picture.splitlines() if line.startswith(f"    {state} --> {then}:"))
            assert event in line.partition(": ")[2].split(", ")


def test_every_member_says_what_it_means() -> None:
    for kinds in (LeaseStatus, LeaseEvent, HolderEvent, SliceState, SliceEvent, GuestState, GuestEvent):
        assert list(drawing.meanings(kinds.__name__)) == [member.value for member in kinds]


def test_the_page_shows_the_tables_as_they_are() -> None:
    """`python -m sublet.lease.drawing` mends it."""
    page = PAGE.read_text(encoding="utf-8")
    assert drawing.page_with_drawings(page) == page, "run: python -m sublet.lease.drawing"


def test_the_drawing_is_put_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    stale = tmp_path / "states.md"
    stale.write_text(page.replace("queued --> granted: grant", "queued --> active: magic"), encoding="utf-8")
    assert drawing.main([str(stale)]) == 0
    assert stale.read_text(encoding="utf-8") == page


@pytest.mark.parametrize("harm", ["<!-- drawn: slice -->", "<!-- end: slice -->"])
def test_a_page_without_a_marker_is_refused_by_name(harm: str) -> None:
    with pytest.raises(InvalidRequest, match="'slice'"):
        drawing.page_with_drawings(PAGE.read_text(encoding="utf-8").replace(harm, ""))
