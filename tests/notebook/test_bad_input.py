"""Bad input of every sort: each is told in words that help, and the next cell is right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.office_stage import OfficeStage
from tests.notebook.shell_stage import Shell, shell_on, stage_on, wait_for
from tests.traces import until

GPU = "%%gpu --vram 64MiB --ttl 60s\n"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfficeStage]:
    with stage_on(tmp_path_factory.mktemp("office")) as stage:
        yield stage


@pytest.fixture(scope="module")
def shell(stage: OfficeStage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with shell_on(stage, tmp_path_factory.mktemp("folder")) as shell:
        yield shell


def assert_next_is_right(shell: Shell) -> None:
    shell.run("n_ = [1]")
    answer = shell.run(GPU + "n_.append(2)\nprint(sum(n_))")
    assert (answer["error"], answer["out"]) == ("", "3\n"), answer
    assert shell.value("n_") == [1, 2]


@pytest.mark.parametrize(
    ("cell", "error", "says"),
    [
        ("%%gpu --vrma 1GiB\n1", "InvalidRequest", "did you mean --vram?"),
        ("%%gpu --tier sopt\n1", "InvalidRequest", "did you mean spot?"),
        ("%%gpu --vram\n1", "InvalidRequest", "--vram needs a value"),
        ("%%gpu\nx = = 1", "SyntaxError", ""),
        ("%%gpu\nreturn 5", "SyntaxError", ""),
        ("%%gpu --vram 64GiB\n1", "CapacityExceeded", "Free now: local/gpu0 "),
        ("%%gpu --gpus 3 --vram 64MiB\n1", "CapacityExceeded", ""),
        ("%%gpu --python /nowhere/python\n1", "", "/nowhere/python"),
        ("%%gpu --in nobody\n1", "", "nobody"),
    ],
)
def test_what_is_wrong_is_said_before_a_lease_is_taken(shell: Shell, cell: str, error: str, says: str) -> None:
    shell.run("%gpu release")
    answer = shell.run(cell)
    assert answer["error"], answer
    if error:
        assert answer["error"] == error, answer
    assert says in answer["said"], answer
    if error:
        assert "no lease is held" in shell.run("%gpu")["out"]


def test_after_all_that_the_next_cell_is_right(shell: Shell) -> None:
    assert_next_is_right(shell)


def test_an_interpreter_without_ipykernel_says_what_it_lacks(shell: Shell, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    answer = shell.run(f"%%gpu --vram 64MiB --python {bare}\n1")
    assert answer["error"] == "InvalidRequest", answer
    assert answer["said"] == f"{bare} has no ipykernel. Install it there: {bare} -m pip install ipykernel"
    assert answer["out"].count("ipykernel") == 2, "said once: in the sentence and in the command"
    assert "ipykernel" not in answer["err"]
    assert_next_is_right(shell)


def test_a_module_that_the_guest_has_not_is_named(shell: Shell, tmp_path: Path) -> None:
    assert_next_is_right(shell)  # a guest that is new would look where the notebook looks
    (tmp_path / "only_here_.py").write_text("class Thing:\n    pass\n")
    shell.run(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport only_here_\nthing = only_here_.Thing()\nok_ = [0]\n"
        f"sys.path.remove({str(tmp_path)!r})"  # what stays in it crosses
    )
    answer = shell.run(GPU + "ok_.append(1)\nthing")
    assert "thing" in answer["said"], answer
    assert "only_here_" in answer["said"]
    assert shell.value("ok_") == [0]
    assert shell.run(GPU + "ok_.append(1)")["error"] == ""
    assert shell.value("ok_") == [0, 1]
    shell.run("%gpu release")
    assert not shell.run(f"%%gpu --vram 64MiB --with {tmp_path}\nkind = type(thing).__name__")["error"]
    assert shell.value("kind") == "Thing"
    shell.run("%gpu release")


def test_a_folder_to_import_from_that_is_not_there_is_told_by_a_new_kernel_and_by_one_that_runs(shell: Shell) -> None:
    shell.run("%gpu release")
    for _ in range(2):
        answer = shell.run("%%gpu --vram 64MiB --with /nowhere_\n1")
        assert (answer["error"], "--with /nowhere_: there is no such" in answer["said"]) == ("InvalidRequest", True)
    assert_next_is_right(shell)
    assert shell.run("%%gpu --with /nowhere_\n1")["error"] == "InvalidRequest"
    assert not shell.run(f"%%gpu --with {sys.prefix}\nimport sys; assert sys.path[0] == {sys.prefix!r}")["error"]


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the cell's process ended by SIGKILL"),
        ("kept_ = iter([1]); import os; os._exit(3)", "ended with exit code 3 in the middle of the cell"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    ],
    ids=["SIGKILL", "_exit", "SIGSEGV"],
)
def test_a_cell_that_ends_its_own_process(shell: Shell, last: str, says: str) -> None:
    """Its changes are lost with it, that is said, and the next cell has a process of its own."""
    shell.run("gone_ = []")
    answer = shell.run(f"{GPU}gone_.append(1)\n{last}")
    assert answer["error"], answer
    assert says in answer["said"], answer
    assert shell.value("gone_") == []
    assert_next_is_right(shell)


@pytest.mark.parametrize("last", ["import sys; sys.exit(3)", "raise SystemExit", "raise KeyboardInterrupt"])
def test_a_cell_that_wants_to_leave_only_ends(shell: Shell, last: str) -> None:
    shell.run("left_ = []")
    shell.run(f"{GPU}left_.append(1)\n{last}")
    assert shell.value("left_") == [1]
    assert_next_is_right(shell)


def test_a_cell_that_forks(shell: Shell) -> None:
    cell = "import os\nchild = os.fork()\nif not child:\n    forked_.append(2)\n    os._exit(0)\n"
    cell += "os.waitpid(child, 0)\nforked_.append(1)"
    shell.run("forked_ = []")
    assert not shell.run(GPU + cell)["error"]
    assert shell.value("forked_") == [1]
    assert_next_is_right(shell)


def test_a_cell_whose_child_goes_on_as_if_it_were_the_cell(shell: Shell) -> None:
    shell.run("twice_ = []")
    cell = "import os\nchild_ = os.fork()\ntwice_.append(1)\nif not child_: import sys; sys.exit(5)"
    shell.run(GPU + cell)
    assert shell.value("twice_") == [1]
    answer = shell.run(GPU + "import os\nprint(os.waitstatus_to_exitcode(os.waitpid(child_, 0)[1]))")
    assert answer["out"] == "5\n", answer
    assert_next_is_right(shell)


def test_a_cell_whose_child_waits_as_if_it_were_the_cell(shell: Shell) -> None:
    """What wakes the kernel's loop does not wake the child's instead."""
    shell.run("many_ = []")
    cell = "import asyncio, os\nfor n_ in range(5):\n    many_.append(os.fork())\n    await asyncio.sleep(0)"
    assert not shell.run(GPU + cell)["error"]
    assert len(shell.value("many_")) == 5
    assert not shell.run(GPU + "import os\nfor one_ in many_: os.waitpid(one_, 0)")["error"]
    assert_next_is_right(shell)


def test_a_cell_that_starts_processes_and_threads(shell: Shell) -> None:
    cell = (
        "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as pool:\n    found_ = pool.map(abs, [-1, -2])"
    )
    answer = shell.run(GPU + cell)
    assert not answer["error"], answer
    assert shell.value("found_") == [1, 2]
    assert_next_is_right(shell)


def test_a_cell_that_has_no_room_on_the_disk(shell: Shell) -> None:
    answer = shell.run(GPU + "with open('/dev/full', 'w') as file:\n    file.write('x' * 1_000_000)")
    assert answer["error"] == "OSError"
    assert "No space left" in answer["said"]
    assert_next_is_right(shell)


def test_a_cell_that_takes_the_shell_apart(shell: Shell) -> None:
    """It has a whole interpreter, and may break it; only the next process is as it should be."""
    shell.run(GPU + "import sys\nsys.stdout.close()\nsys.modules.pop('numpy', None)\nsys.path.clear()")
    shell.run("%gpu release")
    assert_next_is_right(shell)


def test_an_office_that_goes_away_in_mid_cell(stage: OfficeStage, shell: Shell, tmp_path: Path) -> None:
    """The cell needs no office to go on; the next one finds the new office."""
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    shell.run("kept_ = []")
    shell.ask(
        GPU + f"import os, pathlib, time\npathlib.Path({str(begun)!r}).touch()\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\nkept_.append(1)"
    )
    wait_for(begun)
    stage.kill_office()
    gate.touch()
    answer = shell.answer()
    assert not answer["error"], answer
    assert shell.value("kept_") == [1]
    until("an office, ours or one that the notebook started", lambda: stage.find_office() or stage.office.start())
    assert_next_is_right(shell)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"SUBLET_URL": "http://127.0.0.1:9", "SUBLET_TOKEN": "t"}, "127.0.0.1:9"),
        ({"SUBLET_HOME": "/dev/null/home"}, "/dev/null"),
    ],
    ids=["nobody answers", "no place for an office"],
)
def test_no_office_and_none_can_be_started(
    stage: OfficeStage, tmp_path: Path, settings: dict[str, str], says: str
) -> None:
    with shell_on(stage, tmp_path / "folder", **settings) as alone:
        answer = alone.run("x = 1")
        assert not answer["error"]
        answer = alone.run("%%gpu\nx = 2")
        assert answer["error"], answer
        assert says in answer["said"] + answer["out"] + answer["err"], answer
        assert alone.value("x") == 1


def test_a_wrong_token(stage: OfficeStage, tmp_path: Path) -> None:
    with shell_on(stage, tmp_path / "folder", SUBLET_TOKEN="nobody's") as alone:
        answer = alone.run("%%gpu --vram 64MiB\n1")
        assert answer["error"] in ("Unauthorized", "InvalidRequest"), answer
        assert "token" in answer["said"]


def test_results_of_cells_are_where_the_shell_keeps_them(shell: Shell) -> None:
    """``_`` and ``Out`` are those of the notebook, here and there; what is not kept says so, and is nothing older."""
    shell.run("[40, 2]")
    assert shell.run(GPU + "print(sum(_), sum(Out[max(Out)]))")["out"] == "42 42\n"
    assert shell.run(GPU + "6 * 7")["error"] == ""
    assert shell.run("print(_, Out[max(Out)])")["out"] == "42 42\n"
    assert shell.run(GPU + "(n for n in [1])")["error"] == ""
    assert "stayed on the device and was not kept" in shell.run("print(_)")["out"]
    for cell in ("'one'", "'two'", GPU + "'three'", GPU + "_ + '!'", "'five'"):
        shell.run(cell)
    assert shell.run(GPU + "print(_, __, ___)")["out"] == "five three! three\n"
    assert shell.run("print(_, __, ___)")["out"] == "five three! three\n"


def test_a_cell_that_can_use_any_name_runs_without_those_that_cannot_be_sent(shell: Shell) -> None:
    """They are named each time; a name in its text keeps it from running."""
    shell.run("import sys, types; absent = sys.modules['absent_'] = types.ModuleType('absent_')")
    shell.run("import threading; lock, other = threading.Lock(), 'sent'; _ = lock.acquire(); ip = get_ipython()")
    answer = shell.run(GPU + "print(globals()['other'], 'lock' in globals(), ip is get_ipython())")
    assert answer["out"] == "sent False True\n", answer
    assert "cannot be sent to the device: absent (ModuleNotFoundError" in answer["err"]
    assert "lock (a thread lock that is held)" in answer["err"]
    assert shell.run(GPU + "eval('lo' + 'ck')")["error"] == "NameError"
    assert shell.run(GPU + "globals(), lock")["error"] == "Unpicklable"
    assert shell.run(GPU + "here = get_ipython()")["error"] == ""
    assert shell.run("print(here is get_ipython())")["out"] == "True\n"
    assert "cannot be sent" not in shell.run(GPU + "eval('other')")["err"]
    shell.run("del lock, ip, here, absent, sys.modules['absent_']")


def test_magics_about_the_notebooks_shell_are_asked_there(shell: Shell) -> None:
    """The device has no history, and only some of the names."""
    shell.run(GPU + "gone_, kept_ = [1], 2")
    assert "gone_, kept_ = [1], 2" in shell.run(GPU + "%history -l 3")["out"]
    assert shell.run(GPU + "# a comment\n%xdel gone_")["error"] == ""
    assert shell.run(GPU + "gone_")["error"] == "NameError"
    assert shell.run(GPU + "%reset -f")["error"] == ""
    assert shell.run("kept_")["error"] == "NameError"
    assert shell.run(GPU + "kept_")["error"] == "NameError"
    assert shell.run("print(Out)")["out"] == "{}\n"
    assert_next_is_right(shell)


def test_a_result_does_not_take_a_name_that_a_cell_has_bound(shell: Shell) -> None:
    shell.run(GPU + "for _ in range(3): pass")
    assert shell.run("print(_)")["out"] == "2\n"
    shell.run(GPU + "'not in _'")
    assert shell.run("print(_, Out[max(Out)])")["out"] == "2 not in _\n"
    shell.run("del _; del __; del ___")
    shell.run(GPU + "'in _'")
    assert shell.run(GPU + "print(_)")["out"] == "in _\n"
    shell.run(GPU + "_ = (n for n in [1])")
    assert "stayed on the device and was not kept" in shell.run("print(_)")["out"]
    shell.run("del _")


def test_a_result_that_is_the_same_object_as_the_last_one_is_kept_again(shell: Shell) -> None:
    """The guest's shell may number it as the last, and then nothing seems to have been bound."""
    shell.run(GPU + "same_ = [1]\nsame_")
    shell.run(GPU + "same_.append(2)\nsame_")
    assert shell.run("print(_, sum(one is same_ for one in Out.values()))")["out"] == "[1, 2] 2\n"


def test_an_error_of_a_results_repr_has_its_name(shell: Shell) -> None:
    """ipykernel's reply names an error of the cell's code only."""
    answer = shell.run(GPU + 'class Rude_:\n    def __repr__(self):\n        raise LookupError("no repr")\nRude_()')
    assert answer["error"] == "LookupError", answer
    assert "no repr" in answer["said"], answer


def test_a_plain_cell_after_a_result_of_the_device_has_its_own(shell: Shell) -> None:
    """IPython binds ``_`` only where it holds the result that IPython gave last."""
    assert shell.run(GPU + "[1]")["error"] == ""
    shell.run("7 * 9")
    assert shell.run("print(_, __)")["out"] == "63 [1]\n"
