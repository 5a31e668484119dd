"""What is said of what stays, whose it is, and what a save that is interrupted leaves: without any kernel."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from sublet.errors import LeaseEnded, LeaseRevoked, Unpicklable, WorkerLost
from sublet.lease.value import rfc3339
from sublet.lease_end import EndReason, LeaseEnd
from sublet.notebook import guest_persistence
from sublet.notebook.batch.page import JobBill
from sublet.notebook.bill import NotebookBill, since_end
from sublet.notebook.cell_io import Fate, _saved, fates_text
from sublet.notebook.checkpoint import About, NotebookCheckpoint
from sublet.notebook.end_messages import cannot_travel, process_lost, session_ended
from sublet.notebook.interrupts import interrupts_wait
from sublet.notebook.options import CellOptions
from sublet.notebook.ownership import FOLDER_VARIABLE, KernelVolume, Owner, notebook_path, volume_name
from sublet.notebook.probing import describe, probe
from sublet.notebook.remote_value import RemoteValue
from sublet.notebook.remote_values import RemoteValues
from sublet.notebook.resume import wait_until_gone
from sublet.notebook.status import CellBill
from sublet.state.checkpoints.store import FolderStore
from sublet.values import MIB, Epoch, LeaseId, valid_name
from sublet.wire.http import BillLine
from sublet.wire.volumes import VolumeCall, VolumeOpened, VolumeReply

SAVED_NS = 1_700_000_000_000_000_000


class Keeper:
    """Says of every guest what it was told to."""

    def __init__(self, *, live: bool = False, parked: bool = False) -> None:
        self._live, self._parked = live, parked

    def fetch(self, handle: RemoteValue) -> Any:
        return f"a copy of {handle.value_name}"

    def is_live(self, kernel: Any) -> bool:
        return self._live

    def is_parked(self, kernel: Any) -> bool:
        return self._parked


def handle(*, wall_ns: int = 0, lost: str = "", keeper: Keeper | None = None) -> RemoteValue:
    about = About(
        name="w",
        what="Tensor (3,) float32 on cuda:0",
        nbytes=12,
        why="memory on cuda:0",
        cell=4,
        made=4,
        wall_ns=wall_ns,
    )
    return RemoteValue(about, object(), keeper or Keeper(), lost=lost)


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (handle(keeper=Keeper(live=True)), "stays on the device (memory on cuda:0), not saved; .fetch() brings a copy"),
        (handle(keeper=Keeper(live=True), lost="a lock"), "cannot be saved (a lock)"),
        (handle(keeper=Keeper(live=True), wall_ns=SAVED_NS), "saved 2023-11-"),
        (handle(keeper=Keeper(parked=True)), "its device was taken, and the next cell on a device goes on with it"),
        (handle(wall_ns=SAVED_NS), "the next cell on a device that reads it has it back"),
        (handle(lost="a lock"), "was lost with its lease (a lock); rerun cell 4, which made it"),
    ],
)
def test_a_handle_says_what_it_is_and_how_to_have_it(one: RemoteValue, says: str) -> None:
    assert repr(one).startswith("<w: Tensor (3,) float32 on cuda:0, 12B; ")
    assert says in repr(one)


def test_a_handle_has_nothing_but_what_it_can_do() -> None:
    one = handle(keeper=Keeper(live=True))
    assert dir(one) == ["fetch"]
    assert one.fetch() == "a copy of w"
    with pytest.raises(AttributeError, match=r"no 'shape' here; use it in a %%gpu cell, or w.fetch\(\)"):
        _ = one.shape  # type: ignore[attr-defined]  # that is what is tried
    assert not hasattr(one, "_repr_html_")
    with pytest.raises(TypeError, match="only on the device"):
        one.__reduce__()


@pytest.mark.parametrize("attribute", ["name", "about", "needs", "state", "fetch"])
def test_a_handle_does_not_answer_for_an_attribute_of_the_value(attribute: str) -> None:
    """``file.name`` of a file that stays on the device is not the name of the variable."""
    one: Any = handle(keeper=Keeper(live=True), lost="an open file")
    says = f"w stays on the device, so it has no '{attribute}' here; use it in a %%gpu cell"
    if attribute != "fetch":
        with pytest.raises(AttributeError, match=says):
            getattr(one, attribute)
    with pytest.raises(AttributeError, match=says):
        setattr(one, attribute, 1)
    with pytest.raises(AttributeError, match=says):
        delattr(one, attribute)


def test_the_end_of_a_session_tells_who_why_when_and_what_there_is() -> None:
    end = LeaseEnd(reason=EndReason.PREEMPTED, at="2023-11-14T22:13:20.000Z", detail="by tenant ana, interactive")
    handles = {"w": handle(wall_ns=SAVED_NS), "it": handle(lost="a generator")}
    error = session_ended(LeaseRevoked("lease l-1 has ended", end=end), handles, {})
    said = str(error)
    assert "the GPU session ended at 2023-11-1" in said
    assert "preempted (by tenant ana, interactive)" in said
    assert "w at 2023-11-1" in said
    assert "lost: it (a generator)" in said
    assert said.endswith("Rerun this cell to reacquire.")
    assert error.end is end
    inside = {"step": About(name="step", what="int", wall_ns=SAVED_NS), "np": About(name="np", what="module")}
    said = str(session_ended(LeaseEnded("it ended"), {}, inside))
    assert "saved within this cell at 2023-11-1" in said
    assert ": step; the next cell on a device goes on from there" in said


def test_what_cannot_travel_is_told_by_the_notebooks_names() -> None:
    found = [("s.comm._lock", "a thread lock"), ("s.kernel.socket", "a socket"), ("lock", "a thread lock")]
    error = cannot_travel(Unpicklable("long", path="s.comm._lock", blockers=found))
    assert (
        error.message == "can't send `s` (a thread lock at s.comm._lock) and `lock` (a thread lock) to the GPU process"
    )
    assert error.do == "Build it inside the cell, or don't use it there."


def test_what_went_with_a_process_is_told() -> None:
    handles = {"w": handle(wall_ns=SAVED_NS), "it": handle(lost="a generator")}
    assert process_lost(WorkerLost("it ended"), handles).message == "it ended; lost with it: it (a generator)"


def test_a_bill_has_a_row_for_each_cell_and_the_sum() -> None:
    bill = NotebookBill()
    bill.add(3, "l-1", CellBill(held_s=2.0, busy_s=1.0, vram_byte_s=2 << 30, bytes_in=1 << 20))
    bill.add(5, "l-2", CellBill(held_s=4.0, busy_s=3.5, vram_byte_s=4 << 30, bytes_saved=1 << 20, waited_s=7.0))
    head, first, second, total = bill.text().splitlines()
    assert head.split() == ["cell", "lease", "busy", "VRAM", "GiB·s", "in", "saved", "waited"]
    assert first.split() == ["[3]", "2.0s", "1.0s", "2", "1MiB"]
    assert second.split() == ["[5]", "4.0s", "3.5s", "4", "1MiB", "7.0s"]
    assert total.split() == ["all", "6.0s", "4.5s", "6", "1MiB", "1MiB", "7.0s"]
    zero: dict[str, Any] = {
        "core_seconds": 0.0,
        "memory_byte_seconds": 0.0,
        "block_byte_seconds": 0.0,
        "tenant": None,
        "leases": 1,
        "currency": "EUR",
    }
    office = [
        BillLine(key="l-1", held_seconds=10.0, busy_seconds=1.0, gpu_seconds=10.0, cost=5.0, launches=3, **zero),
        BillLine(key="l-2", held_seconds=4.0, busy_seconds=1.0, gpu_seconds=4.0, cost=1.0, launches=4, **zero),
        BillLine(key="l-9", held_seconds=4.0, busy_seconds=1.0, gpu_seconds=4.0, cost=9.0, **zero),
    ]
    head, first, second, total, last = bill.text(office).splitlines()
    assert head.endswith("     EUR")
    assert [one.split()[-1] for one in (first, second, total)] == ["1.0000", "1.0000", "2.0000"]
    assert last == "the 2 leases in all, with the time between cells: 14.0s, 7 launches, cost 6.0000 EUR"
    assert str(JobBill.of(office[0])) == "1 lease, held 10s, busy 1s, device time 10s, cost 5.0000 EUR"
    odd = JobBill(leases=2, held_s=9.97, busy_s=0.00003, gpu_s=9.94, cost=0.0, currency="EUR")
    assert str(odd) == "2 leases, held 10s, busy 0s, device time 9.9s", "no time is written with an exponent"
    assert NotebookBill().text().splitlines()[-1].split()[0] == "all"


@pytest.mark.parametrize(
    ("gib_s", "text"),
    [
        (0.0, "0"),
        (0.00001, "0"),
        (0.0126, "0.013"),
        (2.346, "2.35"),
        (99.7, "100"),
        (999.6, "1000"),
        (1.234e6, "1234000"),
    ],
)
def test_the_bill_writes_large_amounts_out(gib_s: float, text: str) -> None:
    """A day of 80 GiB is 7e+06 GiB·s, which people read as digits."""
    bill = NotebookBill()
    bill.add(1, "l-1", CellBill(held_s=2.0, busy_s=1.0, vram_byte_s=gib_s * (1 << 30)))
    assert bill.text().splitlines()[1].split()[3] == text


def test_a_cell_whose_lease_was_taken_pays_until_its_end() -> None:
    bill, mib = NotebookBill(), 1 << 20
    bill.add(3, "l-1", CellBill(held_s=10.0, busy_s=1.0, vram_byte_s=10 * mib))
    bill.add(4, "l-1", CellBill(held_s=2.0, busy_s=2.0, vram_byte_s=2 * mib))
    bill.add(5, "l-1", CellBill(held_s=8.0, busy_s=7.5, vram_byte_s=8 * mib))
    bill.add(6, "l-2", CellBill(held_s=1.0, busy_s=1.0, vram_byte_s=mib))
    line = BillLine(
        key="l-1",
        held_seconds=11.5,
        busy_seconds=1.0,
        gpu_seconds=11.5,
        core_seconds=0.0,
        memory_byte_seconds=0.0,
        block_byte_seconds=0.0,
        cost=0.0,
        tenant=None,
        leases=1,
    )
    *rows, total, office = bill.text([line]).splitlines()[1:]
    assert [row.split()[1] for row in rows] == ["10.0s", "1.5s", "0.0s", "1.0s"]
    assert total.split()[1:3] == ["12.5s", "3.5s"]
    assert office.startswith("the lease in all, with the time between cells: 11.5s")
    bill.add(7, "l-1", CellBill(held_s=3.0, busy_s=3.0, vram_byte_s=3 * mib, stood_s=1.0))  # part of it under another
    assert [row.split()[1] for row in bill.text([line]).splitlines()[1:6]] == ["10.0s", "2.0s", "8.0s", "1.0s", "3.0s"]


def test_a_cell_is_told_of_the_end_a_moment_later_and_does_not_pay_for_that() -> None:
    def ended(seconds_ago: float) -> LeaseEnd:
        return LeaseEnd(reason=EndReason.OPERATOR, at=rfc3339(time.time_ns() - round(seconds_ago * 1e9)))

    assert 40 <= since_end(ended(40), 100) < 80
    assert since_end(ended(40), 3) == 3
    assert since_end(ended(-40), 3) == 0
    assert since_end(None, 3) == since_end(LeaseEnd(reason=EndReason.OPERATOR, at=""), 3) == 0


def saves_in(folder: Path, names: dict[str, Any]) -> tuple[RemoteValues, KernelVolume, NotebookCheckpoint]:
    """A notebook, its volume, and the guest's hand on that."""
    handles, volume = RemoteValues(names), KernelVolume(name="", folder=str(folder))
    handles.save_in(volume)
    return handles, volume, NotebookCheckpoint(FolderStore(folder))


def test_what_a_guest_saves_after_the_end_was_told_is_not_gone_on_from(tmp_path: Path) -> None:
    """It is the state of half a cell, and what the cell had made of the notebook's own names would be missing."""
    handles, volume, guest = saves_in(tmp_path / "v", {"w": handle(wall_ns=1)})
    about = {"device:w": About(name="w", cell=1)}
    volume.committed = guest.save({"device:w": [1]}, about, note="cell 1").number
    assert handles.ended(time.time_ns()) == {}
    guest.save({"device:w": [2]}, about, note="within cell 2")
    handles.discard_uncollected()
    assert NotebookCheckpoint(FolderStore(tmp_path / "v")).load(["device:w"]) == {"device:w": [1]}


def test_what_it_saves_in_that_moment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handles, volume, guest = saves_in(tmp_path / "v", {"w": handle(wall_ns=1)})
    about = {"device:w": About(name="w", cell=1)}
    volume.committed = guest.save({"device:w": [1]}, about, note="cell 1").number
    began_ns, settle, late = time.time_ns(), NotebookCheckpoint.roll_back_to, [1]

    def saved_after(shelf: NotebookCheckpoint, number: int, **how: bool) -> int:
        found = settle(shelf, number, **how)
        if late:
            late.clear()
            guest.save({"device:w": [2]}, about, note="within cell 2")
        return found

    monkeypatch.setattr(NotebookCheckpoint, "roll_back_to", saved_after)
    assert list(handles.ended(began_ns)) == ["w"]
    handles.discard_uncollected()
    assert NotebookCheckpoint(FolderStore(tmp_path / "v")).load(["device:w"]) == {"device:w": [2]}


def test_who_looks_for_what_a_guest_saved_waits_until_it_is_gone() -> None:
    class Office:
        says: ClassVar = ["ending", "ending", "ended", "active"]

        def lease(self, lease: str) -> Any:
            assert lease == "l-1"
            return SimpleNamespace(status=self.says.pop(0))

    wait_until_gone(Office(), "l-1")  # type: ignore[arg-type]
    assert Office.says == ["active"]


def test_a_notice_in_a_cell_is_answered_when_the_notebook_has_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    here = SimpleNamespace(is_saving_by_hand=False, ask_again=lambda: asked.append("again"))
    monkeypatch.setattr("sublet.compute.behind.current", lambda: here)
    monkeypatch.setattr(guest_persistence, "_state", guest_persistence._State())
    guest_persistence.begin(7, frozenset(), {}, None)
    guest_persistence.checkpoint()
    guest_persistence._state.is_running, guest_persistence._state.is_taken = False, False
    guest_persistence.checkpoint()
    assert asked == ["again", "again"]
    guest_persistence.taken()
    guest_persistence.checkpoint()
    assert asked == ["again", "again"]


def test_the_report_stands_in_the_order_of_what_is_at_stake() -> None:
    said = fates_text({"x": (Fate.LOST, "a lock"), "y": (Fate.HERE, "1KiB"), "w": (Fate.SAVED, "12:00")})
    assert [line.split()[0] for line in said.splitlines()] == ["y", "w", "x"]
    assert fates_text({}) == "no cell has left anything yet"


@pytest.mark.parametrize(
    ("space", "environ", "path"),
    [
        ({}, {"JPY_SESSION_NAME": "/notebooks/Train It.ipynb"}, "/notebooks/Train It.ipynb"),
        ({"__vsc_ipynb_file__": "/x/y.ipynb"}, {}, "/x/y.ipynb"),
        ({}, {"JPY_SESSION_NAME": "console-1"}, ""),
        ({"__vsc_ipynb_file__": 3}, {}, ""),
        ({"__vsc_ipynb_file__": "/x/y.ipynb"}, {"JPY_SESSION_NAME": "/x/y-3f9a41c2.ipynb"}, "/x/y.ipynb"),
        ({"__vsc_ipynb_file__": None}, {"JPY_SESSION_NAME": "/x/y-3f9a41c2.ipynb"}, "/x/y-3f9a41c2.ipynb"),
        ({"__vsc_ipynb_file__": "c:\\nb\\Train It.ipynb"}, {}, "c:\\nb\\Train It.ipynb"),
        ({}, {}, ""),
    ],
)
def test_the_name_is_the_notebooks_path(space: dict[str, Any], environ: dict[str, str], path: str) -> None:
    assert notebook_path(space, environ) == path
    assert Owner(space, environ).name == (volume_name(path) if path else "")


@pytest.mark.parametrize("stem", ["Train It", "ünïcode ☃", "long" * 50, "", "-"])
def test_the_name_of_a_volume_is_dull_and_another_for_each_path(stem: str) -> None:
    path = f"/a/{stem}.ipynb"
    name = volume_name(path)
    assert valid_name(name, "name") == name
    assert name.startswith("nb-")
    assert name != volume_name(f"/b{path}")


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    environ = {"JPY_SESSION_NAME": "/x/y.ipynb", FOLDER_VARIABLE: str(tmp_path)}
    first, second = Owner({}, environ), Owner({}, environ)
    mine, other = first.take(None), second.take(None)  # type: ignore[arg-type]  # no office is asked for a folder
    assert mine is not None
    assert other is not None
    assert (mine.name, mine.message) == (volume_name("/x/y.ipynb"), "")
    assert other.name == ""
    assert "another kernel has nb-y-" in other.message
    assert first.take(None) is mine  # type: ignore[arg-type]
    first.release_volume()
    second.release_volume()
    third = Owner({}, environ).take(None)  # type: ignore[arg-type]
    assert third is not None
    assert third.folder == mine.folder
    third.release()


class Guest:
    """Answers calls one after the other."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[Any] = []

    def call(self, function: Any, *_: Any) -> Any:
        self.asked.append(function)
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Lent:
    """A lease of blocks, and the line to who keeps it."""

    end = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_released = False
        (folder / "checkpoints").mkdir(parents=True)

    def volume_line(self) -> Lent:
        return self

    def lend(self) -> None:
        pass

    def pair(self) -> tuple[LeaseId, Epoch]:
        return LeaseId("l-1"), Epoch(1, 1)

    def ask(self, _call: VolumeCall) -> VolumeReply:
        lease, epoch = self.pair()
        return VolumeOpened(
            lease=lease, epoch=epoch, name="", folder=str(self.folder), staging="", size=MIB, counted=False
        )

    def release(self) -> None:
        self.is_released = True


@pytest.mark.parametrize("is_there_again", [False, True])
def test_a_volume_that_is_gone_is_taken_anew_though_its_lease_has_not_heard_of_it(
    is_there_again: bool, tmp_path: Path
) -> None:
    """Its room may be there again, without what was in it: where a supervisor was killed and the lease lives on."""
    lent = [Lent(tmp_path / "1"), Lent(tmp_path / "2")]
    fabric: Any = SimpleNamespace(block=lambda *_, **__: lent[0] if not lent[0].is_released else lent[1])
    owner = Owner({}, {})
    first = owner.take(fabric)
    assert first is not None
    assert first.store.newest() == 0
    assert owner.take(fabric) is first
    shutil.rmtree(tmp_path / "1")
    if is_there_again:
        (tmp_path / "1" / "checkpoints").mkdir(parents=True)
        assert owner.take(fabric) is first  # nothing was ever saved there, so nothing is missing
        first.committed = 3
    second = owner.take(fabric)
    assert second is not None
    assert second is not first
    assert lent[0].is_released
    assert second.store.newest() == 0


def test_an_interrupt_waits_for_a_save_that_has_begun() -> None:
    guest, handles = Guest(KeyboardInterrupt(), guest_persistence.PersistenceNews(number=7)), RemoteValues({})
    news, interrupted = _saved(guest, handles, CellOptions())  # type: ignore[arg-type]
    assert news.number == 7
    assert isinstance(interrupted, KeyboardInterrupt)
    assert guest.asked == [guest_persistence.save, guest_persistence.read_status]


def test_two_interrupts_do_not_wait_and_nobody_claims_to_know() -> None:
    guest, handles = Guest(KeyboardInterrupt(), KeyboardInterrupt()), RemoteValues({})
    news, interrupted = _saved(guest, handles, CellOptions())  # type: ignore[arg-type]
    assert news == guest_persistence.PersistenceNews()
    assert isinstance(interrupted, KeyboardInterrupt)


def test_a_save_that_is_not_wanted_is_not_made() -> None:
    guest = Guest(guest_persistence.PersistenceNews())
    _saved(guest, RemoteValues({}), CellOptions(saves=False))  # type: ignore[arg-type]
    assert guest.asked == [guest_persistence.read_status]


def test_what_a_value_is_is_told_without_asking_it() -> None:
    import numpy as np

    class Loud:
        def __repr__(self) -> str:
            raise AssertionError

        shape = property(__repr__)

    values: list[object] = [np.ones((2, 3), "f4"), [1, 2], {}, b"abc", "abc", Loud(), 3]
    found = [describe(one) for one in values]
    expected = ["ndarray (2, 3) float32", "list of 2", "dict of 0", "bytes of 3 bytes", "str of 3 letters"]
    assert found == [*expected, "Loud", "int"]


def test_a_probe_tells_why_something_cannot_be_saved() -> None:
    assert probe("x", (n for n in range(3))).refused == "a generator"
    assert probe("x", b"1" * 5000).nbytes >= 5000


def test_an_interrupt_waits_for_the_end_of_the_block_unless_it_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt, match="after the cell was done"), interrupts_wait():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append(1)
    assert done == [1]
    before = signal.getsignal(signal.SIGINT)
    now_s = [5.0]
    monkeypatch.setattr("sublet.notebook.interrupts.time.monotonic", lambda: now_s[0])
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_wait():  # noqa: PT012 - the last is the point
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a key that was hit twice
        now_s[0] += 1.5
        signal.raise_signal(signal.SIGINT)
        done.append(2)
    assert caught.value.args == ()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is before
    with interrupts_wait():
        done.append(3)
    assert done == [1, 3]
