"""Commands under a lease, started and held by a program."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.client.guests import open_streams
from tests.traces import until

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def fabric(one_device: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=one_device) as made:
        yield made


@pytest.fixture
def lease(fabric: sublet.Fabric) -> Iterator[sublet.Lease]:
    with fabric.cpu(1, ttl="5m") as lease:
        yield lease


def test_a_command_runs_and_says_what_it_says(lease: sublet.Lease, tmp_path: Path) -> None:
    guest = lease.start(["sh", "-c", "pwd; echo $MINE >&2; exit 3"], cwd=tmp_path, env={"MINE": "x", **os.environ})
    assert guest.wait(PATIENCE_S) == 3
    assert (guest.exit_code, guest.reason) == (3, None)
    said = list(guest.output())
    assert b"".join(piece.data for piece in said if piece.stream == "stdout") == f"{tmp_path.resolve()}\n".encode()
    assert b"".join(piece.data for piece in said if piece.stream == "stderr") == b"x\n"
    view = guest.view()
    assert (view.id, view.lease, view.exit_code, view.pid) == (guest.id, lease.id, 3, guest.pid)
    guest.close()


def test_it_reads_what_it_is_given(lease: sublet.Lease) -> None:
    blob = os.urandom(1 << 20) * 3
    with lease.start(["cat"]) as guest:

        def give() -> None:
            guest.write(blob)
            guest.close_stdin()

        giving = threading.Thread(target=give)
        giving.start()
        assert b"".join(piece.data for piece in guest.output() if piece.stream == "stdout") == blob
        giving.join()
        assert guest.wait(PATIENCE_S) == 0
        with pytest.raises(BrokenPipeError):
            guest.write(b"more")


def test_a_program_with_a_loop_of_its_own_reads_and_writes_without_waiting(lease: sublet.Lease) -> None:
    """More both ways than any buffer has room for, before anything is read; and the end is told."""
    blob = os.urandom(1 << 20) * 5
    with lease.start(["cat"]) as guest:
        streams = open_streams(guest)
        with contextlib.closing(streams):
            for at in range(0, len(blob), 700_000):
                streams.send(blob[at : at + 700_000])
            came, room, is_told = bytearray(), select.poll(), False
            while not streams.is_over:
                room.register(streams.fileno(), select.POLLIN | (select.POLLOUT if streams.wants_write else 0))
                assert room.poll(PATIENCE_S * 1000), f"after {len(came)} bytes nothing comes"
                for piece in streams.pump():
                    assert piece.stream == "stdout"
                    came += piece.data
                if len(came) == len(blob) and not is_told:
                    guest.close_stdin()
                    is_told = True
            assert came == blob
            assert streams.lost is None
            streams.send(b"more")
            assert streams.pump() == []
        assert guest.wait(PATIENCE_S) == 0


def test_its_input_goes_on_after_a_close(lease: sublet.Lease) -> None:
    with lease.start(["cat"]) as guest:
        guest.write(b"before, ")
        guest.close()
        guest.write(b"after")
        guest.close_stdin()
        assert b"".join(piece.data for piece in guest.output() if piece.stream == "stdout") == b"before, after"
        assert guest.wait(PATIENCE_S) == 0


def test_the_lease_is_in_use_while_it_runs(fabric: sublet.Fabric) -> None:
    """So it is renewed, for as long as the command runs and no longer."""
    with fabric.cpu(1, ttl="5m", renew_every="300ms") as lease:
        guest = lease.start(["cat"])
        assert lease.busy
        until("a renewal", lambda: fabric.lease(lease.id).renewals > 0, PATIENCE_S)
        guest.close_stdin()
        assert guest.wait(PATIENCE_S) == 0
        until("an idle lease", lambda: not lease.busy, PATIENCE_S)
        guest.close()


def test_signals_and_the_end_of_a_block(lease: sublet.Lease) -> None:
    script = "trap 'echo caught' USR1; trap '' TERM; echo ready; while :; do sleep 0.05; done"
    with lease.start(["sh", "-c", script], grace="200ms") as guest:
        output = guest.output()
        assert next(output).data == b"ready\n"
        guest.send_signal(signal.SIGUSR1)
        assert next(output).data == b"caught\n"
        with pytest.raises(TimeoutError):
            guest.wait(0.05)
    assert guest.exit_code == 137
    assert guest.reason is sublet.EndReason.OPERATOR
    assert not lease.busy


def test_who_stopped_a_guest_need_not_wait_for_the_news_of_its_end(
    lease: sublet.Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that hears of ends gets no processor meanwhile, as on a busy machine."""
    monkeypatch.setattr(lease._fabric._watch, "add", lambda conversation, hear: conversation.close())
    with lease.start(["sleep", "300"], stdio="null") as guest:
        in_use = [lease.busy]
        assert guest.stop() == 143
        in_use.append(lease.busy)
        assert guest.wait(0) == 143
    assert [*in_use, lease.busy] == [True, False, False], "it was stopped twice, and was in use once"


def test_a_terminal_of_its_own(lease: sublet.Lease) -> None:
    with lease.start(["sh", "-c", "test -t 0 && stty size"], stdio="pty", rows=11, cols=77) as guest:
        assert guest.wait(PATIENCE_S) == 0
        assert b"".join(piece.data for piece in guest.output()) == b"11 77\r\n"


def test_the_end_of_the_lease_is_its_end(fabric: sublet.Fabric) -> None:
    with fabric.cpu(1, ttl="5m") as lease:  # so its guests have five seconds to leave
        guest = lease.start(["sleep", "300"], stdio="null")
        assert [view.id for view in fabric.guests(lease)] == [guest.id]
    assert guest.wait(PATIENCE_S) == 143
    assert guest.reason is sublet.EndReason.RELEASED
    assert fabric.guests(lease) == []
    assert [view.id for view in fabric.guests(lease.id, ended=True)] == [guest.id]
    with pytest.raises(sublet.LeaseEnded):
        lease.start(["true"])


@pytest.mark.parametrize(
    "argv", [[], "true", ["no-such-command-anywhere"], ["/etc/passwd"], ["echo", "a\0b"], ["echo", "x" * (2 << 20)]]
)
def test_what_cannot_be_run_is_refused_in_words(lease: sublet.Lease, argv: list[str]) -> None:
    with pytest.raises(sublet.InvalidRequest) as refused:
        lease.start(argv)
    assert refused.value.do
    until("an idle lease", lambda: not lease.busy, PATIENCE_S)


def test_closing_the_fabric_wakes_who_waits(fabric: sublet.Fabric) -> None:
    other = sublet.connect(home=fabric.address.home)
    lease = other.cpu(1)
    guest = lease.start(["sleep", "300"], stdio="null")
    other.close()
    with contextlib.suppress(sublet.SubletError):  # unless its end, with that of the lease, was heard of before
        assert guest.wait(PATIENCE_S) == 128 + signal.SIGTERM
    until("no guest", lambda: fabric.guests(lease.id) == [], PATIENCE_S)
