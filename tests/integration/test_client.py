"""The client against a real office: a process of its own on this machine, started, killed, and found again."""

from __future__ import annotations

import gc
import os
import queue
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import answers
from sublet.wire.http import TenantToken
from tests.traces import supervisor_of
from tests.traces import until as until_it_is

WAIT_S = 60.0


def end_office(home: Path) -> None:
    """End the office of this home, however it is."""
    try:
        with sublet.connect(home=home, start=False) as fabric:
            fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    except sublet.SubletError:
        return


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    end_office(tmp_path / "home")


@pytest.fixture
def fabric(two_devices: Path) -> Iterator[sublet.Fabric]:
    with sublet.connect(home=two_devices) as found:
        yield found


def until(what: Any, timeout_s: float = WAIT_S) -> Any:
    """Wait for something that another process does. Its result, once it is true."""
    return until_it_is("what the office is to say", what, timeout_s)


def run(code: str, home: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program of somebody else, with its own interpreter."""
    env = os.environ | {"SUBLET_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False, **options)


def _often(fabric: sublet.Fabric) -> sublet.Lease:
    """A lease that is renewed every half second and has minutes to spare: a busy machine must not decide a test."""
    return fabric.gpu(min_vram="1GiB", ttl="5m", renew_every="500ms")


def make_tenant(home: Path, **settings: Any) -> sublet.Fabric:
    """A tenant with a token of its own, and its way in."""
    name = f"t-{os.urandom(4).hex()}"
    with sublet.connect(home=home) as operator:
        made = operator.request("POST", "/v1/tenants", {"id": name, **settings}, shape=TenantToken)
    return sublet.connect(home=home, token=made.token, as_tenant=True)


# ---- a lease's life


def test_a_lease_from_acquire_to_release(fabric: sublet.Fabric) -> None:
    with fabric.gpu(min_vram="1GiB", ttl="10m", name="first", labels={"who": "me"}) as lease:
        assert lease.status is sublet.LeaseStatus.ACTIVE
        assert 450 < lease.remaining < 600
        assert (lease.name, lease.labels, lease.ttl, lease.end) == ("first", {"who": "me"}, 600.0, None)
        assert [device.kind for device in lease.devices] == [sublet.Kind.GPU]
        assert [view.id for view in fabric.leases()] == [lease.id]
        lease.renew()
        assert fabric.lease(lease.id).renewals == 1
        lease.check(needs="30s")
    assert lease.end is not None
    assert lease.end.reason is sublet.EndReason.RELEASED
    lease.release()
    with pytest.raises(sublet.LeaseNotActive):
        lease.check()
    with pytest.raises(sublet.LeaseNotActive):
        lease.renew()
    until(lambda: not fabric.leases())


def test_each_kind_can_be_leased(fabric: sublet.Fabric) -> None:
    with fabric.cpu(1) as cpu, fabric.memory("64MiB") as memory, fabric.block(min_blocks=512, name="ckpt") as block:
        amounts = [(d.kind.value, d.amount) for lease in (cpu, memory, block) for d in lease.devices]
        assert amounts == [("cpu", 1), ("memory", 64 << 20), ("block", 512 * 4096)]
    with fabric.gpu(min_vram="1GiB", count=2) as both:
        assert len(both.devices) == 2


def test_the_body_error_is_never_masked(fabric: sublet.Fabric) -> None:
    with pytest.raises(ZeroDivisionError), fabric.gpu(min_vram="1GiB") as lease:
        _ = 1 / 0
    assert lease.end is not None
    until(lambda: not fabric.leases())


def test_busy_leases_are_renewed_and_idle_ones_end_as_idle(fabric: sublet.Fabric) -> None:
    """Two leases: one works, one does not."""
    ends: queue.SimpleQueue[sublet.LeaseEnd] = queue.SimpleQueue()
    with _often(fabric) as busy:
        reasons: list[str] = []
        for ttl in ("2s", "20s"):  # a machine that stands still may sleep through a short one, and say nothing of it
            with busy.activity("training"), fabric.gpu(min_vram="1GiB", ttl=ttl) as idle:
                idle.on_end(ends.put)
                end = ends.get(timeout=WAIT_S)
                until(lambda: fabric.lease(busy.id).renewals)
                assert busy.status is sublet.LeaseStatus.ACTIVE
            reasons = [end.reason, until(lambda idle=idle: fabric.lease(idle.id).end).reason]
            if reasons == ["idle", "idle"]:
                with pytest.raises(sublet.LeaseExpired, match="idle"):
                    idle.check()
                break
        assert reasons == ["idle", "idle"]
    assert fabric.lease(busy.id).busy > 1


def test_a_lease_that_is_never_renewed_expires(fabric: sublet.Fabric) -> None:
    changes: list[str] = []
    for ttl in ("2s", "12s"):  # a machine that stands still may sleep through the warning of a short one
        with fabric.gpu(min_vram="1GiB", ttl=ttl, renew="never") as lease, lease.activity():
            changes = [change.what for change in lease.events()]
        assert until(lambda: fabric.lease(lease.id).end).reason == "expired"
        if changes == ["warning", "ended"]:
            break
    assert changes == ["warning", "ended"]


def test_a_manager_of_ones_own_renews_instead_of_the_fabric(fabric: sublet.Fabric) -> None:
    with fabric.gpu(min_vram="1GiB", ttl="12s") as lease, lease.activity():
        manager = sublet.RenewalManager()
        manager.register(lease, sublet.RenewalPolicy(every="500ms"))
        for _ in range(2):
            assert until(lambda: manager.tick().renewed) == (lease.id,)
        assert fabric.lease(lease.id).renewals == 2


# ---- waiting


def test_who_waits_hears_its_place_and_gets_its_turn(fabric: sublet.Fabric) -> None:
    places: queue.SimpleQueue[sublet.Place] = queue.SimpleQueue()
    got: queue.SimpleQueue[sublet.Lease] = queue.SimpleQueue()
    with fabric.gpu(min_vram="1GiB", count=2) as first, first.activity():
        waiter = threading.Thread(target=lambda: got.put(fabric.gpu(min_vram="1GiB", on_place=places.put)))
        waiter.start()
        place = places.get(timeout=WAIT_S)
        assert (place.position, bool(place.reason)) == (1, True)
        first.release()
        second = got.get(timeout=WAIT_S)
    waiter.join()
    assert second.status is sublet.LeaseStatus.ACTIVE
    assert second.epoch > first.epoch
    second.release()


def test_waiting_can_be_bounded_or_left_out(fabric: sublet.Fabric) -> None:
    with fabric.gpu(min_vram="1GiB", count=2) as both, both.activity():  # one that is idle yields to who waits
        with pytest.raises(sublet.CapacityExceeded, match="GPU unavailable: ") as at_once:
            fabric.gpu(min_vram="1GiB", wait=0)
        with pytest.raises(sublet.CapacityExceeded, match="GPU unavailable: not granted within 300ms"):
            fabric.gpu(min_vram="1GiB", wait="300ms")
        assert at_once.value.estimate is not None
        assert len(fabric.leases()) == 1
    with pytest.raises(sublet.CapacityExceeded, match="GPU unavailable: "):
        fabric.gpu(min_vram="5GiB", wait=0)


def test_an_offer_is_made_only_to_who_would_take_it(fabric: sublet.Fabric) -> None:
    with fabric.gpu(min_vram="3GiB", exclusivity="shared"), fabric.gpu(min_vram="3GiB", exclusivity="shared"):
        with pytest.raises(sublet.CapacityExceeded) as refused:
            fabric.gpu(min_vram="2GiB", exclusivity="shared", wait=0)
        assert isinstance(refused.value.offer, sublet.Offer)
        assert refused.value.offer.offered == 1 << 30
        with fabric.gpu(min_vram="2GiB", exclusivity="shared", or_smaller=True) as smaller:
            assert smaller.devices[0].amount == 1 << 30
        until(lambda: len(fabric.leases()) == 2)
        offers: list[sublet.Offer] = []

        def decline(offer: sublet.Offer) -> bool:
            offers.append(offer)
            return False

        with pytest.raises(sublet.CapacityExceeded, match="was declined"):
            fabric.gpu(
                min_vram="2GiB",
                exclusivity="shared",
                or_smaller="512MiB",
                wait=0,
                on_offer=decline,
            )
        assert [offer.offered for offer in offers] == [1 << 30]


def test_an_interrupted_wait_leaves_the_queue(fabric: sublet.Fabric) -> None:
    def interrupt(_: sublet.Place) -> None:
        raise KeyboardInterrupt

    with fabric.gpu(min_vram="1GiB", count=2) as both, both.activity():
        with pytest.raises(KeyboardInterrupt):
            fabric.gpu(min_vram="1GiB", on_place=interrupt)
        until(lambda: [view.status for view in fabric.leases()] == ["active"])


# ---- taken back


def test_a_notice_is_heard_and_the_end_has_its_reason(fabric: sublet.Fabric) -> None:
    with fabric.gpu(min_vram="1GiB", renew="always") as lease:
        told: queue.SimpleQueue[tuple[str, str, float]] = queue.SimpleQueue()
        lease.on_notice(lambda notice: told.put((notice.detail, lease.status, lease.remaining)))
        events = lease.events()
        until(lambda: fabric._keeper._news is not None and not fabric._keeper._behind)
        revoke = f"/v1/leases/{lease.id}/revoke"
        fabric.request("POST", revoke, {"notice": 100.0, "detail": "maintenance"}, shape=dict)
        detail, status, remaining = told.get(timeout=WAIT_S)
        assert (detail, status) == ("maintenance", sublet.LeaseStatus.NOTICED)
        assert remaining < 100
        fabric.request("POST", revoke, {"detail": "maintenance"}, shape=dict)
        assert [change.what for change in events] == ["notice", "ended"]
        with pytest.raises(sublet.LeaseRevoked, match="operator"):
            lease.check()
    assert lease.end is not None
    assert (lease.end.reason, lease.end.detail) == (sublet.EndReason.OPERATOR, "maintenance")


def test_attaching_fences_whoever_held_it(fabric: sublet.Fabric, two_devices: Path) -> None:
    """From another program, by the id alone."""
    lease = fabric.gpu(min_vram="1GiB", renew="always")
    with sublet.connect(home=two_devices) as other, other.attach(lease.id) as taken:
        assert taken.epoch > lease.epoch
        until(lambda: lease.end)
        with pytest.raises(sublet.LeaseNotActive, match="newer epoch"):
            lease.renew()
        lease.release()  # it is not this program's any more, so nothing happens
        assert taken.status is sublet.LeaseStatus.ACTIVE
        assert other.lease(taken.id).end is None


# ---- dropped, left, forked, ended


def test_a_dropped_lease_is_given_back_with_a_warning(fabric: sublet.Fabric) -> None:
    leases = [fabric.gpu(min_vram="1GiB")]
    leases[0].on_end(print)
    leases[0].on_notice(print)
    with pytest.warns(sublet.DroppedLease, match=leases[0].id):
        leases.clear()
    gc.collect()
    until(lambda: not fabric.leases())


def test_a_fabric_that_is_dropped_leaves_nothing_open(two_devices: Path) -> None:
    """Neither sockets nor a thread, nor a lease that was dropped with it."""
    done = run(
        """
        import gc, threading, time, warnings
        import sublet
        sublet.connect().status()
        warnings.simplefilter("ignore", sublet.DroppedLease)
        sublet.connect().gpu(min_vram="1GiB", ttl="10m")
        gc.collect()
        end = time.monotonic() + 60
        while threading.active_count() > 1 and time.monotonic() < end:
            time.sleep(0.01)
        print(threading.active_count())
        with sublet.connect() as fabric:
            print([view.status for view in fabric.leases() if view.end is None])
        """,
        two_devices,
    )
    assert (done.stdout.split(), done.stderr) == (["1", "[]"], "")


def test_a_lease_that_is_left_lives_on(fabric: sublet.Fabric, two_devices: Path) -> None:
    done = run(
        """
        import sublet
        with sublet.connect() as fabric:
            print(fabric.gpu(min_vram="1GiB").leave())
        """,
        two_devices,
    )
    assert done.stderr == ""
    until(lambda: [view.id for view in fabric.leases()] == [done.stdout.strip()])  # without what is torn down just now
    fabric.attach(done.stdout.strip()).release()


def test_a_program_that_ends_gives_back_what_it_holds(fabric: sublet.Fabric, two_devices: Path) -> None:
    done = run(
        """
        import sublet
        fabric = sublet.connect()
        lease = fabric.gpu(min_vram="1GiB", ttl="10m")
        raise SystemExit(3)
        """,
        two_devices,
    )
    assert (done.returncode, done.stderr) == (3, "")
    until(lambda: not fabric.leases())


def test_the_end_of_a_program_is_not_held_up_by_an_office_that_hangs(home: Path) -> None:
    """Stopped, not killed: it accepts connections and never answers."""
    with sublet.connect(home=home) as fabric:
        pid = fabric.status().pid
    code = """
        import atexit, os, signal, time
        atexit.register(lambda: print(time.monotonic() - began_s))  # what is registered first is called last
        import sublet
        fabric = sublet.connect()
        leases = [fabric.memory("1MiB"), fabric.memory("1MiB"), fabric.memory("1MiB")]
        os.kill(fabric.status().pid, signal.SIGSTOP)
        began_s = time.monotonic()
        """
    try:
        done = run(code, home)
        assert done.returncode == 0
        assert float(done.stdout) < 15, "two seconds; each lease by itself is waited for longer than this"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_fork_has_nothing_of_its_parents(fabric: sublet.Fabric, two_devices: Path) -> None:
    """It can neither renew nor end the parent's leases, by accident or by exit, but it can acquire its own."""
    program = """
        import os, time, warnings
        import sublet
        fabric = sublet.connect()
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own about forking with threads
        with fabric.gpu(min_vram="1GiB", ttl="12s", renew_every="500ms") as lease, lease.activity():
            if os.fork() == 0:
                try:
                    lease.renew()
                except sublet.LeaseNotActive as error:
                    print(error)
                lease.__exit__(None, None, None)
                with fabric.gpu(min_vram="1GiB", wait=0) as own:
                    print("own", own.epoch > lease.epoch)
                raise SystemExit
            os.wait()
            before = fabric.lease(lease.id).renewals
            while fabric.lease(lease.id).renewals == before:
                time.sleep(0.05)
            lease.check()
            print(fabric.lease(lease.id).status)
        """
    done = run(program, two_devices)
    assert done.stderr == ""
    told = done.stdout.splitlines()
    assert "belongs to the process that acquired it" in told[0]
    assert told[1:] == ["own True", "active"]


# ---- the office comes and goes


def test_twenty_connects_at_once_start_one_office(home: Path) -> None:
    # Forks of one program: twenty that begin take as long on a busy machine as one of them waits for an office.
    code = """
        import os
        import sublet
        children = []
        for _ in range(20):
            if not (child := os.fork()):
                try:
                    os.write(1, b"%d\\n" % sublet.connect().status().pid)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        raise SystemExit(sum(os.waitpid(child, 0)[1] for child in children))
        """
    done = run(code, home)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.split()
    assert len(said) == 20, said
    assert len(set(said)) == 1


def test_a_killed_office_is_started_again_with_the_same_leases(home: Path) -> None:
    """Its socket is stale; the leases are in the journal, with their deadlines and epochs unchanged."""
    with sublet.connect(home=home) as fabric:
        lease = fabric.gpu(min_vram="1GiB", ttl="10m", renew="always")
        before, status = fabric.lease(lease.id), fabric.status()
        for _ in range(2):
            os.kill(fabric.status().pid, signal.SIGKILL)
            after = fabric.lease(lease.id)
            assert (after.epoch, after.deadline, after.status) == (before.epoch, before.deadline, "active")
        assert fabric.status().pid != status.pid
        lease.renew()
        assert lease.status is sublet.LeaseStatus.ACTIVE
        lease.release()


def test_the_keeper_starts_a_killed_office_again_by_itself(home: Path) -> None:
    """The program is busy and asks nothing; its lease outlives the office all the same."""
    with sublet.connect(home=home) as fabric, _often(fabric) as lease, lease.activity():
        pid = fabric.status().pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: lease._held.view.renewals)
        lease.check()
        assert fabric.status().pid != pid


def test_an_office_that_was_told_to_end_is_not_started_again_for_what_it_has_ended(home: Path) -> None:
    """Two programs give back what they had a moment after `sublet down --now`: that starts no office, nor does a lease
    that is to be renewed. Who asks for a new lease has one started."""
    with sublet.connect(home=home) as first, sublet.connect(home=home) as second:
        mine, others = first.memory("1MiB", ttl="1m"), second.memory("1MiB", ttl="1m", renew="always")
        supervisor = until(lambda: supervisor_of(runtime_dir(home.resolve())))
        first.request("POST", "/v1/down", {"how": "now"}, shape=dict)
        until(lambda: not answers(socket_path(home)))
        mine.release()
        second.release([others])
        assert not answers(socket_path(home))
        until(lambda: supervisor_of(runtime_dir(home.resolve())) != supervisor)
        assert not socket_path(home).exists()
        first.memory("1MiB").release()
        assert answers(socket_path(home))


def test_an_interrupt_at_the_terminal_does_not_reach_the_office(home: Path) -> None:
    """Ctrl-C goes to the whole process group of whoever started the office; the office is in none of them."""
    done = run(
        """
        import os, signal
        import sublet
        fabric = sublet.connect()
        print(fabric.status().pid, flush=True)
        try:
            os.killpg(os.getpgrp(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            print(fabric.status().pid)
        """,
        home,
        start_new_session=True,
    )
    first, second = done.stdout.split()
    assert first == second
    assert Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1] != str(os.getpid())
    os.kill(int(first), 0)


def test_an_office_that_cannot_start_says_why(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "journal.db").write_bytes(b"this is no journal" * 1000)
    with pytest.raises(sublet.Disconnected, match="could not be started: ") as caught:
        sublet.connect(home=home)
    assert "Traceback" not in str(caught.value)
    assert (home / "journal.db").read_bytes() == b"this is no journal" * 1000


def test_no_office_is_started_where_none_is_wanted(home: Path) -> None:
    with pytest.raises(sublet.Disconnected) as caught:
        sublet.connect(home=home, start=False)
    assert not caught.value.sent
    assert not home.exists()


def test_a_folder_where_the_socket_should_be_is_told(home: Path) -> None:
    runtime_dir(home).mkdir(mode=0o700)
    socket_path(home).mkdir()
    try:
        with pytest.raises(sublet.SubletError):
            sublet.connect(home=home)
    finally:
        shutil.rmtree(runtime_dir(home))


# ---- bad input, as far as the office has to say it


def refused(fabric: sublet.Fabric, **asked: Any) -> sublet.SubletError:
    before = fabric.leases(all=True)
    terms: dict[str, Any] = {"min_vram": "1GiB", "wait": 0, **asked}
    with pytest.raises(sublet.SubletError) as caught:
        fabric.gpu(**terms)
    assert [view.id for view in fabric.leases(all=True)] == [view.id for view in before]
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.do
    return caught.value


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"min_vram": "1TiB"}, sublet.CapacityExceeded),
        ({"min_vram": "1TiB", "wait": None}, sublet.CapacityExceeded),
        ({"count": 3, "wait": None}, sublet.CapacityExceeded),
        ({"count": 1000}, sublet.InvalidRequest),
        ({"model": "H900"}, sublet.SubletError),
        ({"exclusivity": "partition"}, sublet.Unsupported),
        ({"selector": {"rack": "nowhere"}}, sublet.SubletError),
        ({"ttl": "1s"}, sublet.InvalidRequest),
        ({"ttl": "30d"}, sublet.InvalidRequest),
    ],
    ids=repr,
)  # fmt: skip
def test_what_cannot_be_is_refused_and_changes_nothing(
    fabric: sublet.Fabric, asked: dict[str, Any], kind: type[sublet.SubletError]
) -> None:
    assert isinstance(refused(fabric, **asked), kind)


def test_another_tenants_lease_looks_like_none(fabric: sublet.Fabric, two_devices: Path) -> None:
    """Whatever is asked of it, the answer is that of an id that never was."""
    with make_tenant(two_devices) as stranger, fabric.gpu(min_vram="1GiB") as lease:
        for ask in (stranger.lease, stranger.attach):
            told = []
            for lease_id in (lease.id, "l-0000000000000000"):
                with pytest.raises(sublet.NotFound) as caught:
                    ask(lease_id)
                told.append(str(caught.value).replace(lease_id, "ID"))
            assert told[0] == told[1]
        assert stranger.leases() == []
        assert lease.status is sublet.LeaseStatus.ACTIVE


def test_a_token_that_is_not_known_is_refused(two_devices: Path) -> None:
    with sublet.connect(home=two_devices, token="sublet_nobody") as fabric, pytest.raises(sublet.Unauthorized):
        fabric.status()


def test_a_quota_is_told_as_such(two_devices: Path) -> None:
    with make_tenant(two_devices, quota={"gpus": 1}) as small:
        held = small.gpu(min_vram="1GiB")
        with pytest.raises(sublet.QuotaExceeded):
            small.gpu(min_vram="1GiB", wait=0)
        held.release()
