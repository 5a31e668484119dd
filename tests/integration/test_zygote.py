"""Zygotes and the guests that come from them, with real processes.

Guests become children of the process that asked for them, so the scenes are played by one of their own
(``zygote_stage``), which takes in orphans as a supervisor does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any, Final

import pytest

from tests.commands import run_program

ROOT: Final = Path(__file__).parents[2]
STAGE: Final = "import runpy; runpy.run_module('tests.integration.zygote_stage', run_name='__main__')"
LIBRARIES: Final = [["decimal"], *([name] for name in ("numpy", "torch") if importlib.util.find_spec(name))]
"""What a guest computes with: the large ones where they happen to be installed."""
PATIENCE_S: Final = 120


def play(scene: str, *arguments: str, **env: str) -> Any:
    """In a fork: what is looked at are the zygotes and guests that it starts."""
    done = run_program(STAGE, scene, *arguments, env={**os.environ, **env}, timeout=PATIENCE_S)
    assert done.status == 0, done.err.decode()
    return json.loads(done.out)


def test_a_guest_is_what_a_fresh_interpreter_would_be_and_the_keepers_child() -> None:
    seen = play("look")
    assert seen["err"] == ""
    assert seen["ppid"] == seen["keeper"]
    assert seen["sid"] == seen["pid"]
    assert seen["wish"] == signal.SIGKILL
    assert (seen["argv"], seen["path0"]) == (["-c", "one", "two words"], "")
    assert (seen["cwd"], seen["umask"], seen["limit"], seen["cpus"]) == ("/tmp", 0o027, [100, 200], [seen["cpu"]])
    assert seen["stdin"] == "given"
    assert seen["env"]["COLOUR"] == "blue"
    assert "SUBLET_ROOM" not in seen["env"]
    assert (seen["threads"], seen["blocked"]) == (1, 0)
    assert seen["sigterm"] == str(signal.SIG_DFL)
    assert "default_int_handler" in seen["sigint"]
    assert set(seen["fds"]) == {"0", "1", "2", *(fd for fd, path in seen["fds"].items() if "/proc/" in path)}


def test_a_guest_looks_like_its_program_from_outside() -> None:
    seen = play("look")
    assert seen["title"].startswith("python -c \nimport json")
    assert "SUBLET_LEASE=l-7" in seen["shown"]
    assert "COLOUR=blue" not in seen["shown"]


CLEANUP: Final = """
import atexit, sys, threading, time
class Last:
    def __del__(self): print("finalizer")
last = Last()
ring = Last(); ring.me = ring; del ring
atexit.register(lambda: print("exit function"))
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
file = open(sys.argv[1], "w"); file.write("left open")
"""
AS_PYTHON: Final = (
    ("-c", "print('out'); import sys; print('err', file=sys.stderr)"),
    ("-c", "import sys; sys.exit(3)"),
    ("-c", "import sys; sys.exit('a reason')"),
    ("-c", "import sys; sys.exit(-1)"),
    ("-c", "raise SystemExit"),
    ("-c", "def f():\n  raise ValueError('wrong')\nf()"),
    ("-c", "x = ("),
    ("-c", "raise KeyboardInterrupt"),
    ("-c", "import os, signal; print('x', end='', flush=True); os.kill(os.getpid(), signal.SIGKILL)"),
    ("-c", "import os; print('lost'); os._exit(9)"),
    ("-c", "import sys; print(__name__, sorted(globals()), sys.argv)", "-x", "y"),
    ("-m", "json.tool", "--help"),
    ("-m", "no_such_module"),
    ("no_such_script.py",),
    ("-c", "import sys; sys.excepthook = lambda *error: print(error[1]); raise ValueError('told by a hook')"),
    ("-c", "import warnings; warnings.warn('careful')"),
)


def test_a_guest_ends_as_plain_python_does(tmp_path: Path) -> None:
    """The same words, the same exit status, for every way a program can end."""
    script, folder = tmp_path / "script.py", tmp_path / "program"
    folder.mkdir()
    (folder / "__main__.py").write_text("import sys, helper; print(sys.argv, helper.x)")
    (folder / "helper.py").write_text("x = 5")
    script.write_text("import sys\nprint(__file__, __name__, sys.argv, sys.path[0], __builtins__)\nraise OSError(1)")
    (tmp_path / "cleanup.py").write_text(CLEANUP)
    commands = [
        *AS_PYTHON,
        (str(script), "a"),
        (os.path.relpath(script, ROOT),),
        (str(folder), "b"),
        (str(tmp_path / "cleanup.py"), str(tmp_path / "left")),
    ]
    results = play("run_all", json.dumps(commands))
    assert (tmp_path / "left").read_text() == "left open"
    for argv, seen in zip(commands, results, strict=True):
        plain = subprocess.run(
            [sys.executable, *argv], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert seen["failure"] == ""
        assert (seen["code"], seen["out"], seen["err"]) == (plain.returncode, plain.stdout, plain.stderr), argv


def test_an_entry_point_is_called_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import sys\ndef main(n, word='x'): print(n, word, sys.argv)\nclass A:\n  go = print\nnothing = None\n"
    )
    calls = [
        ("work:main", '{"n": 3, "word": "y"}'),
        ("work:A.go", ""),
        ("work:missing", ""),
        ("work:nothing", ""),
        ("work:main", "{}"),
        ("no_such_work:main", ""),
    ]
    fine, nested, missing, nothing, wrong, unknown = play("entries", json.dumps(calls), PYTHONPATH=str(tmp_path))
    assert (fine["code"], fine["out"]) == (0, "3 y ['work:main']\n")
    assert (nested["code"], nested["out"]) == (0, "\n")
    assert (missing["code"], missing["err"]) == (2, missing["err"])
    assert missing["err"].startswith("sublet: work has no missing. Write it as")
    assert nothing["err"].startswith("sublet: work:nothing cannot be called")
    assert wrong["code"] == unknown["code"] == 1
    assert "TypeError: main() missing 1 required positional argument" in wrong["err"]
    assert "sublet" not in wrong["err"].replace("sublet/guest", "")
    assert "ModuleNotFoundError" in unknown["err"]


@pytest.mark.parametrize("imports", LIBRARIES, ids=str)
def test_guests_of_one_zygote_compute_correctly_and_no_two_draw_the_same_numbers(imports: list[str]) -> None:
    said, results, drawn = play("compute", "random", *imports)
    assert said.endswith("ready")
    assert results == ["[None, None, None] 1.414213562373095048801688724\n"] * 3
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 3


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(999,), daemon=True, name='busy').start()",
         "an import started the thread busy"),
        ("import _thread, time\n_thread.start_new_thread(time.sleep, (999,))",
         "1 threads of native code did not stop at a fork"),
        ("file = open('/dev/full', 'rb')", "an import opened /dev/full"),
        ("raise RuntimeError('no luck')", "culprit could not be imported: RuntimeError: no luck"),
        ("raise SystemExit(3)", "culprit could not be imported: SystemExit: 3"),
        ("import os\nos.register_at_fork(after_in_child=lambda: os._exit(1))",
         "in a trial fork the child ended without a word"),
    ],
)  # fmt: skip
def test_a_zygote_that_fails_its_proof_is_discarded_with_the_reason(tmp_path: Path, source: str, reason: str) -> None:
    (tmp_path / "culprit.py").write_text(source)
    assert play("proof", "culprit", PYTHONPATH=str(tmp_path)).endswith(f"discarded ({reason})")


def test_what_goes_wrong_before_the_program_is_told_and_nothing_of_it_runs() -> None:
    nowhere, unsent = play("last_word")
    assert (nowhere["failure"], nowhere["code"], nowhere["out"]) == ("folder 2", 126, "")
    assert unsent == 126


def test_a_malformed_request_is_answered_and_the_next_one_served() -> None:
    said, broken, few, served = play("malformed")
    assert served == "served\n"
    assert [one["code"] for one in said] == [2, 2, 2]
    for one, text in zip(said, ("is not an entry point", "are no JSON object", "no program to run"), strict=True):
        assert one["err"].startswith("sublet: ")
        assert text in one["err"]
    assert [(one["out"], one["failure"], one["code"]) for one in broken] == [("", "request 0", 126)] * 4
    assert "a fork came with 0 descriptors, and 6 are needed" in few


def test_a_zygote_for_tenants_reads_nothing_but_its_installation_and_its_guests_are_as_ever() -> None:
    """Where a program finds its own modules is decided for it, not by the options of the warm interpreter."""
    plain, safe = play("isolated")
    assert plain == ["1", "0", "True"], "the first folder is the empty one, which is the working folder"
    assert safe[:2] == ["1", "0"]
    assert safe[2].endswith(".zip")


def test_a_zygote_keeps_nothing_of_a_request() -> None:
    """Environment, arguments and command line are read by the guest alone: what the zygote had read once, every later
    guest would find in its own memory."""
    seen = play("remembered", "decimal")
    assert seen["waiting"] == 1
    for one in seen["found"]:
        assert one["bytes"] > 3_000_000
        assert one["marks"] == 0


def test_a_zygote_is_made_anew_when_its_packages_changed(tmp_path: Path) -> None:
    was_ready, first, second = play("outdated", str(tmp_path))
    assert not was_ready
    assert first != second


def test_a_zygote_that_died_is_missed_by_nobody_and_comes_back() -> None:
    line, refused, code = play("killed")
    assert "died" in line
    assert "no warm interpreter of this kind" in refused
    assert code == 0


def test_a_copy_that_waits_has_done_what_its_modules_do_then(tmp_path: Path) -> None:
    body = "import os, sys\nsys.called_in = []\ndef in_standby(): sys.called_in.append(os.getpid())\n"
    (tmp_path / "does_it.py").write_text(body)
    (tmp_path / "fails_at_it.py").write_text("def in_standby(): raise RuntimeError\n")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}  # a folder that changes makes it be made anew
    said, code = play("in_standby", "fails_at_it", "does_it?", "not_there?", **env)
    assert said == [said[0]] * 2, "once, in the guest itself and not in the zygote"
    assert code == 0


def test_one_copy_waits_in_advance_and_is_nobodys_guest() -> None:
    """It becomes the next guest, however large the request; where it cannot, because it was killed, the guest is forked
    as before. There is never more than one, and it ends with its zygote."""
    seen = play("in_advance")
    assert seen["counts"] == [1, 1, 1, 1]
    assert seen["strangers"] == 0, "it counts as the zygote's"
    assert seen["became"] == [True, True]
    assert seen["said"] == ["1\n", "here\n", "100000\n"]
    assert seen["codes"] == [0, 0, 0]
    assert len([link for link in seen["fds"] if link.startswith("socket:")]) == 1, "and not the zygote's own"


def test_a_guest_that_ignores_everything_ends_with_the_keeper() -> None:
    with subprocess.Popen([sys.executable, "-c", STAGE, "orphan"], cwd=ROOT, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        try:
            pidfd = os.pidfd_open(int(keeper.stdout.readline()))
        finally:
            keeper.kill()
        try:
            ended = select.select([pidfd], [], [], PATIENCE_S)[0]
            if not ended:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            assert ended, "it outlived the process it belonged to"
        finally:
            os.close(pidfd)


SAVES: Final = """
import os, time
from sublet.errors import LeaseInterrupt
try:
    try:
        print("up", flush=True)
        while True:  # not one long sleep: Python sees no signal that comes just before it
            time.sleep(0.01)
    except Exception:
        print("swallowed")
except LeaseInterrupt as interrupt:
    print("saved", interrupt.end.reason, interrupt.end.detail)
    print("up", flush=True)
    while not os.path.exists(os.environ["SUBLET_PAGE"] + ".2"):  # the second signal was sent
        time.sleep(0.01)
    print("not interrupted again")
    raise
"""


def test_the_end_of_a_lease_arrives_once_and_except_exception_does_not_swallow_it(tmp_path: Path) -> None:
    done = play("noticed", str(tmp_path), SAVES, "noticed")
    assert done["out"] == "up\nsaved preempted by interactive\nup\nnot interrupted again\n"
    assert done["code"] == 76
    assert done["err"] == (
        "sublet: the lease ended: preempted (by interactive). Acquire a new lease and go on from the last checkpoint.\n"
    )


def test_a_signal_without_an_end_is_an_ordinary_one(tmp_path: Path) -> None:
    code = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"  # one sleep may begin after the signal
    done = play("noticed", str(tmp_path), code, "live")
    assert (done["code"], done["err"]) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("then", ["", "time.sleep(999)"], ids=["waiting for it", "at work beside it"])
def test_a_thread_does_not_keep_a_guest_from_ending_with_its_lease(tmp_path: Path, then: str) -> None:
    code = """
import os, threading, time
def sleeps():
    return open(f"/proc/self/task/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] == "S"
def work():
    looks = 0  # Python sees no signal that comes between its last look and the sleep of its main thread
    while looks < 10:
        time.sleep(0.02)
        looks = looks + 1 if sleeps() else 0
    print("up", flush=True)
    time.sleep(999)
threading.Thread(target=work).start()
"""
    done = play("noticed", str(tmp_path), code + then, "noticed")
    assert done["code"] == 76
    assert done["err"].startswith("sublet: the lease ended: preempted")


def test_an_interpreter_that_has_nothing_of_ours_makes_guests_all_the_same(tmp_path: Path) -> None:
    """And it sees none of what is installed beside us."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    said, (prefix, found, path) = play("bare", str(tmp_path / "venv" / "bin" / "python"))
    assert said.endswith("ready")
    assert prefix == str(tmp_path / "venv")
    assert found == {
        "msgspec": False,
        "psutil": False,
        "hypothesis": False,
        "sublet.errors": True,
        "sublet.wire.page": True,
    }
    assert not any(folder.startswith(str(ROOT / "src")) for folder in path)


def test_an_interpreter_that_has_a_sublet_of_its_own_imports_that_one(tmp_path: Path) -> None:
    """As it would without a zygote; and the end of the lease arrives as the class that the program knows."""
    own = tmp_path / "sublet"
    own.mkdir()
    (own / "__init__.py").write_text("__version__ = 'of its own'")
    (own / "errors.py").write_text("class LeaseInterrupt(BaseException):\n  def __init__(self, end): self.end = end\n")
    code = "import sublet\nprint(sublet.__version__)\n" + SAVES
    done = play("noticed", str(tmp_path), code, "noticed", str(tmp_path))
    assert done["out"].splitlines()[:3] == ["of its own", "up", "saved preempted by interactive"]
    assert done["code"] == 76


def test_what_can_wait_is_imported_when_guests_can_be_made_already() -> None:
    """And is proved as everything else is: a zygote that took in what it should not have is used no more."""
    first, then, why = play("later")
    assert first == [["True", "False"], ["True", "False"]]
    assert then == ["True", "True"]
    assert "no_such_module could not be imported" in why


def test_a_guest_can_have_a_terminal() -> None:
    said, code = play("terminal")
    assert code == 0
    assert "True True True typed\r\n" in said
    assert "by name" in said


def test_a_guest_can_be_another_user_and_join_a_group_it_could_not_open(tmp_path: Path) -> None:
    uid, is_root, done, written = play("other_user", str(tmp_path))
    groups = "[65534]" if is_root else str(os.getgroups())
    assert done["out"] == f"({uid}, {uid}, {uid}) {groups} {int(signal.SIGKILL)} 4\n"
    assert written == "0"


def test_many_guests_at_once_do_not_mix_and_leave_nothing_open() -> None:
    said, left = play("many", "24")
    assert said == [f"{n} 4\n" for n in range(24)]
    assert left == 0


@pytest.mark.parametrize(
    ("program", "reason"),
    [("/bin/false", "it ended without a word"), ("/no/such/python", "could not be run: No such file or directory")],
)
def test_what_is_no_interpreter_is_given_up(program: str, reason: str) -> None:
    assert reason in play("no_python", program)
