"""``%%gpu`` in a real kernel: nbclient runs notebooks, as a person or a job would."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from tests.notebook.kernel_sockets import KernelSockets

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("home")
    ensure_office(made, words=("up", "--host-gpus", "1x2GiB", "--foreground"))
    yield made
    with sublet.connect(home=made) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(made.resolve()), ignore_errors=True)


TAKE = """
import os, sublet, sys, time
while not os.path.exists(sys.argv[3]):
    time.sleep(0.02)
with sublet.connect(home=sys.argv[1]) as fabric:
    fabric.request("POST", f"/v1/leases/{sys.argv[2]}/revoke", {}, shape=dict)
"""


class Notebook:
    """Cells that are run one after the other in one kernel."""

    def __init__(self, folder: Path) -> None:
        self.nb: Any = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
        self.client = NotebookClient(
            self.nb,
            timeout=120,
            startup_timeout=120,
            iopub_timeout=120,  # outputs that come four seconds after the reply would be left out
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        )
        self.client.km = self.client.create_kernel_manager()
        self._sockets = KernelSockets()
        self._sockets.use_for(self.client.km)

        self._loop = asyncio.new_event_loop()  # ours to close; nbclient's own stay open

    def start(self) -> None:
        self._await(self.client.async_start_new_kernel())
        self._await(self.client.async_start_new_kernel_client())
        self.run("%load_ext sublet")

    def run(self, source: str) -> list[dict[str, Any]]:
        cell: Any = nbformat.v4.new_code_cell(source)  # type: ignore[no-untyped-call]
        self.nb.cells.append(cell)
        self._await(self.client.async_execute_cell(cell, len(self.nb.cells) - 1))
        return [dict(one) for one in cell.outputs]

    def stop(self) -> None:
        self._await(self.client._async_cleanup_kernel())
        self._sockets.remove()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _await(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)


@pytest.fixture(scope="module")
def nb(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    before = os.environ.get("SUBLET_HOME")
    os.environ["SUBLET_HOME"] = str(home)
    made = Notebook(tmp_path_factory.mktemp("folder"))
    try:
        made.start()
        yield made
    finally:
        made.stop()
        if before is None:
            del os.environ["SUBLET_HOME"]
        else:
            os.environ["SUBLET_HOME"] = before


def text(outputs: list[dict[str, Any]], *streams: str) -> str:
    """Of these streams, or of all: a text may come in several messages."""
    said = [one for one in outputs if one["output_type"] == "stream"]
    return "".join(one.get("text", "") for one in said if not streams or one["name"] in streams)


def status(outputs: list[dict[str, Any]]) -> str:
    return "\n".join(
        one["data"]["text/plain"]
        for one in outputs
        if one["output_type"] == "display_data" and "sublet" in one["data"]["text/plain"]
    )


def test_a_cell_runs_on_a_device_with_the_notebooks_variables(nb: Notebook) -> None:
    nb.run("import numpy as np\nx = np.arange(6)\ndef double(a):\n    return a * factor\nfactor = 2")
    outputs = nb.run(
        "%%gpu --vram 64MiB --ttl 30s\nimport os\nwhere = os.environ['SUBLET_DEVICES']\n"
        "y = double(x)\nprint('sum', y.sum())"
    )
    assert text(outputs) == "sum 30\n"
    assert re.search(r"host device, no GPU\) · [\d.]+m?s", status(outputs))
    assert text(nb.run("print(where.endswith('gpu0'), y[-1], y.sum())")) == "True 10 30\n"


def test_what_is_gone_here_is_gone_there_and_a_large_array_is_as_it_is_here(nb: Notebook) -> None:
    """Whoever wrote to it, and however the cell comes to read it."""
    nb.run("import numpy as np\nbig = np.zeros(1 << 21)\nother = 1\ndef first():\n    return big[0]")
    assert text(nb.run("%%gpu\nprint(big[7], other)")) == "0.0 1\n"
    assert text(nb.run("%%gpu\nprint(big[7])")) == "0.0\n"
    nb.run("big[7] = 1.0\nmemoryview(big)[0] = 5.0")
    assert text(nb.run("%%gpu\nprint(big[7], first())")) == "1.0 5.0\n"
    nb.run("np.add(big, 1.0, out=big)\ndel other")
    assert text(nb.run("%%gpu\nbig[1] = 9.0\nprint(first(), 'other' in globals())")) == "6.0 False\n"
    assert text(nb.run("print(big[0], big[1])")) == "6.0 9.0\n"


def test_a_transfer_that_takes_long_names_the_variable(nb: Notebook, tmp_path: Path) -> None:
    """Each of the two takes until its line is there."""
    nb.run(
        "from sublet.notebook.output import StatusLine\nlines, publish = [], StatusLine._publish\n"
        "def noted(*what, **more):\n    lines.append(what[2])\n"
        "    for word in ('sending', 'receiving'):\n"
        f"        if word + ' slow' in what[2]: open({str(tmp_path)!r} + '/' + word, 'w').close()\n"
        "    return publish(*what, **more)\n"
        "StatusLine._publish = noted\n"
        "class Slow:\n    def __setstate__(self, state):\n        import os, time\n"
        f"        word, until = ('', 'sending', 'receiving')[state['n']], time.monotonic() + {PATIENCE_S}\n"
        f"        while not os.path.exists({str(tmp_path)!r} + '/' + word) and time.monotonic() < until:\n"
        "            time.sleep(0.01)\n"
        "        self.__dict__ |= state\n"
        "slow = Slow()\nslow.n = 1"
    )
    nb.run("%%gpu\nslow.n += 1")
    shown = text(nb.run("StatusLine._publish = publish\nprint(slow.n, *lines, sep='\\n')\ndel slow, Slow, noted"))
    assert shown.startswith("2\n")
    assert re.search(r"· sending slow \(Slow, [\d.]+(Ki)?B\)", shown)
    assert re.search(r"· receiving slow \(Slow, [\d.]+(Ki)?B\)", shown)


def test_output_is_what_it_would_have_been(nb: Notebook) -> None:
    outputs = nb.run(
        "%%gpu\nimport sys\nfrom IPython.display import display, HTML\nprint('out')\nprint('err', file=sys.stderr)\n"
        "display(HTML('<b>bold</b>'))\n%matplotlib inline\nimport matplotlib.pyplot as plt\n"
        "plt.plot([1, 2]); plt.show()\n42"
    )
    streams = {name: text(outputs, name) for name in ("stdout", "stderr")}
    assert streams == {"stdout": "out\n", "stderr": "err\n"}
    shown = [one["data"] for one in outputs if one["output_type"] == "display_data"]
    assert any(one.get("text/html") == "<b>bold</b>" for one in shown)
    assert any("image/png" in one for one in shown)
    [result] = [one for one in outputs if one["output_type"] == "execute_result"]
    assert result["data"]["text/plain"] == "42"
    assert result["execution_count"] == nb.nb.cells[-1].execution_count


def test_an_error_points_at_the_cells_own_lines_and_brings_its_changes_back(nb: Notebook) -> None:
    nb.run("items = []")
    with pytest.raises(CellExecutionError) as caught:
        nb.run("%%gpu\nitems.append(1)\nraise ValueError('as it was')")
    assert "ValueError" in str(caught.value)
    said = re.sub(r"\x1b\[[\d;]*m", "", str(caught.value))
    assert "----> 3 raise ValueError('as it was')" in said
    number = nb.nb.cells[-1].execution_count
    assert f"Cell In[{number}], line 3" in said
    assert text(nb.run("print(items)")) == "[1]\n"


def test_a_cell_with_a_syntax_error_takes_no_lease(nb: Notebook) -> None:
    nb.run("%gpu release")
    with pytest.raises(CellExecutionError, match="SyntaxError") as caught:
        nb.run("%%gpu\ny = 0\nx = = 1")
    said = str(caught.value)
    assert re.search(r"the cell.*line 3\n +x = = 1\n +\^+\nSyntaxError: invalid syntax", said), said
    assert "sublet/notebook" not in said
    assert text(nb.run("%gpu")) == "no lease is held\n"


def test_a_cell_is_in_the_notebooks_folder_and_environment_as_they_are_now(nb: Notebook, tmp_path: Path) -> None:
    looks = "%%gpu --vram 64MiB\nimport os; print(os.getcwd(), os.environ.get('SAID_LATER'))"
    nb.run(looks)
    nb.run(f"import os; was = os.getcwd(); os.chdir({str(tmp_path)!r}); os.environ['SAID_LATER'] = 'yes'")
    assert text(nb.run(looks)) == f"{tmp_path} yes\n"
    nb.run("%%gpu\nos.chdir('/'); os.environ['SAID_LATER'] = 'there'")
    assert text(nb.run(looks)) == "/ there\n"
    assert text(nb.run("print(os.getcwd(), os.environ['SAID_LATER'])")) == "/ there\n"
    nb.run("os.chdir(was); del os.environ['SAID_LATER']")
    assert text(nb.run(looks)).endswith(" None\n")


def test_numbers_and_settings_are_those_of_one_process(nb: Notebook) -> None:
    """Also of libraries that are imported later on one side, and of cells that fail or wait."""
    np: Any = pytest.importorskip("numpy")
    chance = np.random.RandomState(5)
    nb.run("import random; random.seed(1); import decimal; decimal.getcontext().prec = 4")
    expected = random.Random(1)
    assert text(nb.run("%%gpu --vram 64MiB\nprint(random.random())")) == f"{expected.random()}\n"
    assert text(nb.run("print(random.random())")) == f"{expected.random()}\n"
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        nb.run("%%gpu\nimport numpy as np\nnp.random.seed(5); np.random.rand(); random.random()\n1/0")
    expected.random()
    chance.rand()
    assert text(nb.run("import numpy as np\nprint(np.random.rand(), random.random())")) == (
        f"{chance.rand()} {expected.random()}\n"
    )
    nb.run("np.seterr(all='raise'); np.set_printoptions(precision=2); get_ipython().ast_node_interactivity = 'all'")
    outputs = nb.run("%%gpu\n1\nprint(np.geterr()['over'], np.random.rand(1), decimal.Decimal(1) / 3)\n2")
    assert text(outputs) == f"raise [{chance.rand():.2f}] 0.3333\n"
    assert [one["data"]["text/plain"] for one in outputs if one["output_type"] == "execute_result"] == ["1", "2"]
    nb.run(
        "%%gpu\nimport asyncio; await asyncio.sleep(0)\n"
        "np.seterr(all='ignore'); get_ipython().ast_node_interactivity = 'last_expr'"
    )
    ways = "np.geterr()['over'], get_ipython().ast_node_interactivity"
    plain = "raise last_expr\n"  # a cell with await has a context of its own, also in a plain kernel
    assert text(nb.run(f"print(*({ways}))")) == plain
    assert text(nb.run(f"%%gpu\nprint(*({ways}))")) == plain
    nb.run("np.seterr(all='warn')")
    assert text(nb.run("%%gpu\nprint(np.geterr()['over']); decimal.getcontext().prec = 9")) == "warn\n"
    assert text(nb.run("print(decimal.Decimal(1) / 3)")) == "0.333333333\n"


def test_a_module_of_the_notebooks_own_folder_is_imported_on_the_device(nb: Notebook, tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text("class Thing:\n    size = 3\n")
    nb.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import own_module; thing = own_module.Thing()")
    assert text(nb.run("%%gpu\nprint(thing.size, own_module.Thing.size)")) == "3 3\n"
    nb.run(f"sys.path.remove({str(tmp_path)!r})")
    assert text(nb.run(f"%%gpu\nimport sys; print({str(tmp_path)!r} in sys.path)")) == "False\n"
    nb.run("%gpu release\nother = own_module.Thing()")
    with pytest.raises(CellExecutionError, match=r"cannot import own_module.*--with FOLDER"):
        nb.run("%%gpu\nother")


def test_a_library_function_that_the_notebook_replaced_is_named(nb: Notebook) -> None:
    nb.run("import textwrap; before = textwrap.dedent\ndef mine(text):\n    return 'mine'\ntextwrap.dedent = mine")
    outputs = nb.run("%%gpu\nprint(textwrap.dedent(' a'))")
    assert text(outputs) == "a\n"
    assert "textwrap.dedent was set in the notebook (mine of the notebook)" in status(outputs)
    assert "textwrap" not in status(nb.run("%%gpu\n1"))
    nb.run("textwrap.dedent = before")


def test_a_bad_option_says_which_was_meant(nb: Notebook) -> None:
    with pytest.raises(CellExecutionError, match="did you mean --vram"):
        nb.run("%%gpu --vrma 1GiB\n1")


def test_a_lease_that_is_lost_is_news_and_the_next_cell_goes_on(nb: Notebook, home: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    nb.run("%gpu release\nstate = [1]")
    nb.run("%%gpu --vram 64MiB\nstate.append(2)\nkept = (n for n in range(9))")
    assert "stays on the device" in text(nb.run("print(kept)"))
    with sublet.connect(home=home) as fabric:
        [lease] = [one.id for one in fabric.leases() if any(part.kind == "gpu" for part in one.parts)]
        taking = subprocess.Popen([sys.executable, "-c", TAKE, str(home), lease, str(begun)])
    says = f"open({str(begun)!r}, 'w').close()"
    try:
        with pytest.raises(CellExecutionError) as caught:
            nb.run(f"%%gpu --vram 64MiB\nimport time\nstate.append(99)\n{says}\ntime.sleep(60)")
    finally:
        begun.touch()
        taking.wait(PATIENCE_S)
    said = re.sub(r"\x1b\[[\d;]*m", "", str(caught.value))
    assert "GpuSessionEnded" in said
    assert "Rerun this cell to reacquire" in said
    assert "was lost with its lease" in text(nb.run("print(kept)"))
    assert text(nb.run("%%gpu --vram 64MiB\nstate.append(3)\nprint(state)")) == "[1, 2, 3]\n"
    with pytest.raises(CellExecutionError, match="Rerun the cell that made kept"):
        nb.run("%%gpu\nnext(kept)")


def test_what_cannot_travel_is_named_and_the_cell_does_not_run(nb: Notebook) -> None:
    nb.run("import threading\nlock = threading.Lock()\nlock.acquire()")
    with pytest.raises(CellExecutionError, match="a thread lock"):
        nb.run("%%gpu\nran = True\nwith lock:\n    pass")
    assert "lock: cannot be sent (a thread lock that is held)" in text(nb.run("%gpu explain x, lock"))
    with pytest.raises(CellExecutionError, match="NameError"):
        nb.run("print(ran)")


def test_who_cannot_be_asked_is_no_reason_to_wait(nb: Notebook) -> None:
    """nbclient has nobody who types; the cell hears of that as it would in its own kernel."""
    with pytest.raises(CellExecutionError, match="does not support input requests"):
        nb.run("%%gpu\ninput('who? ')")
    assert text(nb.run("%%gpu\nprint('next')")) == "next\n"


def said_beside(outputs: list[dict[str, Any]]) -> str:
    """Every line of Sublet's below a cell."""
    return "\n".join(one["data"].get("text/plain", "") for one in outputs if "data" in one)


WAITS = """
import threading
may_end = threading.Event()
seen = []
def work():
    while not may_end.wait(0.01):
        seen.append(1)
worker = threading.Thread(target=work)
worker.start()
"""


def test_what_a_thread_of_the_notebook_changes_is_said_to_be_a_copy(nb: Notebook) -> None:
    """Once, for as long as it runs."""
    nb.run(WAITS)
    try:
        assert "seen: in use by a running thread of the notebook; the cell has a copy" in said_beside(
            nb.run("%%gpu\nlen(seen)")
        )
        assert "of the notebook; the cell has a copy" not in said_beside(nb.run("%%gpu\nlen(seen)"))
    finally:
        nb.run("may_end.set(); worker.join()")
    assert "of the notebook; the cell has a copy" not in said_beside(nb.run("%%gpu\nlen(seen)"))


def test_what_a_cell_sets_in_a_library_is_said_not_to_hold_in_the_notebook(nb: Notebook) -> None:
    said = said_beside(nb.run("%%gpu\nimport textwrap\ntextwrap.dedent = lambda text: 'patched'"))
    assert "textwrap.dedent was set on the device; that does not hold in the notebook" in said
    assert text(nb.run("import textwrap\nprint(textwrap.dedent('x'))")) == "x\n"


def test_an_accessor_of_pandas_and_what_it_reads_are_there_when_a_cell_uses_it(nb: Notebook) -> None:
    """Neither the class nor what its methods read stands in the text of the cell."""
    nb.run(
        "import pandas as pd\nframe = pd.DataFrame({'v': [1, 2]})\nfactor = 10\ndef use(data): return data.geo.total()"
    )
    nb.run(
        "@pd.api.extensions.register_dataframe_accessor('geo')\nclass Geo:\n"
        "    def __init__(self, data): self.data = data\n    def total(self): return int(self.data.v.sum()) * factor"
    )
    assert text(nb.run("%%gpu\nprint(frame.geo.total())")) == "30\n"
    nb.run("factor = 20")
    assert text(nb.run("%%gpu\nprint(use(frame))")) == "60\n"
    nb.run(
        "%%gpu\n@pd.api.extensions.register_series_accessor('half')\nclass Half:\n"
        "    def __init__(self, data): self.data = data"
    )
    assert text(nb.run("print(type(frame.v.half).__name__)")) == "Half\n"


def test_what_should_come_back_and_is_nowhere_is_told(nb: Notebook) -> None:
    assert "no nobody came back" in status(nb.run("%%gpu --out nobody\n1"))


def test_the_bill_adds_up(nb: Notebook) -> None:
    nb.run("%%gpu\n1")
    assert re.search(r"lease .* busy .* VRAM ", text(nb.run("%gpu bill")))


def test_a_figure_made_in_a_plain_cell_is_an_image_in_a_leased_one(nb: Notebook) -> None:
    def images(cell: str) -> list[list[str]]:
        data = [one.get("data", {}) for one in nb.run(cell)]
        return [sorted(one) for one in data if "<Figure" in one.get("text/plain", "")]

    nb.run("%matplotlib inline\nimport matplotlib.pyplot as plt")
    nb.run("fig, ax = plt.subplots(figsize=(1, 1))\nplt.close(fig)")
    assert images("%%gpu\nfig") == images("%%gpu\ndisplay(fig)") == images("fig") == [["image/png", "text/plain"]]
    nb.run("%config InlineBackend.figure_formats = ['svg']")
    assert images("%%gpu\nfig") == images("fig") == [["image/svg+xml", "text/plain"]]
    nb.run("%config InlineBackend.figure_formats = ['png']")


LOOKUP = """
import sys
def find(name):
    return getattr(sys.modules["__" + "main" + "__"], name)
def dumped(function):
    import pickle
    return pickle.dumps(function)
"""


def test_a_name_that_a_library_looks_up_while_the_cell_runs(nb: Notebook) -> None:
    """No text names it: it is fetched with all that it needs, and what the cell changes comes back."""
    folder = Path(nb.client.resources["metadata"]["path"])
    (folder / "looking.py").write_text(LOOKUP)
    nb.run("import looking, pickle\nbase = 40\nheld = [1]\nboth = {'held': held, 'n': 1}")
    nb.run("def deep(x):\n    return x + base\nclass Kind:\n    factor = 3\ndata = pickle.dumps(deep)")
    nb.run("number = 1\ngen = (n for n in 'ab')\nname = 'number'")
    assert text(nb.run("%%gpu\nprint(looking.find(name), name)")) == "1 number\n"
    nb.run("number = 2")
    assert text(nb.run("%%gpu\nprint(looking.find(name), looking.find(name))")) == "2 2\n"
    # a function by name, with the global name that it reads; another cell's value of that is the present one
    assert text(nb.run("%%gpu\nread = pickle.load\nimport io\nprint(getattr(pickle, 'lo' + 'ads')(data)(2))")) == "42\n"
    # what the cell has bound or changed itself is newer than the notebook's
    assert text(nb.run("%%gpu\nbase = 1\nprint(looking.find('de' + 'ep')(2))")) == "3\n"
    nb.run("%%gpu\nheld.append(2)\nit = looking.find('bo' + 'th')\nit['n'] = 5\nsaid = it['held'] is held, it\ndel it")
    out = nb.run("print(*said)")
    assert text(out) == "True {'held': [1, 2], 'n': 5}\n"
    assert text(nb.run("print(both, both['held'] is held, base)")) == "{'held': [1, 2], 'n': 5} True 1\n"
    assert text(nb.run("%%gpu\nprint(looking.find('K' + 'ind')().factor)")) == "3\n"
    # names that are not there, cannot be sent, or were removed by the cell
    say = "try:\n    looking.find({})\nexcept AttributeError as error:\n    print(error)"
    assert text(nb.run("%%gpu\n" + say.format("'nowh' + 'ere'"))).endswith("has no attribute 'nowhere'\n")
    assert "a generator" in text(nb.run("%%gpu\n" + say.format("'g' + 'en'")))
    assert text(nb.run("%%gpu\ndel number\n" + say.format("name"))).endswith("has no attribute 'number'\n")
    nb.run("%%gpu\nkind = type(looking.sys.modules['__main__']).__name__\nimport __main__ as me")
    assert text(nb.run("print(kind, type(me).__name__)")) == "_Main module\n"


def test_a_name_looked_up_in_a_dict_gets_a_note(nb: Notebook) -> None:
    nb.run("import sys\nwanted = 3")
    with pytest.raises(CellExecutionError, match="wanted is defined in the notebook but this cell does not name it"):
        nb.run("%%gpu\nsys.modules['__ma' + 'in__'].__dict__['wan' + 'ted']")


def test_figures_are_interactive_or_not_on_both_sides(nb: Notebook) -> None:
    nb.run("%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.ioff()")
    drawn = nb.run("%%gpu\nfig = plt.figure(figsize=(1, 1))\nfig.add_subplot()\nprint(plt.isinteractive())")
    assert "False" in text(drawn)
    assert not any("image/png" in one.get("data", {}) for one in drawn)
    nb.run("%%gpu\nplt.ion()")
    assert text(nb.run("print(plt.isinteractive())\nplt.close('all')")) == "True\n"


def test_hints_below_plain_cells(nb: Notebook) -> None:
    said = status(nb.run("!nvidia-smi"))
    assert said.startswith("sublet: nvidia-smi ran beside the notebook, which has no lease")
    assert "%%gpu" in said
    assert status(nb.run("print('nvidia-smi')")) == ""
    assert "which has no lease" not in status(nb.run("%%gpu\n!nvidia-smi"))
