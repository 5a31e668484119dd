"""``%%gpu`` at IPython's prompt in a terminal: the same on text alone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from tests.traces import plain_env

PATIENCE_S = 90
PROMPT = r"\r\nIn \[\d+\]: "


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("home")
    ensure_office(made, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    yield made
    with sublet.connect(home=made) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(made.resolve()), ignore_errors=True)


class Terminal:
    """Somebody types, and reads what appears."""

    def __init__(self, home: Path) -> None:
        env = plain_env()
        env |= {"SUBLET_HOME": str(home), "IPYTHONDIR": str(home / "ipython"), "TERM": "xterm"}
        words = ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor", "--no-term-title"]
        self.child = pexpect.spawn(
            sys.executable, words, env=env, encoding="utf-8", timeout=PATIENCE_S, dimensions=(40, 160)
        )
        self.child.expect(PROMPT)
        self._typed: tuple[str, ...] = ()

    def stall(self, seconds: float) -> None:
        """IPython stands still for so long, while somebody types."""
        os.kill(self.child.pid, signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (self.child.pid, signal.SIGCONT)).start()

    def type(self, *lines: str) -> None:
        """A cell ends with two empty lines."""
        self._typed = lines
        for line in lines:
            self.child.sendline(line)
        if lines[0].startswith("%%"):
            self.child.sendline("")
            self.child.sendline("")

    def read(self) -> str:
        """Up to the next prompt, without what was typed and without colours. What is typed while IPython is not at its
        prompt is shown before that, and then the first line of the output stands behind the prompts."""
        self.child.expect(PROMPT)
        text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", self.child.before).replace("\r\n", "\n")
        text = re.sub(r" +\.\.\.: ", "", text)
        for line in self._typed:
            text = re.sub(rf"(?m)^{re.escape(line)}\n", "", text, count=1)
        return text

    def cell(self, *lines: str) -> str:
        self.type(*lines)
        return self.read()


@pytest.fixture(scope="module")
def terminal(home: Path) -> Iterator[Terminal]:
    made = Terminal(home)
    made.cell("%load_ext sublet")
    yield made
    made.child.kill(signal.SIGKILL)
    made.child.wait()  # pexpect itself waits a tenth of a second for who is killed, and then complains
    made.child.close()


def test_results_have_their_number_and_the_bill_is_a_line(terminal: Terminal) -> None:
    terminal.cell("x = 20")
    said = terminal.cell("%%gpu --vram 64MiB", "y = x + 1", "y")
    assert re.search(r"Out\[\d+\]: 21\n", said)
    assert re.search(r"sublet: .*host device, no GPU\) · [\d.]+m?s", said)
    assert said.count("sublet:") == 1
    assert "22" in terminal.cell("print(y + 1)")


def test_progress_bars_are_text(terminal: Terminal) -> None:
    said = terminal.cell("%%gpu", "from tqdm.auto import tqdm", "for n in tqdm(range(5)): pass")
    assert "100%|" in said
    for stalled_s in (0.0, 0.5):
        if stalled_s:
            terminal.stall(stalled_s)
        said = terminal.cell(
            "%%gpu", "from rich.progress import track", "for n in track(range(5), description='all'): pass"
        )
        assert re.search(r"all \S+ +100%", said)
        assert "Output()" not in said


def test_it_asks_and_is_interrupted(terminal: Terminal) -> None:
    terminal.type("%%gpu", "print('hello', input('who' + '? '))")
    terminal.child.expect(r"who\? ")
    terminal.child.sendline("Ada")
    assert "hello Ada" in terminal.read()
    terminal.type("%%gpu", "import time", "print('it is', 'on', flush=True)", "while True: time.sleep(0.01)")
    terminal.child.expect(r"it is on\r")
    terminal.child.sendintr()
    assert "KeyboardInterrupt" in terminal.read()


def test_a_mistake_is_a_sentence(terminal: Terminal) -> None:
    said = terminal.cell("%%gpu --vrma 1GiB", "1")
    assert "did you mean --vram?" in said
    assert "Traceback" not in said
