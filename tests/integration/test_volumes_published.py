"""Checkpoints in volumes: written by guests and holders, published by the supervisor, and by nobody else."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.errors import LeaseExpired, SubletError, Unauthorized
from sublet.lease_end import EndReason
from sublet.node.storage.stores_work import why_no_image
from sublet.state.checkpoints.durable import Durable
from sublet.state.checkpoints.store import FolderStore, copy_checkpoint, verify
from sublet.state.checkpoints.writer import Author, Capture, Saver, Staged
from sublet.values import MIB, Epoch, Kind, LeaseId, TenantId
from sublet.wire.codec import dumps, loads
from sublet.wire.guests import Admit, Front, Profile
from sublet.wire.orders import Extend, Grant, Notify, Part, RemoveVolume, TornDown, VolumeRef, VolumeRemoved, Volumes
from sublet.wire.refusals import Refusal
from sublet.wire.version import WIRE_OLDEST, WIRE_VERSION
from sublet.wire.volumes import LendVolume, OpenVolume, VolumeLent, VolumeReply
from tests.integration.supervisor_stage import TENANT, HolderLine, SupervisorStage
from tests.integration.test_blocks import E5, E6, E7, A, B, S, end, grant, held, log_of, part, stage_at, torn_down, view
from tests.integration.volume_stage import StageLine, program, store_at
from tests.traces import PATIENCE_S, now_ns, until

C = LeaseId("lease-c")
SMALL = part(Kind.BLOCK, 8 * MIB)
CORE = part(Kind.CPU, 1)
REF = VolumeRef(tenant=TENANT, name="ckpt")
needs_images = pytest.mark.skipif(bool(why_no_image()), reason=f"needs images: {why_no_image()}")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SupervisorStage]:
    with stage_at(tmp_path) as found:
        yield found


def lent(stage: SupervisorStage, lease: LeaseId, epoch: Epoch) -> str:
    answer = stage.holder(lease, epoch).ask(LendVolume())
    assert isinstance(answer, VolumeLent)
    return answer.ticket


def last_torn(stage: SupervisorStage) -> TornDown:
    return [one for one in stage.office_line.reports if isinstance(one, TornDown)][-1]


# ------------------------------------------------------------------------------------------------------ the plain path

SAVES = """
state = Durable({"step": 1}, current().volume)
state.checkpoint()
state.mutate(lambda it: it.update(step=2))
state.checkpoint()
say([current().volume.name, state.last.number, Durable.restore(current().volume).value])
"""


def test_a_guest_saves_and_the_next_lease_of_the_name_finds_it(stage: SupervisorStage) -> None:
    grant(stage, A, E5, SMALL, name="ckpt")
    assert program(stage.holder(A, E5), stage, SAVES).hear() == ["ckpt", 2, {"step": 2}]
    end(stage, A, E5, SMALL)
    torn_down(stage, 1)
    saved = last_torn(stage).saved
    assert saved is not None
    assert (saved.version, saved.count, saved.volume) == (2, 2, "ckpt")
    grant(stage, B, E6, SMALL, name="ckpt")
    state = Durable.restore(store_at(stage, B, E6))
    assert state.value == {"step": 2}
    state.mutate(lambda it: it.update(step=3))
    state.close()
    assert state.last is not None
    assert state.last.number == 3
    verdict = verify(stage.state / "blocks" / "named" / "local" / "ckpt" / "0")
    assert verdict.ok
    assert verdict.checkpoints == [1, 2, 3]


LENDS = """
volume = current().volume
say([volume.lease, str(volume.epoch), os.environ["SUBLET_VOLUME"] == volume.folder, current().lease])
state = Durable(1, volume)
say(attempt(lambda: state.checkpoint().number))
for name in ("stale", "over"):
    wait_for(name)
    state = None
    try:
        store = VolumeStore(volume.volume_line())
        say("it opened")
    except SubletError as error:
        say(type(error).__name__)
say(current().remaining > 0)
time.sleep(1000)
"""


def test_a_volume_is_lent_to_a_guest_of_another_lease_for_as_long_as_its_own_lives(stage: SupervisorStage) -> None:
    """What ends is the right to save, and not the guest, whose own lease decides about it."""
    grant(stage, A, E5, SMALL, name="ckpt")
    grant(stage, C, E6, CORE)
    guest = program(stage.holder(C, E6), stage, LENDS, volume=lent(stage, A, E5))
    assert guest.hear() == [A, "1.5", True, C]
    assert guest.hear() == 1
    grant(stage, A, E7, SMALL, name="ckpt")
    guest.go("stale")
    assert guest.hear() == "StaleEpoch"
    assert store_at(stage, A, E7).newest() == 1
    end(stage, A, E7, SMALL)
    torn_down(stage, 1)
    guest.go("over")
    assert guest.hear() == "LeaseNotActive"
    assert guest.hear() is True
    assert view(stage, C).state == "running"
    end(stage, C, E6, CORE)
    torn_down(stage, 2)
    saved = last_torn(stage).saved
    assert saved is not None, "the end of the guest's own lease says what it saved"
    assert (saved.version, saved.volume) == (1, "ckpt")


HOLDS = """
held = open(os.environ["SUBLET_VOLUME"] + "/mine", "w")
say(1)
time.sleep(1000)
"""


@needs_images
def test_who_still_uses_a_volume_that_is_to_be_put_away_is_ended(stage: SupervisorStage) -> None:
    grant(stage, A, E5, SMALL, name="ckpt")
    grant(stage, C, E6, CORE)
    guest = program(stage.holder(C, E6), stage, HOLDS, volume=lent(stage, A, E5))
    assert guest.hear() == 1
    end(stage, A, E5, SMALL)
    torn_down(stage, 1)
    until("the end of who was in the way", lambda: view(stage, C).state == "gone")
    assert "the volume that this command uses is over" in log_of(stage, C)


# ---------------------------------------------------------------------------------------------------------- who may not


def ask_at(path: Path, *calls: Any) -> list[Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(path))
        answers = []
        for call in calls:
            sock.send(call if isinstance(call, bytes) else dumps(call))
            answers.append(loads(VolumeReply, sock.recv(65536)))
        return answers


STRANGE = """
from sublet.guest.checkpoints import GuestLine
from sublet.wire.volumes import *
from sublet.values import Epoch, LeaseId
import socket
line = GuestLine(where, lambda: None)
say([line.ask(OpenVolume()).kind, line.ask(OpenVolume(lease="lease-a", epoch=Epoch(1, 5))).kind,
     line.ask(Publish(lease=LeaseId("lease-a"), epoch=Epoch(1, 5), staging="s", manifest="m")).kind,
     line.ask(Collect(lease=LeaseId("lease-a"), epoch=Epoch(1, 5), keep=1)).kind])
raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
raw.connect(where)
found = []
for odd in (b"nothing that is read", b'{"is": "Grant"}', b"x" * 70000):
    raw.send(odd)
    found.append(json.loads(raw.recv(65536))["kind"])
raw.close()
many = []
for n in range(20):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.connect(where)
    many.append(one)
many[-1].settimeout(30)
say([found, json.loads(many[-1].recv(65536))["kind"]])
time.sleep(1000)
"""


def test_nobody_saves_where_he_may_not(stage: SupervisorStage) -> None:
    """Guests of other leases and tenants, processes that are no guests, holders of other leases and of tokens that do
    not say so, tickets of others and of nobody."""
    anna = TenantId("anna")
    grant(stage, A, E5, SMALL, name="ckpt")
    first = program(stage.holder(A, E5), stage, SAVES)
    assert first.hear()[1] == 2
    door = stage.runtime / "publish.sock"
    (answer,) = ask_at(door, OpenVolume())
    assert isinstance(answer, Refusal)
    assert answer.kind == "Unauthorized"
    order = Grant(
        lease=C, epoch=E6, number=1, tenant=anna, parts=(CORE,), deadline_ns=now_ns() + 300 * S, ttl_ns=300 * S
    )
    stage.office_line.order(order)
    line = stage.office_line.admit(C, E6, tenant=anna)
    guest = program(line, stage, f"where = {str(door)!r}\n" + STRANGE)
    assert guest.hear() == ["NotFound", "Unauthorized", "Unauthorized", "Unauthorized"]
    assert guest.hear() == [["InvalidRequest"] * 3, "CapacityExceeded"]
    with pytest.raises(Unauthorized, match="was not lent"):
        program(line, stage, "", volume=lent(stage, A, E5))
    with pytest.raises(Unauthorized, match="was not lent"):
        program(line, stage, "", volume="0" * 32)
    with pytest.raises(SubletError):
        StageLine(line, A, E5).ask(OpenVolume(lease=A, epoch=E5))
    reads = stage.office_line.admit(A, E5, operations=("logs", "run", "read"))
    with pytest.raises(Unauthorized, match="may not write"):
        StageLine(reads, A, E5).ask(OpenVolume(lease=A, epoch=E5))
    line.close()
    reads.close()


# ------------------------------------------------------------------------------------------------------------- zombies

ZOMBIE = """
from sublet.state.checkpoints.writer import Saver
volume = current().volume
store = VolumeStore(volume.volume_line())
folder = store.stage()
staged = Saver().save({"value": "late"}, staging=folder, base=store.base(), author=store.author, wall_ns=0)
say("staged")
wait_for("thaw")
def kind(act):
    try:
        return act()
    except SubletError as error:
        return type(error).__name__
say([kind(lambda: store.publish(staged)), kind(store.stage), kind(lambda: Durable(1, store).checkpoint()),
     kind(lambda: VolumeStore(volume.volume_line())), kind(lambda: store.collect(0))])
"""


def test_who_was_stopped_past_the_end_of_its_lease_saves_nothing(stage: SupervisorStage) -> None:
    """It has everything staged, stands still while the lease of the volume goes to another epoch, and goes on."""
    grant(stage, A, E5, SMALL, name="ckpt")
    grant(stage, C, E6, CORE)
    guest = program(stage.holder(C, E6), stage, ZOMBIE, volume=lent(stage, A, E5))
    assert guest.hear() == "staged"
    os.kill(guest.pid, signal.SIGSTOP)
    grant(stage, A, E7, SMALL, name="ckpt")
    state = Durable("newer", store_at(stage, A, E7))
    state.checkpoint()
    guest.go("thaw")
    os.kill(guest.pid, signal.SIGCONT)
    assert guest.hear() == ["StaleEpoch"] * 5
    assert Durable.restore(store_at(stage, A, E7)).value == "newer"
    assert store_at(stage, A, E7).newest() == 1


def runs_out(stage: SupervisorStage, in_ns: int, ttl_ns: int) -> int:
    """The deadline of lease A is moved up; when it will be."""
    deadline_ns = now_ns() + in_ns
    stage.office_line.order(Extend(lease=A, epoch=E5, number=2, deadline_ns=deadline_ns, ttl_ns=ttl_ns))
    return deadline_ns


def test_a_holder_whose_lease_ran_out_saves_nothing(stage: SupervisorStage) -> None:
    grant(stage, A, E5, SMALL, name="ckpt")
    state = Durable("in time", store_at(stage, A, E5))
    state.checkpoint()
    deadline_ns = runs_out(stage, S // 5, S)
    until("the deadline", lambda: now_ns() > deadline_ns)
    state.value = "too late"
    with pytest.raises(LeaseExpired):
        state.checkpoint()
    folder = stage.state / "blocks" / "named" / "local" / "ckpt"
    until("the volume to be kept", (folder / "kept").exists)
    grant(stage, B, E6, SMALL, name="ckpt")
    held(stage, B)
    assert Durable.restore(store_at(stage, B, E6)).value == "in time"


def test_a_holder_whose_lease_runs_out_while_it_writes_is_told_that(
    stage: SupervisorStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder goes from under it, and that something was not found there would be no help."""
    grant(stage, A, E5, SMALL, name="ckpt")
    state = Durable("in time", store_at(stage, A, E5))
    state.checkpoint()
    state.value = "too late"
    write = Saver.write

    def slowly(self: Saver, capture: Capture, *, staging: Path, **named: Any) -> Staged:
        runs_out(stage, S // 5, S)
        until("the volume to be put away", lambda: not staging.is_dir())
        return write(self, capture, staging=staging, **named)

    monkeypatch.setattr(Saver, "write", slowly)
    with pytest.raises(LeaseExpired):
        state.checkpoint()


# -------------------------------------------------------------------------------------------------------------- crashes

KILLED = """
import threading
state = Durable({"n": 0, "much": os.urandom(2 << 20)}, current().volume, keep=2)
def save():
    while True:
        state.value["n"] += 1
        state.value["much"] = os.urandom(2 << 20)
        state.checkpoint()
        say(state.last.number)
save()
"""


def test_a_guest_that_is_killed_while_it_saves_leaves_whole_checkpoints(stage: SupervisorStage) -> None:
    size = part(Kind.BLOCK, 32 * MIB)
    grant(stage, A, E5, size, name="ckpt")
    for n in range(2):
        guest = program(stage.holder(A, E5), stage, KILLED)
        heard = [guest.hear(), guest.hear()]
        os.kill(guest.pid, signal.SIGKILL)
        until("its end", lambda: view(stage, A).state == "gone")
        store = store_at(stage, A, E5)
        assert store.newest() >= heard[-1], f"round {n}"
        assert verify(store.folder).ok
        state = Durable.restore(store)
        assert len(state.value["much"]) == 2 << 20
    end(stage, A, E5, size)
    torn_down(stage, 1)
    grant(stage, B, E6, size, name="ckpt")
    store = store_at(stage, B, E6)
    assert os.listdir(store.folder / "staging") == ["1.6"], "what was only staged is gone"


SLOW = """
import os, time
from sublet.node.storage import publish
link = os.link
def slow(*names, **how):
    if names[-1].endswith({where!r}) or names[0].endswith({where!r}):
        open({mark!r}, "w").close()
        time.sleep(1000)
    link(*names, **how)
publish.os = type(os)("os")
publish.os.__dict__.update(os.__dict__)
publish.os.link = slow
"""


@pytest.mark.parametrize("where", [".pack", ".manifest"])
def test_a_supervisor_that_is_killed_while_it_publishes_leaves_whole_checkpoints(where: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with stage_at(tmp_path) as stage:
        kill_in_the_middle(stage, mark, where)


def kill_in_the_middle(stage: SupervisorStage, mark: Path, where: str) -> None:
    grant(stage, A, E5, SMALL, name="ckpt")
    state = Durable("before", store_at(stage, A, E5))
    state.checkpoint()
    end(stage, A, E5, SMALL)
    torn_down(stage, 1)
    stage.kill()
    stage.faults = SLOW.format(where=where, mark=str(mark))
    stage.start()
    stage.connect()
    grant(stage, B, E6, SMALL, name="ckpt")
    code = (
        "state = Durable.restore(current().volume); state.value = os.urandom(300000).hex(); say(1); state.checkpoint()"
    )
    assert program(stage.holder(B, E6), stage, code).hear() == 1
    until("the middle of a publication", mark.exists)
    stage.kill()
    stage.faults = ""
    stage.start()
    stage.connect()
    grant(stage, C, E7, SMALL, name="ckpt")
    held(stage, C)
    store = store_at(stage, C, E7)
    assert verify(store.folder).ok
    assert store.newest() == 1
    again = Durable.restore(store)
    assert again.value == "before"
    again.value = "after"
    again.checkpoint()
    store.collect(1)
    assert verify(store.folder).ok
    assert Durable.restore(store_at(stage, C, E7)).value == "after"
    assert sorted(os.listdir(store.folder / "packs")) == sorted(
        ref.name.hex() + ".pack" for ref in store.manifest().packs
    )


# ---------------------------------------------------------------------------------------------- copied from another

SLOW_COPY = """
from sublet.node.storage import copying_work
import time
copy = copying_work.copy_bytes
def slow(source, to, size):
    copy(source, to, size // 2)
    open({mark!r}, "w").close()
    time.sleep(1000)
copying_work.copy_bytes = slow
"""


def test_a_supervisor_that_is_killed_while_it_copies_leaves_nothing_of_it(stage: SupervisorStage) -> None:
    """Whoever has the volume that is copied saves meanwhile; its end waits for nobody who reads for ever."""
    mark = stage.state / "mark"
    stage.kill()
    stage.faults = SLOW_COPY.format(mark=str(mark))
    stage.start()
    stage.connect()
    grant(stage, A, E5, SMALL, name="ckpt")
    grant(stage, B, E6, SMALL, name="other")
    first, second = Durable(os.urandom(300_000), store_at(stage, A, E5)), store_at(stage, B, E6)
    first.checkpoint()
    with pytest.raises(Unauthorized, match="may not read"):
        stage.holder(A, E5).ask(LendVolume(reads=True))
    reads = stage.office_line.admit(A, E5, operations=("read",))
    lent = reads.ask(LendVolume(reads=True))
    reads.close()
    assert isinstance(lent, VolumeLent)
    failed: list[SubletError] = []

    def copy() -> None:
        try:
            copy_checkpoint(second, lent.ticket)
        except SubletError as error:
            failed.append(error)

    copying = threading.Thread(target=copy)
    copying.start()
    until("the middle of a copy", mark.exists)
    first.value = b"meanwhile"
    first.checkpoint()
    first.checkpoint()
    first._store.collect(1)
    assert Durable.restore(first._store).value == b"meanwhile"
    assert second.newest() == 0
    end(stage, A, E5, SMALL)
    torn_down(stage, 1)
    stage.kill()
    copying.join(30)
    assert failed
    stage.faults = ""
    stage.start()
    stage.connect()
    grant(stage, C, E7, SMALL, name="other")
    held(stage, C)
    assert store_at(stage, C, E7).newest() == 0
    assert os.listdir(second.folder / "packs") == []
    assert os.listdir(second.folder / "staging") == [str(E7)]


# ------------------------------------------------------------------------------------------------------ save on notice

NOTICED = """
import signal
state = Durable({"n": 0}, current().volume)
@current().on_checkpoint
def save():
    state.mutate(lambda it: it.update(n=it["n"] + 1))
    return state.checkpoint(note="saved").number
say(current().checkpoint())
signal.signal(signal.SIGTERM, lambda *_: None)
while state.last is None or state.last.number < 2:
    time.sleep(0.01)
say(state.last.number)
time.sleep(1000)
"""


def test_a_program_saves_by_itself_when_it_is_told_that_its_lease_will_be_taken(stage: SupervisorStage) -> None:
    grant(stage, A, E5, SMALL, name="ckpt")
    guest = program(stage.holder(A, E5), stage, NOTICED)
    assert guest.hear() == 1
    take_at_ns = now_ns() + 20 * S
    notify = Notify(lease=A, epoch=E5, number=2, reason=EndReason.PREEMPTED, take_at_ns=take_at_ns)
    stage.office_line.order(notify)
    assert guest.hear() == 2
    end(stage, A, E5, SMALL)
    torn_down(stage, 1)
    saved = last_torn(stage).saved
    assert saved is not None
    assert saved.version == 2


LEAVES = """
state = Durable({"n": 0}, current().volume)
current().on_checkpoint(lambda: (time.sleep(0.3), state.mutate(lambda it: it.update(n=7)), state.checkpoint()))
say(1)
time.sleep(1000)
"""


def test_without_an_office_a_lease_that_runs_out_is_saved_first(stage: SupervisorStage) -> None:
    """The supervisor warns by itself, the program is interrupted, and its end waits for the save."""
    grant(stage, A, E5, SMALL, name="ckpt")
    guest = program(stage.holder(A, E5), stage, LEAVES, bootstrap=True)
    assert guest.hear() == 1
    runs_out(stage, 11 * S // 2, 60 * S)  # half a second, and then the five that a save has before the end
    stage.hang_up()
    folder = stage.state / "blocks" / "named" / "local" / "ckpt"
    until("the volume to be kept", (folder / "kept").exists)
    stage.connect()
    grant(stage, B, E6, SMALL, name="ckpt")
    held(stage, B)
    assert Durable.restore(store_at(stage, B, E6)).value == {"n": 7}


# --------------------------------------------------------------------------------------------------------- how it fits


@pytest.mark.parametrize("amount", [100_000, pytest.param(2 * MIB, marks=needs_images)])
def test_a_save_that_does_not_fit_is_refused_before_anything_is_written(amount: int, stage: SupervisorStage) -> None:
    size = part(Kind.BLOCK, amount)
    grant(stage, A, E5, size, name="ckpt")
    store = store_at(stage, A, E5)
    state = Durable("small", store)
    state.checkpoint()
    state.value = os.urandom(3 * MIB).hex()
    before = sorted(str(path) for path in Path(store.folder).rglob("*"))
    with pytest.raises(SubletError, match=r"needs up to \d+") as refused:
        state.checkpoint()
    assert refused.value.kind == "CheckpointFailed"
    assert sorted(str(path) for path in Path(store.folder).rglob("*")) == before
    state.value = "0" * (3 * MIB)  # it shrinks, and fits
    assert state.checkpoint() is not None


# ---------------------------------------------------------------------------------------------------- kept and removed


def test_what_is_kept_is_listed_to_the_next_office_and_removed_when_it_says_so(stage: SupervisorStage) -> None:
    grant(stage, A, E5, SMALL, name="ckpt")
    Durable(1, store_at(stage, A, E5)).checkpoint()
    end(stage, A, E5, SMALL)
    torn_down(stage, 1)
    assert last_torn(stage).kept
    stage.hang_up()
    stage.connect()

    def told(kind: type[Any]) -> list[Any]:
        stage.office_line.wait(0.02)
        return [one for one in stage.office_line.reports if isinstance(one, kind)]

    until("what is kept", lambda: any(one.volumes for one in told(Volumes)))
    (stored,) = told(Volumes)[-1].volumes
    assert (stored.volume, stored.size, stored.lease, stored.epoch) == (REF, 8 * MIB, A, E5)
    folder = stage.state / "blocks" / "named" / "local" / "ckpt"
    order = RemoveVolume(lease=A, epoch=E5, number=3, volume=REF, parts=(SMALL,))
    stage.office_line.order(order)
    until("its removal", lambda: bool(told(VolumeRemoved)))
    assert not folder.exists()


@pytest.mark.parametrize("amount", [65536, pytest.param(2 * MIB, marks=needs_images)])
def test_a_volume_in_which_nothing_was_saved_is_not_kept(amount: int, stage: SupervisorStage) -> None:
    size = part(Kind.BLOCK, amount)
    grant(stage, A, E5, size, name="ckpt")
    store_at(stage, A, E5).stage()
    end_with(stage, A, E5, size)
    torn_down(stage, 1)
    assert not last_torn(stage).kept
    assert not (stage.state / "blocks" / "named" / "local" / "ckpt").exists()


def end_with(stage: SupervisorStage, lease: LeaseId, epoch: Epoch, size: Part) -> None:
    from sublet.wire.orders import End

    order = End(lease=lease, epoch=epoch, number=9, parts=(size,), reason=EndReason.RELEASED, grace_ns=0, volume=REF)
    stage.office_line.order(order)


def test_a_removal_that_broke_off_is_gone_on_with_by_the_next(stage: SupervisorStage) -> None:
    size = part(Kind.BLOCK, 65536)
    grant(stage, A, E5, size, name="ckpt")
    Durable(1, store_at(stage, A, E5)).checkpoint()
    end(stage, A, E5, size)
    torn_down(stage, 1)
    stage.kill()
    folder = stage.state / "blocks" / "named" / "local" / "ckpt"
    (folder / "kept").rename(folder / "removing")
    stage.start()
    stage.connect()
    until("the rest of it to go", lambda: not folder.exists())


# ------------------------------------------------------------------------------------------------- another user's guest

TENANTS = """
import json, os, socket
volume, door = os.environ["SUBLET_VOLUME"], os.environ["SUBLET_PUBLISH"]
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(door)
def ask(**call):
    sock.send(json.dumps(call).encode())
    return json.loads(sock.recv(65536))
opened = ask(**{"is": "OpenVolume"})
os.mkdir(opened["staging"] + "/s")
for name, data in FILES.items():
    with open(opened["staging"] + "/s/" + name, "wb") as file:
        file.write(bytes.fromhex(data))
packs = [name for name in FILES if name != "manifest"]
kept = open(opened["staging"] + "/s/" + packs[0], "ab") if KEEP_OPEN else None
done = ask(**{"is": "Publish", "lease": opened["lease"], "epoch": opened["epoch"], "staging": "s",
              "manifest": "manifest", "packs": packs, "parent": 0})
def refused(act):
    try:
        act()
        return "done"
    except OSError as error:
        return type(error).__name__
there = volume + "/packs/" + packs[0]
print(json.dumps({
    "done": done, "uid": os.getuid(),
    "write": refused(lambda: open(there, "ab")),
    "chmod": refused(lambda: os.chmod(there, 0o666)),
    "unlink": refused(lambda: os.unlink(there)),
    "away": refused(lambda: os.rename(volume + "/packs", volume + "/p")),
    "manifest": refused(lambda: open(volume + "/checkpoints/mine", "w")),
    "lock": refused(lambda: open(os.path.dirname(volume) + "/lock")),
    "own": refused(lambda: open(volume + "/mine", "w").close()),
    "read": len(open(there, "rb").read()), "staged": refused(lambda: os.unlink(opened["staging"] + "/s/" + packs[0])),
}), flush=True)
import time; time.sleep(1000)
"""


@needs_images
@pytest.mark.parametrize("keep_open", [False, True])
def test_what_a_tenants_guest_saved_it_can_no_longer_touch(
    keep_open: bool, stage: SupervisorStage, tmp_path: Path
) -> None:
    anna = TenantId("anna")
    staged = tmp_path / "s"
    staged.mkdir()
    value = {"value": os.urandom(9000)}
    made = Saver().save(
        value, staging=staged, base=FolderStore(tmp_path / "f").base(), author=Author(lease=A, epoch=E5), wall_ns=0
    )
    files = {path.name: path.read_bytes().hex() for path in (*made.packs, made.manifest_path)}
    order = Grant(
        lease=A, epoch=E5, number=1, tenant=anna, parts=(SMALL,), deadline_ns=now_ns() + 300 * S, ttl_ns=300 * S
    )
    stage.office_line.order(order)
    mine, theirs = socket.socketpair()
    front = Front(tenant=anna, operator=False, profile=Profile.TENANT, lease=A, epoch=E5, operations=("run", "logs"))
    stage.office_line.ask(Admit(front=front, oldest=WIRE_OLDEST, newest=WIRE_VERSION), (theirs.detach(),))
    line = HolderLine(mine)
    code = f"FILES = {files!r}\nKEEP_OPEN = {keep_open!r}\n" + TENANTS
    line.start("/usr/bin/python3", "-I", "-S", "-c", code)
    until("an answer", lambda: '"read"' in log_of(stage, A) or "Error" in log_of(stage, A))
    text = log_of(stage, A)
    assert "Error:" not in text, text
    found = json.loads(text[text.index('{"') : text.rindex("}") + 1])
    assert found["done"]["is"] == "Published", found
    assert {name: found[name] for name in ("write", "chmod", "unlink", "away", "manifest")} == dict.fromkeys(
        ("write", "chmod", "unlink", "away", "manifest"), "PermissionError"
    )
    assert found["lock"] == "FileNotFoundError"
    assert found["own"] == found["staged"] == "done"
    (place,) = (stage.state / "blocks" / "leases").glob("*/0")
    assert verify(place).ok
    with FolderStore(place, create=False).open() as checkpoint:
        assert checkpoint.load("value") == value["value"]
    assert {path.stat().st_uid for path in (place / "packs").iterdir()} == {0}
    line.close()


def test_saving_costs_the_supervisor_no_memory(stage: SupervisorStage) -> None:
    grant(stage, A, E5, part(Kind.BLOCK, 64 * MIB), name="ckpt")
    state = Durable(os.urandom(1000), store_at(stage, A, E5), keep=2)
    state.checkpoint()
    before = resident(stage.pid)
    for _ in range(15):
        state.value = os.urandom(100_000)
        state.checkpoint()
    assert resident(stage.pid) < before + 600 * 1024


def resident(pid: int) -> int:
    """Other files of the kernel's have it only up to some hundred pages."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Rss:"))
