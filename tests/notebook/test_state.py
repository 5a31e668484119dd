"""What stays on the device outlives the lease: in real kernels, as a person meets it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nbclient.exceptions import CellExecutionError

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from tests.notebook.test_cells import Notebook, status, text

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
    pytest.mark.xdist_group("notebook-state"),  # one notebook, and its story in this order
]
LARGE = "%%gpu --vram 64MiB --stay-over 1MiB\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("home")
    ensure_office(made, words=("up", "--host-gpus", "2x2GiB", "--foreground"))
    yield made
    with sublet.connect(home=made) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(made.resolve()), ignore_errors=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def settings(home: Path, folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBLET_HOME", str(home))
        patch.setenv("JPY_SESSION_NAME", str(folder / "Story.ipynb"))
        yield


@pytest.fixture(scope="module")
def nb(settings: None, folder: Path) -> Iterator[Notebook]:
    made = Notebook(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def second(settings: None, folder: Path) -> Iterator[Notebook]:
    made = Notebook(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def plain(error: BaseException) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", str(error))


def end_the_lease(home: Path, nb: Notebook, then: Callable[[], object] = lambda: None) -> None:
    """As the operator would. ``then`` is called before the notebook knows."""
    with sublet.connect(home=home) as fabric:
        for lease in fabric.leases():
            if any(part.kind == "gpu" for part in lease.parts):
                fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)
    then()
    nb.run("import time\nwhile get_ipython().magics_manager.registry['GpuMagics'].cells.kernel: time.sleep(0.02)")


def test_what_stays_is_saved_after_the_cell_and_restored_by_the_next_that_reads_it(nb: Notebook, home: Path) -> None:
    outputs = nb.run(LARGE + "import numpy as np\nweights = np.ones(1 << 18)\nother = np.ones(1 << 19)\nsmall = 3")
    assert re.search(r"saved .*weights stays \(2MiB, more than 1MiB; saved \d\d:\d\d:\d\d\)", status(outputs))
    assert "stays on the device" in text(nb.run("print(weights, small)"))
    end_the_lease(home, nb)
    assert "the next cell on a device that reads it has it back" in text(nb.run("print(weights)"))
    outputs = nb.run(LARGE + "print(weights.sum())\nweights += 1")
    assert text(outputs) == "262144.0\n"
    assert re.search(r"sublet: restored weights \(saved \d\d:\d\d:\d\d\)", status(outputs))
    assert "other" not in status(outputs)
    assert text(nb.run("print(weights.fetch().sum())")) == "524288.0\n"
    bill = text(nb.run("%gpu bill"))
    assert re.search(r"cell +lease +busy .*saved.* credits", bill)
    assert re.search(r"the \d+ leases? in all, with the time between cells: [\d.]+s, cost 0\.\d{4} credits", bill)


def test_a_handle_whose_lease_ended_can_be_fetched_from_what_was_saved(nb: Notebook, home: Path) -> None:
    nb.run(LARGE + "import numpy as np\nweights = np.full(1 << 18, 2.0)\nother = np.ones(1 << 19)")
    end_the_lease(home, nb)
    assert text(nb.run("print(weights.fetch().sum(), other.fetch().sum())")) == "524288.0 524288.0\n"
    assert "weights is in the notebook now: ndarray" in text(nb.run("%gpu fetch weights"))
    assert text(nb.run("print(type(weights).__name__, weights[0])")) == "ndarray 2.0\n"
    assert text(nb.run("%%gpu --vram 64MiB\nprint(weights.sum())")) == "524288.0\n"


def test_a_cell_that_is_ended_in_the_middle_leaves_what_finished_cells_left(nb: Notebook, home: Path) -> None:
    nb.run(LARGE + "import numpy as np\ndeep = np.zeros(1 << 18)\nit = (n for n in range(9))")
    with pytest.raises(CellExecutionError) as caught:
        nb.run(LARGE + f"deep += 1\n{REVOKE.format(home=home)}\nimport time\ntime.sleep(60)")
    said = plain(caught.value)
    print(said)
    assert re.search(r"GpuSessionEnded: the GPU session ended at \d\d:\d\d:\d\d: operator", said)
    assert "what finished cells left is in the notebook" in said
    assert re.search(r"saved.*deep at \d\d:\d\d:\d\d; lost: it \(a generator\)", said)
    assert "Rerun this cell to reacquire" in said
    outputs = nb.run(LARGE + "print(deep[0])")
    assert text(outputs) == "0.0\n"
    assert "was lost with its lease (a generator); rerun cell" in text(nb.run("print(it)"))
    with pytest.raises(CellExecutionError, match="Rerun the cell that made it"):
        nb.run(LARGE + "next(it)")


REVOKE = """
import subprocess, sys, sublet
subprocess.Popen([sys.executable, "-c", '''
import sublet, sys, time
time.sleep(1)
with sublet.connect(home=sys.argv[1]) as fabric:
    fabric.request("POST", f"/v1/leases/{{sys.argv[2]}}/revoke", {{}}, shape=dict)
''', "{home}", sublet.current().lease], start_new_session=True)
"""


def test_a_notice_saves_what_no_cell_has_saved(nb: Notebook, home: Path) -> None:
    """However late its guest gets to it: the next cell, on the other device, waits for that."""
    makes = "import numpy as np, os\ndeep = np.full(1 << 18, 3.0)\nprint(os.getpid())"
    outputs = nb.run(LARGE.replace("\n", " --no-save\n") + makes)
    guest = int(text(outputs))
    assert "deep stays (2MiB, more than 1MiB; not saved)" in status(outputs)
    assert "not saved" in text(nb.run("print(deep)"))
    os.kill(guest, signal.SIGSTOP)
    late = threading.Timer(0.7, os.kill, (guest, signal.SIGCONT))
    try:
        end_the_lease(home, nb, late.start)  # from then on it has five seconds, however busy the machine is
        assert text(nb.run(LARGE + "print(deep[0])")) == "3.0\n"
    finally:
        late.join()


CUT = """
import sublet.errors, sublet.notebook.cell_io as traffic
saved = traffic._saved
def cut(kernel, *rest):
    saved(kernel, *rest)
    traffic._saved = saved
    kernel.lease.release()
    raise sublet.errors.LeaseEnded("taken at the worst moment")
traffic._saved = cut
"""


def test_a_cell_that_is_ended_when_its_state_is_saved_and_its_results_are_not_taken_was_never_run(nb: Notebook) -> None:
    nb.run("count = 0")
    nb.run(LARGE + "import numpy as np\ndeep = np.zeros(1 << 18)")
    nb.run(CUT)
    with pytest.raises(CellExecutionError, match="GpuSessionEnded"):
        nb.run(LARGE + "deep += 1\ncount += 1\nmore = np.zeros(1 << 18)")
    assert text(nb.run("print(count, 'more' in dir())")) == "0 False\n"
    assert text(nb.run(LARGE + "deep += 1\ncount += 1\nprint(deep[0], count)")) == "1.0 1\n"


def test_a_cell_that_asked_for_a_checkpoint_is_gone_on_from(nb: Notebook, home: Path) -> None:
    nb.run("done, losses = 0, []")
    source = LARGE + (
        "import numpy as np\nimport sublet\nbig = np.zeros(1 << 18)\n"
        "for done in range(done, 3):\n    losses.append(done)\n    big += 1\n"
        "    sublet.current().checkpoint()\n"
    )
    with pytest.raises(CellExecutionError) as caught:
        nb.run(source + f"losses.append('not saved')\n{REVOKE.format(home=home)}\nimport time\ntime.sleep(60)")
    said = plain(caught.value)
    print(said)
    assert re.search(r"saved within this cell at \d\d:\d\d:\d\d: .*big, done, losses", said)
    assert text(nb.run("print(losses)")) == "[]\n"
    outputs = nb.run(LARGE + "print(done, losses, big[0])")
    print(status(outputs))
    assert text(outputs) == "2 [0, 1, 2] 3.0\n"
    assert re.search(r"restored .*losses.*within cell \d+", status(outputs))
    assert text(nb.run("print(done, losses)")) == "2 [0, 1, 2]\n"


def test_a_second_kernel_of_the_name_is_told_and_gets_its_own_copy(nb: Notebook, second: Notebook) -> None:
    """Of what the first one's last finished cell left, while the first goes on; what either does then is its own."""
    nb.run(LARGE + "import numpy as np\ndeep = np.full(1 << 18, 1.0)\nwide = np.full(1 << 18, 2.0)")
    nb.run("%gpu release")
    outputs = second.run("%%gpu --vram 64MiB\n1")
    said = r"another kernel has nb-story-\w{8} open, .* %gpu restore brings a copy of what that one saved at \d\d:\d\d"
    assert re.search(said, status(outputs))
    assert "goes with its kernel" not in text(second.run("%gpu name"))
    second.run(LARGE + "import numpy as np\nwide = np.full(1 << 18, 7.0)")  # saved before the copy comes, and stays
    said = text(second.run("%gpu restore"))
    assert re.search(
        r"restored .*deep.*newer in the notebook: .*wide.*copies, of what the kernel that has nb-story-", said
    )
    outputs = second.run(LARGE + "print(deep[0], wide[0])\ndeep += 40")
    assert text(outputs) == "1.0 7.0\n"
    second.run("%gpu release")
    assert text(nb.run(LARGE + "deep += 1\nprint(deep[0], wide[0])")) == "2.0 2.0\n"
    nb.run("%gpu release")
    second.run("del deep")
    assert "restored" in text(second.run("%gpu restore"))
    assert text(second.run(LARGE + "print(deep[0], wide[0])")) == "2.0 7.0\n"
    second.run("%gpu release")


def test_after_a_kernel_was_killed_a_new_one_is_told_and_restores_when_asked(
    nb: Notebook, second: Notebook, folder: Path, home: Path
) -> None:
    second.run("%gpu name lab-1")
    nb.run("%gpu release")
    second.run(LARGE + "import numpy as np\ndeep = np.full(1 << 18, 5.0)")
    second.run("import random, numpy as np\nrandom.seed(3), np.random.seed(3)\nrandom.random(), np.random.rand()")
    said = text(
        second.run("mine, own = 'saved', 1\nlock = __import__('threading').Lock()\nlock.acquire()\n%gpu checkpoint")
    )
    assert re.search(r"saved at \d\d:\d\d:\d\d as lab-1: .* written", said)
    assert "lock: cannot be saved (a thread lock that is held)" in said
    draws = "import random, numpy as np\nprint(random.random(), np.random.rand())"
    drawn = text(second.run(draws))
    os.kill(int(text(second.run("import os\nprint(os.getpid())"))), signal.SIGKILL)
    fresh = Notebook(folder)
    try:
        fresh.start()
        outputs = fresh.run("%gpu name lab-1\nown = 2") and fresh.run("%%gpu --vram 64MiB\nprint(own)")
        assert "deep, mine, own are saved from" in status(outputs)
        assert text(outputs) == "2\n"
        said = text(fresh.run("%gpu restore"))
        assert re.search(r"restored deep, mine \(saved .*newer in the notebook: own; random generators go on", said)
        assert text(fresh.run(draws)) == drawn
        assert text(fresh.run("print(mine, own, deep)")).startswith("saved 2 <deep: ndarray")
        assert text(fresh.run(LARGE + "print(deep[0])")) == "5.0\n"
        fresh.run("%gpu release")
    finally:
        fresh.stop()


def test_a_volume_that_is_too_small_is_an_error_and_the_results_are_there(nb: Notebook, second: Notebook) -> None:
    nb.run("%gpu release")
    second.run("%gpu name small-1 32MiB")
    with pytest.raises(CellExecutionError) as caught:
        second.run(LARGE + "import numpy as np\nnoise = np.random.default_rng(1).bytes(64 << 20)\nfine = 1")
    said = plain(caught.value)
    assert re.search(r"CheckpointFailed: the checkpoint needs up to 64.*MiB, and there is room for [23]", said)
    assert re.search(r"%gpu name X 1(44|60)MiB", said)
    assert "NOT SAVED" in status(second.nb.cells[-1].outputs)
    assert text(second.run("print(fine, len(noise.fetch()))")) == f"1 {64 << 20}\n"
    assert "to be recomputed" in text(second.run("%gpu report"))
    with pytest.raises(CellExecutionError, match="noise is saved under the present name"):
        second.run("%gpu name other-1")
    second.run("del noise")
    assert "noise" not in status(second.run(LARGE + "deep = np.zeros(1 << 18)"))
    makes = "deep = np.frombuffer(np.random.default_rng(%d).bytes(9 << 20), np.uint8)"
    lines = [status(second.run(LARGE + makes % n)) for n in range(5)]  # as much anew each time, and three are 27MiB
    assert sum("fewer older checkpoints of it are kept" in one for one in lines) == 1
    second.run("%gpu release")
    assert text(second.run("import numpy as np\nprint((deep.fetch() == " + makes[7:] % 4 + ").all())")) == "True\n"


def test_words_tell_what_was_meant(nb: Notebook) -> None:
    nb.run(LARGE + "import numpy as np\ndeep = np.zeros(1 << 18)")
    with pytest.raises(CellExecutionError, match="did you mean %gpu release"):
        nb.run("%gpu relase")
    [failed] = [one for one in nb.nb.cells[-1].outputs if one.output_type == "error"]
    assert "did you mean %gpu release? The commands:" in failed.evalue
    with pytest.raises(CellExecutionError, match="did you mean deep"):
        nb.run("%gpu fetch dep")
    assert "%gpu checkpoint" in text(nb.run("%gpu help"))
    typed = "get_ipython().Completer.complete(line_buffer='%gpu fetch de', cursor_pos=13)[1]"
    assert text(nb.run(f"print({typed})")) == "['deep']\n"
