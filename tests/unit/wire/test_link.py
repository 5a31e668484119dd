"""A link: greetings, calls, streams with credit, and what a peer may not do."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable

import pytest

from sublet.errors import CapacityExceeded, Disconnected, InvalidRequest, LeaseExpired, NotFound, SubletError
from sublet.wire.channels import CREDIT_MAX, WINDOW
from sublet.wire.frames import CONTROL_MAX, DATA_MAX, FrameKind, close_all, encode
from sublet.wire.link import CALLS_MAX, CHANNELS_MAX, DATA_OUT_MAX, LINK_OUT_MAX, Link
from sublet.wire.link_events import (
    Called,
    CallRefused,
    Closed,
    Credit,
    Data,
    Event,
    Opened,
    Over,
    PeerHello,
    Pong,
    Replied,
    Welcome,
)
from tests.left_open import nothing_left_open, same_file, some_fd
from tests.unit.wire.pair import Pair, greeted, how_it_ended
from tests.unit.wire.test_frames import mutated

# ---------------------------------------------------------------------------------------------------- the greeting


def test_who_connects_says_who_it_is_and_is_welcomed() -> None:
    pair = Pair(Link.connecting(b"token"), Link.accepting())
    pair.carry()
    assert pair.take_b() == [PeerHello(1, 1, b"token")]
    pair.b.welcome(b"hello")
    pair.carry()
    assert pair.take_a() == [Welcome(1, b"hello")]
    assert pair.a.version == pair.b.version == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [((1, 1), (1, 1), 1), ((1, 2), (1, 2), 2), ((1, 2), (2, 3), 2), ((2, 3), (1, 2), 2), ((1, 1), (1, 2), 1)],
)
def test_two_versions_next_to_each_other_agree_on_the_newest_both_speak(
    ours: tuple[int, int], theirs: tuple[int, int], agreed: int
) -> None:
    pair = Pair(Link.connecting(oldest=ours[0], newest=ours[1]), Link.accepting(oldest=theirs[0], newest=theirs[1]))
    call = pair.a.call(b"early")
    pair.carry()
    pair.b.welcome()
    pair.carry()
    assert pair.a.version == pair.b.version == agreed
    assert pair.take_b()[1:] == [Called(call, b"early", ())]
    pair.b.reply(call, b"yes")
    pair.carry()
    assert pair.take_a() == [Welcome(agreed, b""), Replied(call, b"yes", ())]


@pytest.mark.parametrize(("ours", "theirs"), [((1, 2), (3, 4)), ((3, 4), (1, 2))])
def test_versions_too_far_apart_are_told_so_on_both_sides(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    pair = Pair(Link.connecting(oldest=ours[0], newest=ours[1]), Link.accepting(oldest=theirs[0], newest=theirs[1]))
    pair.carry()
    here, there = how_it_ended(pair.take_a()), how_it_ended(pair.take_b())
    assert (here.by_peer, there.by_peer) == (True, False)
    assert "speaks the versions" in str(here.error)
    assert "Upgrade Sublet" in str(here.error)
    assert str(here.error) == str(there.error)


def test_a_welcome_to_a_version_never_offered_ends_it() -> None:
    link = Link.connecting()
    [over] = link.receive(encode(FrameKind.WELCOME, 0, b"\0\7", version=7))
    assert isinstance(over, Over)
    assert "chose version 7" in str(over.error)


def test_a_connection_changes_hands_between_hello_and_welcome() -> None:
    """Nothing comes after HELLO before WELCOME, so no byte is lost with the first reader."""
    client, door = Link.connecting(b"token"), Link.accepting()
    call = client.call(b"start")
    [(data, _)] = client.take_output()
    [hello] = door.receive(data)
    assert isinstance(hello, PeerHello)
    assert not client.has_output, "what is asked meanwhile waits here"
    pair = Pair(client, Link.adopted(hello))
    pair.b.welcome()
    pair.carry()
    assert pair.take_b() == [Called(call, b"start", ())]


def test_who_is_handed_a_connection_of_another_version_ends_it_with_words() -> None:
    link = Link.adopted(PeerHello(3, 4, b""))
    link.welcome()
    assert "speaks the versions 3 to 4" in str(how_it_ended(link.news()).error)
    [(data, _)] = link.take_output()
    assert data[1] == FrameKind.ERROR


def test_somebody_may_be_turned_away() -> None:
    pair = Pair(Link.connecting(), Link.accepting())
    pair.carry()
    pair.b.end(NotFound("there is no such lease"))
    pair.carry()
    over = how_it_ended(pair.take_a())
    assert isinstance(over.error, NotFound)
    assert over.by_peer
    assert over.error.message == "there is no such lease"


# --------------------------------------------------------------------------------------------------- calls, events


def test_calls_go_both_ways_and_answers_find_them_in_any_order() -> None:
    pair = greeted()
    first, second, other = pair.a.call(b"1"), pair.a.call(b"2"), pair.b.call(b"3")
    pair.carry()
    assert pair.take_b() == [Called(first, b"1", ()), Called(second, b"2", ())]
    assert pair.take_a() == [Called(other, b"3", ())]
    pair.b.reply(second, b"two")
    pair.b.refuse(first, LeaseExpired("the lease is over", do="Acquire another."))
    pair.a.reply(other, b"three")
    pair.carry()
    replied, refused = pair.take_a()
    assert replied == Replied(second, b"two", ())
    assert isinstance(refused, CallRefused)
    assert type(refused.error) is LeaseExpired
    assert (refused.call, refused.error.message, refused.error.do) == (first, "the lease is over", "Acquire another.")
    assert pair.take_b() == [Replied(other, b"three", ())]
    assert pair.a.is_idle
    assert pair.b.is_idle


def test_descriptors_travel_with_calls_replies_and_events() -> None:
    with nothing_left_open():
        pair = greeted()
        call = pair.a.call(b"take", (some_fd(),))
        pair.carry()
        [called] = pair.take_b()
        assert isinstance(called, Called)
        pair.b.reply(call, b"", called.fds)
        pair.b.event(b"", (some_fd(), some_fd()))
        pair.carry()
        replied, event = pair.take_a()
        assert isinstance(replied, Replied)
        assert isinstance(event, Event)
        assert same_file(replied.fds[0], called.fds[0])
        assert len(event.fds) == 2
        close_all((*replied.fds, *event.fds))


def test_an_answer_that_is_not_wanted_any_more_is_dropped_with_its_descriptors() -> None:
    with nothing_left_open():
        pair = greeted()
        call, refused = pair.a.call(b""), pair.a.call(b"")
        pair.a.abandon(call)
        pair.a.abandon(refused)
        pair.carry()
        pair.b.reply(call, b"late", (some_fd(),))
        pair.b.refuse(refused, NotFound("late"))
        pair.carry()
        assert pair.take_a() == []
        assert pair.a.over is None


def test_calls_beyond_the_limit_are_refused_here_and_end_it_there() -> None:
    pair = greeted()
    for _ in range(CALLS_MAX):
        pair.a.call(b"")
    with pytest.raises(CapacityExceeded, match="256 calls"):
        pair.a.call(b"")
    pair.carry()
    assert len(pair.take_b()) == CALLS_MAX
    [over] = pair.b.receive(encode(FrameKind.CALL, 9999))
    assert isinstance(over, Over)
    assert "more than 256 calls" in str(over.error)


def test_a_body_that_is_too_large_is_refused_and_the_call_can_still_be_answered() -> None:
    pair = greeted()
    with pytest.raises(InvalidRequest, match="over the limit"):
        pair.a.call(bytes(CONTROL_MAX + 1))
    call = pair.a.call(b"")
    pair.carry()
    with pytest.raises(InvalidRequest, match="over the limit"):
        pair.b.reply(call, bytes(CONTROL_MAX + 1))
    pair.b.refuse(call, InvalidRequest("too much"))
    pair.carry()
    assert isinstance(pair.take_a()[0], CallRefused)


def test_a_ping_is_answered_by_itself() -> None:
    pair = greeted()
    pair.b.ping(b"there?")
    pair.carry()
    assert pair.take_b() == [Pong(b"there?")]
    assert pair.take_a() == []


def test_numbers_come_round_and_pass_over_those_in_use() -> None:
    pair = greeted()
    waiting = pair.a.call(b"")
    pair.a._next_number = (1 << 32) - 3
    numbers = [pair.a.call(b"") for _ in range(3)]
    assert waiting == 1
    assert numbers == [(1 << 32) - 3, 3, 5]
    pair.carry()
    assert pair.b.over is None


# ---------------------------------------------------------------------------------------------------------- streams


def open_one(pair: Pair, *, grant: int = WINDOW, window: int = WINDOW) -> int:
    """A channel from ``a``, with credit both ways."""
    channel = pair.a.open_channel(b"stdout", window=window)
    pair.carry()
    assert pair.take_b()[0] == Opened(channel, b"stdout", ())
    pair.b.grant(channel, grant)
    pair.carry()
    assert pair.take_a() == [Credit(channel, grant)]
    return channel


def test_nothing_is_sent_before_it_is_granted() -> None:
    pair = greeted()
    channel = pair.a.open_channel(b"", window=10)
    assert pair.a.may_send(channel) == 0
    assert pair.a.send_data(channel, b"xyz") == 0
    pair.carry()
    assert pair.take_b() == [Opened(channel, b"", ()), Credit(channel, 10)]
    assert pair.b.send_data(channel, b"0123456789abc") == 10
    assert pair.b.may_send(channel) == 0
    pair.carry()
    assert pair.take_a() == [Data(channel, b"0123456789")]


def test_a_reader_that_does_not_consume_stops_the_sender_and_memory_is_bounded() -> None:
    pair = greeted()
    channel = open_one(pair)
    sent = 0
    while count := pair.a.send_data(channel, bytes(100_000)):
        sent += count
        pair.carry()
    assert sent == WINDOW
    assert pair.a.may_send(channel) == 0
    assert not pair.a.has_output
    for one in pair.take_b():
        assert isinstance(one, Data)
        pair.b.consumed(channel, one.cost)
    pair.carry()
    assert pair.a.may_send(channel) > WINDOW // 2


def test_a_peer_that_does_not_read_at_all_stops_the_sender_however_much_it_granted() -> None:
    pair = greeted()
    channel = open_one(pair, grant=CREDIT_MAX)
    while pair.a.send_data(channel, bytes(DATA_MAX)):
        pass
    assert pair.a.over is None, "streams alone never fill the queue"
    assert sum(len(data) for data, _ in pair.a.take_output()) <= DATA_OUT_MAX + 20 * DATA_MAX // 256


def test_large_pieces_are_cut_and_pieces_within_the_limit_stay_whole() -> None:
    pair = greeted()
    channel = open_one(pair)
    assert pair.a.send_data(channel, memoryview(bytes(DATA_MAX + 1))) == DATA_MAX + 1
    pair.carry()
    assert [len(one.data) for one in pair.take_b() if isinstance(one, Data)] == [DATA_MAX, 1]


def test_credit_given_back_in_steps_costs_few_frames() -> None:
    pair = greeted()
    channel = open_one(pair)
    for _ in range(1000):
        assert pair.a.send_data(channel, bytes(5000)) == 5000
        pair.carry()
        [one] = pair.take_b()
        assert isinstance(one, Data)
        pair.b.consumed(channel, one.cost)
        pair.carry()
    assert 5 <= len(pair.take_a()) <= 20


def test_each_direction_ends_by_itself() -> None:
    pair = greeted()
    channel = open_one(pair)
    pair.a.send_data(channel, b"last")
    pair.a.finish(channel)
    assert pair.a.send_data(channel, b"more") == 0
    pair.carry()
    assert pair.take_b() == [Data(channel, b"last"), Closed(channel, "", False)]
    pair.b.send_data(channel, b"answer")
    pair.b.finish(channel)
    pair.carry()
    assert pair.take_a() == [Data(channel, b"answer"), Closed(channel, "", False)]
    assert pair.a.is_idle
    assert pair.b.is_idle


def test_a_close_drops_what_is_under_way_and_says_why() -> None:
    pair = greeted()
    channel = open_one(pair)
    pair.a.send_data(channel, b"under way")
    pair.b.close(channel, "the guest is gone")
    pair.b.close(channel, "again")
    pair.carry()
    assert pair.take_a() == [Closed(channel, "the guest is gone", True)]
    assert pair.take_b() == []
    assert pair.a.is_idle
    assert pair.b.is_idle
    assert pair.a.send_data(channel, b"x") == 0
    pair.a.event(b"", channel=channel)
    assert not pair.a.has_output


@pytest.mark.parametrize("first", ["finish", "close"])
@pytest.mark.parametrize("second", ["finish", "close", "nothing"])
@pytest.mark.parametrize("theirs", ["finish", "close", "nothing"])
@pytest.mark.parametrize("also", ["grant", "event", "nothing"])
def test_closes_that_cross_each_other_are_no_mistake(first: str, second: str, theirs: str, also: str) -> None:
    def act(link: Link, how: str) -> None:
        match how:
            case "finish":
                link.finish(channel)
            case "close":
                link.close(channel, "enough")
            case "grant":
                link.grant(channel, 5)
            case "event":
                link.event(b"resize", channel=channel)
            case _:
                pass

    pair = greeted()
    channel = open_one(pair)
    pair.b.send_data(channel, b"crossing")
    act(pair.b, also)
    act(pair.b, theirs)
    act(pair.a, first)
    act(pair.a, also)
    act(pair.a, second)
    act(pair.b, also)
    pair.carry()
    act(pair.a, also)
    act(pair.b, "finish")
    act(pair.b, also)
    pair.carry()
    assert pair.a.over is None
    assert pair.b.over is None
    assert pair.a.is_idle
    assert pair.b.is_idle


def test_channels_beyond_the_limit_are_refused_here_and_end_it_there() -> None:
    pair = greeted()
    for _ in range(CHANNELS_MAX):
        pair.a.open_channel()
    with pytest.raises(CapacityExceeded, match="256 channels"):
        pair.a.open_channel()
    pair.carry()
    assert "more than 256 channels" in str(how_it_ended(pair.b.receive(encode(FrameKind.OPEN, 9999))).error)


def test_what_nobody_can_grant_is_the_programmers_error() -> None:
    pair = greeted()
    channel = open_one(pair)
    for amount in (0, -1, CREDIT_MAX):
        with pytest.raises(ValueError, match="cannot be granted"):
            pair.a.grant(channel, amount)


# ------------------------------------------------------------------------------------------- what a peer may not do


def credit(amount: int) -> bytes:
    return struct.pack("!I", amount)


RULES: tuple[tuple[bytes, str], ...] = (
    (encode(FrameKind.HELLO, 0, b"\0\1\0\1"), "a HELLO came that was not due"),
    (encode(FrameKind.WELCOME, 0, b"\0\1"), "a WELCOME came that was not due"),
    (encode(FrameKind.CALL, 0), "took the number 0"),
    (encode(FrameKind.CALL, 2), "took the number 2"),
    (encode(FrameKind.CALL, 1), "took the number 1"),
    (encode(FrameKind.OPEN, 1), "took the number 1"),
    (encode(FrameKind.CALL, 5) * 2, "took the number 5"),
    (encode(FrameKind.REPLY, 4), "to 4, which was not asked"),
    (encode(FrameKind.REPLY, 2) * 2, "to 2, which was not asked"),
    (encode(FrameKind.ERROR, 4, b'{"is":"Refusal","kind":"NotFound","message":"m"}'), "4, which was not asked"),
    (encode(FrameKind.ERROR, 2, b"nonsense"), "not readable"),
    (encode(FrameKind.EVENT, 9), "never was a channel"),
    (encode(FrameKind.DATA, 9, b"x"), "9, which is not an open channel"),
    (encode(FrameKind.DATA, 0, b"x"), "0, which is not an open channel"),
    (encode(FrameKind.DATA, 1, b""), "empty DATA"),
    (encode(FrameKind.DATA, 1, bytes(101)), "101 bytes came on channel 1, where 100 were granted"),
    (encode(FrameKind.DATA, 1, bytes(60)) * 2, "60 bytes came on channel 1, where 40 were granted"),
    (encode(FrameKind.CLOSE, 1, b"\0") + encode(FrameKind.DATA, 1, b"x"), "channel 1 after its end"),
    (encode(FrameKind.CLOSE, 1, b"\0") * 2, "closed twice"),
    (encode(FrameKind.CLOSE, 1, b"\1") + encode(FrameKind.DATA, 1, b"x"), "not an open channel"),
    (encode(FrameKind.CLOSE, 1, b""), "does not say what it closes"),
    (encode(FrameKind.CLOSE, 1, b"\2"), "does not say what it closes"),
    (encode(FrameKind.CLOSE, 9, b"\0"), "never was a channel"),
    (encode(FrameKind.CREDIT, 9, credit(1)), "never was a channel"),
    (encode(FrameKind.CREDIT, 1, credit(0)), "is nothing, or over"),
    (encode(FrameKind.CREDIT, 1, credit(CREDIT_MAX + 1)), "over the limit"),
    (encode(FrameKind.CREDIT, 1, credit(CREDIT_MAX)) + encode(FrameKind.CREDIT, 1, credit(1)), "over the limit"),
    (encode(FrameKind.CREDIT, 1, b"\0"), "without an amount"),
    (encode(FrameKind.CALL, 7, version=2), "version 2 came where 1"),
    (encode(FrameKind.CALL, 7, fds=(0,)), "announced 1 descriptors and 0 came"),
    (b"\xff" * 12, "no frame of kind 255"),
)


@pytest.mark.parametrize(("data", "words"), RULES, ids=[words for _, words in RULES])
def test_a_peer_that_breaks_a_rule_is_told_which_one_and_it_is_over(data: bytes, words: str) -> None:
    pair = greeted()
    channel = pair.a.open_channel()
    pair.b.call(b"")
    pair.carry()
    pair.b.grant(channel, 100)
    pair.b.event(b"never arrives")
    pair.take_a(), pair.take_b()
    over = how_it_ended(pair.b.receive(data))
    assert words in str(over.error)
    assert not over.by_peer
    assert pair.b.over == over
    pair.carry()
    told = how_it_ended(pair.take_a())
    assert told.by_peer
    assert str(told.error) == str(over.error)
    assert pair.b.receive(encode(FrameKind.PING, 0)) == []
    assert not pair.b.wants_input


FIRST: tuple[tuple[bytes, str], ...] = (
    (encode(FrameKind.CALL, 1), "before version and name were agreed"),
    (encode(FrameKind.DATA, 1, bytes(1000)), "before version and name were agreed"),
    (encode(FrameKind.WELCOME, 0, b"\0\1"), "not due"),
    (encode(FrameKind.HELLO, 0, b""), "without versions"),
    (encode(FrameKind.HELLO, 0, b"\0\0\0\1"), "named the versions 0 to 1"),
    (encode(FrameKind.HELLO, 0, b"\0\2\0\1"), "named the versions 2 to 1"),
    (encode(FrameKind.HELLO, 0, b"\0\1\0\1") * 2, "not due"),
    (encode(FrameKind.HELLO, 0, b"\0\1\0\1") + encode(FrameKind.CALL, 1), "before version and name were agreed"),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "no frame of kind 69"),
)


@pytest.mark.parametrize(("data", "words"), FIRST, ids=[words for _, words in FIRST])
def test_a_stranger_gets_nothing_before_the_greeting(data: bytes, words: str) -> None:
    link = Link.accepting()
    assert words in str(how_it_ended(link.receive(data)).error)


@pytest.mark.parametrize("kind", list(FrameKind))
def test_descriptors_where_none_belong_are_closed(kind: FrameKind) -> None:
    with nothing_left_open():
        pair = greeted()
        channel = pair.a.open_channel()
        pair.carry()
        pair.b.grant(channel, 1000)
        bodies = {FrameKind.DATA: b"x", FrameKind.CREDIT: credit(1), FrameKind.CLOSE: b"\0"}
        number = {FrameKind.CALL: 3, FrameKind.OPEN: 3, FrameKind.EVENT: 0}.get(kind, channel)
        fd = some_fd()
        told = pair.b.receive(encode(kind, number, bodies.get(kind, b""), fds=(fd,)), [fd])
        for one in told:
            if isinstance(one, Called | Opened | Event):
                close_all(one.fds)
        if kind in (FrameKind.CALL, FrameKind.OPEN, FrameKind.EVENT):
            assert pair.b.over is None
        else:
            assert pair.b.over is not None


def test_a_peer_that_asks_and_does_not_read_is_cut_off() -> None:
    pair = greeted()
    for _ in range(5):
        pair.a.call(b"")
    pair.carry()
    for one in pair.take_b():
        assert isinstance(one, Called)
        assert pair.b.wants_input == (one.call <= 1 + 2 * 2)
        pair.b.reply(one.call, bytes(CONTROL_MAX - 20))
    [over] = pair.b.news()
    assert isinstance(over, Over)
    assert isinstance(over.error, Disconnected)
    assert "unread" in str(over.error)
    assert sum(len(data) for data, _ in pair.b.take_output()) < 1000, "what it did not read is not kept"
    pair.b.reply(1, b"")
    pair.b.event(b"")
    assert not pair.b.has_output


def test_only_who_accepted_stops_reading_so_two_full_queues_do_not_wait_for_each_other() -> None:
    pair = greeted()
    for link in (pair.a, pair.b):
        for _ in range(3):
            link.event(bytes(CONTROL_MAX))
    assert pair.a.wants_input
    assert not pair.b.wants_input
    assert sum(len(data) for data, _ in pair.b.take_output()) < LINK_OUT_MAX
    assert pair.b.wants_input


def test_a_frame_begun_is_finished_before_the_last_word() -> None:
    """Else the peer would read the error as the rest of a body."""
    pair = greeted()
    pair.b.event(b"a long event")
    pair.b.event(b"dropped")
    [first, _], _ = pair.b.next_output()
    begun = bytes(first[:5])
    pair.b.sent(5)
    pair.b.receive(b"\xff" * 12)
    rest = b"".join(data for data, _ in pair.b.take_output())
    told = pair.a.receive(begun + rest)
    assert told[0] == Event(0, b"a long event", ())
    assert how_it_ended(told).by_peer
    assert len(told) == 2


# -------------------------------------------------------------------------------------------------------- the end


def test_hanging_up_between_frames_is_no_error_and_within_one_it_is() -> None:
    pair = greeted()
    assert pair.a.receive_end() == [Over(None, by_peer=True)]
    pair.b.receive(b"\1")
    [over] = pair.b.receive_end()
    assert isinstance(over, Over)
    assert isinstance(over.error, Disconnected)
    assert pair.b.receive_end() == []


def test_a_call_without_answer_makes_hanging_up_an_error() -> None:
    pair = greeted()
    pair.a.call(b"")
    assert isinstance(how_it_ended(pair.a.receive_end()).error, Disconnected)


def test_what_was_said_before_the_end_is_still_sent() -> None:
    pair = greeted()
    call = pair.a.call(b"")
    pair.carry()
    pair.b.reply(call, b"done")
    pair.b.end()
    assert pair.b.has_output
    pair.carry()
    assert pair.take_a() == [Replied(call, b"done", ())]


@pytest.mark.parametrize(
    "use",
    [
        lambda link, fd: link.call(b"", (fd,)),
        lambda link, fd: link.event(b"", (fd,)),
        lambda link, fd: link.reply(1, b"", (fd,)),
        lambda link, fd: link.open_channel(b"", (fd,)),
        lambda link, fd: link.receive(encode(FrameKind.EVENT, 0, fds=(fd,)), [fd]),
    ],
)
def test_after_the_end_nothing_has_an_effect_and_nothing_leaks(use: Callable[[Link, int], object]) -> None:
    with nothing_left_open():
        pair = greeted()
        pair.a.call(b"under way", (some_fd(),))
        pair.a.end()
        pair.a.drop_output()
        use(pair.a, some_fd())
        assert not pair.a.has_output
        early = Link.connecting()
        early.call(b"", (some_fd(),))
        early.receive_end()


@pytest.mark.parametrize(
    "error", [SubletError("a"), NotFound("b", do="c"), CapacityExceeded("d"), LeaseExpired("é" * 10_000)]
)
def test_an_error_crosses_with_its_class_and_words(error: SubletError) -> None:
    pair = greeted()
    call = pair.a.call(b"")
    pair.carry()
    pair.b.refuse(call, error)
    pair.carry()
    [refused] = pair.take_a()
    assert isinstance(refused, CallRefused)
    assert type(refused.error) is type(error)
    assert refused.error.message == error.message[:4096]
    assert refused.error.do == error.do


@pytest.mark.parametrize("kind", ["LeaseInterrupt", "SystemExit", "annotations", "", "é" * 100])
def test_a_peer_names_no_class_but_ours(kind: str) -> None:
    pair = greeted()
    call = pair.a.call(b"")
    body = b'{"is":"Refusal","kind":"%s","message":"m","do":"d"}' % kind.encode()
    [refused] = pair.a.receive(encode(FrameKind.ERROR, call, body))
    assert isinstance(refused, CallRefused)
    assert type(refused.error) is SubletError


# -------------------------------------------------------------------------------------------------------- by chance


def transcript() -> bytes:
    """What ``a`` sends in a conversation that uses every kind."""
    pair = greeted()
    sent = bytearray()

    def carry() -> None:
        for data, _ in pair.a.take_output():
            sent.extend(data)
            pair.b.receive(data)
        for data, _ in pair.b.take_output():
            pair.a.receive(data)

    channel = pair.a.open_channel(b"stdin")
    carry()
    pair.b.grant(channel, 200)
    call = pair.b.call(b"who are you?")
    carry()
    pair.a.reply(call, b"me")
    pair.a.send_data(channel, b"some input")
    pair.a.call(b"list")
    pair.a.event(b"resized", channel=channel)
    pair.a.ping(b"1")
    refused = pair.b.call(b"no?")
    carry()
    pair.a.refuse(refused, NotFound("nothing here"))
    pair.a.consumed(channel, WINDOW)
    pair.a.send_data(channel, b"more input")
    pair.a.finish(channel)
    carry()
    assert pair.b.over is None
    return bytes(sent)


def test_whatever_comes_a_link_answers_in_order_or_ends_and_never_breaks() -> None:
    """20,000 conversations with mistakes in them: no exception, no leak, nothing after the end, bounded output."""
    said = transcript()
    chance = random.Random(7)
    ended = 0
    null = some_fd()
    with nothing_left_open():
        for turn in range(20_000):
            link = Link.adopted(PeerHello(1, 1, b""))
            link.welcome()
            link.take_output()
            link.call(b"who are you?")
            link.call(b"no?")
            data = mutated(chance, said) if turn % 8 else chance.randbytes(chance.randrange(80))
            fds = [os.dup(null)] if turn % 20 == 0 else []
            cut = chance.randrange(len(data) + 1)
            told = link.receive(data[:cut], fds) + link.receive(data[cut:])
            for one in told:
                if isinstance(one, Opened):
                    link.grant(one.channel, 200)
                elif isinstance(one, Called):
                    link.reply(one.call)
                if isinstance(one, Called | Replied | Event | Opened):
                    close_all(one.fds)
            assert all(not isinstance(one, Over) for one in told[:-1])
            assert (link.over is not None) == (bool(told) and told[-1] == link.over)
            ended += link.over is not None
            link.end()
            link.drop_output()
    os.close(null)
    assert 5_000 < ended < 20_000, ended


@pytest.mark.parametrize("seed", range(40))
def test_two_links_that_keep_the_rules_never_end_each_other(seed: int) -> None:
    """Chance decides who does what; every byte arrives once and in order, every call is answered once."""
    chance = random.Random(seed)
    pair = greeted()
    pair.chance = chance
    sent: dict[tuple[bool, int], bytearray] = {}
    got: dict[tuple[bool, int], bytearray] = {}
    channels: list[int] = []
    asked = answered = 0
    for _ in range(300):
        ours = chance.random() < 0.5
        link = pair.a if ours else pair.b
        match chance.randrange(8):
            case 0 if len(channels) < 20:
                channels.append(link.open_channel(window=chance.choice((1, 1000, WINDOW))))
            case 1:
                link.call(b"ask")
                asked += 1
            case 2 if channels and chance.random() < 0.2:
                link.finish(chance.choice(channels))
            case 3:
                link.ping()
            case _ if channels:
                channel = chance.choice(channels)
                data = chance.randbytes(chance.choice((1, 10, 5000)))
                count = link.send_data(channel, data)
                sent.setdefault((ours, channel), bytearray()).extend(data[:count])
            case _:
                pass
        if chance.random() < 0.3:
            pair.carry()
            for here, peer, told in ((pair.a, False, pair.take_a()), (pair.b, True, pair.take_b())):
                for one in told:
                    match one:
                        case Opened():
                            here.grant(one.channel, chance.choice((1, 500, 100_000)))
                        case Data():
                            got.setdefault((peer, one.channel), bytearray()).extend(one.data)
                            here.consumed(one.channel, one.cost)
                        case Called():
                            here.reply(one.call)
                        case Replied():
                            answered += 1
                        case _:
                            pass
    for _ in range(3):
        pair.carry()
        for here, peer, told in ((pair.a, False, pair.take_a()), (pair.b, True, pair.take_b())):
            for one in told:
                if isinstance(one, Data):
                    got.setdefault((peer, one.channel), bytearray()).extend(one.data)
                elif isinstance(one, Called):
                    here.reply(one.call)
                elif isinstance(one, Replied):
                    answered += 1
    assert pair.a.over is None
    assert pair.b.over is None
    assert {key: data for key, data in sent.items() if data} == got
    assert asked == answered
