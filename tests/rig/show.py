"""A person looks at an office on pretended cards: ``make demo RIG=4xH100``. Everything it shows says "pretended".

Real commands against a real office; only the driver's two libraries are ours (see ``tests/rig``). It is checked as it
goes, and the exit status is 1 if a check fails. At a terminal it ends with a shell on that machine.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import sublet
from sublet.client.home import runtime_dir
from sublet.values import format_size
from tests.rig.personalities import SHOWN, Personality
from tests.rig.rig import Rig, make_rig, remove_locks

PATIENCE_S: Final = 60.0
LABEL: Final = "PRETENDED CARDS"
PROGRAM: Final = """
import os
from sublet.devices.cuda_driver import open_driver
driver = open_driver()
device = driver("", "cuDeviceGet", int(os.environ.get("LOCAL_RANK", 0)))
driver("", "cuCtxSetCurrent", driver("", "cuDevicePrimaryCtxRetain", device))
memory = driver("", "cuMemAlloc", 256 << 20)
driver("", "cuMemsetD8", memory, 0x5A, 256 << 20)
uuid = bytes(driver("", "cuDeviceGetUuid", device).bytes).hex()
rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
os.write(1, f"{rank}256 MiB written on card GPU-{uuid[:8]}, my device number {int(device)}\\n".encode())
"""


class Failed(Exception):
    """Something was not as it is to be."""


def run_command(words: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """As a shell runs it: the exit status, and all that it says."""
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


class Show:
    """One machine, its office, and what is typed there."""

    def __init__(
        self, rig: Rig, folder: Path, run: Callable[[Sequence[str], Mapping[str, str]], tuple[int, str]] = run_command
    ) -> None:
        self.rig = rig
        self._run = run
        self.home = folder / "home"
        bin_folder = os.path.dirname(sys.executable)
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("SUBLET_", "CUDA_"))}
        path = os.pathsep.join((bin_folder, os.environ.get("PATH", os.defpath)))
        self.env: Mapping[str, str] = {**ours, **rig.env, "SUBLET_HOME": str(self.home), "PATH": path}

    def type(self, *words: str, status: int = 0) -> str:
        """As a person types it; what it says is shown."""
        print(f"\n$ {shlex.join(words)}", flush=True)
        ended, said = self._run(words, self.env)
        print(said, end="", flush=True)
        self.check(ended == status, f"it ended with status {ended}, and {status} was expected")
        return said

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Failed(otherwise)

    def await_free(self) -> None:
        """Until the cards were torn down and overwritten."""
        with self.asked() as office:
            self.until("a card was not free again after a minute", lambda: all(map(_is_free, _cards(office))))

    def await_fences(self, why: str, count: int) -> None:
        """Until so many cards and parts are quarantined for this reason."""
        with self.asked() as office:

            def found() -> int:
                return sum(why in one["detail"] for one in office.request("GET", "/v1/fences", shape=list))

            self.until("the office did not see it within a minute", lambda: found() == count)

    def until(self, otherwise: str, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not is_so():
            self.check(time.monotonic() < end_s, otherwise)
            time.sleep(0.1)

    def asked(self) -> sublet.Fabric:
        """Nobody types this: a command for each look would take longer than what is waited for."""
        return sublet.connect(home=self.home, start=False)

    def end(self) -> None:
        self._run(("sublet", "down", "--now"), self.env)
        shutil.rmtree(runtime_dir(self.home.resolve()), ignore_errors=True)


def say(text: str) -> None:
    print(f"\n-- {text}", flush=True)


def play(show: Show) -> None:
    """What a first user would try, on this machine."""
    rig = show.rig
    show.type("sublet", "up")
    say("Every card was tried out before it is offered; this says what was found, with the time of each step.")
    report = show.type("sublet", "doctor", "--gpu", status=int(not _lends(rig.personality)))
    if not _lends(rig.personality):
        is_told = any(words in report for words in ("not lent", "cannot be lent"))
        show.check(is_told, "doctor does not say that the card is not lent")
        say("No card of this machine can be used as it is, so none is lent. That is all there is to see.")
        return
    program = show.home.parent / "program.py"
    program.write_text(PROGRAM)
    say("A command on a leased card. It writes to the card's memory, which is overwritten when the lease has ended.")
    said = show.type("sublet", "run", "--gpu", "4GiB", "--", "python", str(program))
    show.await_free()
    used = [index for index in range(len(rig.personality.cards)) if rig.card(index).name[:12] in said]
    show.check(len(used) == 1, "the program did not say which card it used")
    show.check(not rig.dirty(used[0]), "something was left on the card")
    print("(checked: nothing but zeros is left in its memory)")
    whole = [i for i in range(len(rig.personality.cards)) if i not in rig.personality.hidden and not _is_part(rig, i)]
    if len(whole) > 1:
        say("One process for each of two cards, as torchrun would start them.")
        show.type("sublet", "run", "--gpus", "2", "--gpu", "4GiB", "--per-device", "--", "python", str(program))
        show.await_free()
    last = whole[-1]  # an Xid names a card, never a part of one
    say(f"The driver reports Xid 79 of card {last} (it fell off its bus): it is lent no more until a person vouches.")
    rig.xid(last, 79)
    show.await_fences("Xid 79", 1)
    parts = sum(bool(card.parent) for card in rig.state.cards)
    if parts:
        say(f"The same of card 0, which is split: neither of its {parts} parts is lent any more.")
        rig.xid(0, 79)
        show.await_fences("Xid 79", 1 + parts)
    show.type("sublet", "fence", "ls")
    show.type("sublet", "status")


def _cards(office: sublet.Fabric) -> list[dict[str, Any]]:
    found = office.request("GET", "/v1/status", shape=dict)["devices"]
    return [device for device in found if device["kind"] == "gpu"]


def _is_free(card: dict[str, Any]) -> bool:
    return bool(card["state"] == "free" and not card["leases"])


def _lends(personality: Personality) -> bool:
    return not personality.not_lent and not any(line.field == "init_code" for line in personality.lines)


def _is_part(rig: Rig, index: int) -> bool:
    return bool(rig.card(index).parent or rig.card(index).split)


def main(arguments: list[str]) -> int:
    """The machine's name, and it is shown."""
    if len(arguments) != 1 or arguments[0] not in SHOWN:
        sys.stderr.write(f"There is no machine {' '.join(arguments) or 'of no name'}.\n  Name one: make demo RIG=")
        sys.stderr.write(f"{'|'.join(SHOWN)}\n")
        return 2
    if shutil.which("gcc") is None:
        sys.stderr.write("The pretended driver is compiled with gcc, and there is none.\n  Install gcc.\n")
        return 1
    personality = SHOWN[arguments[0]]
    with tempfile.TemporaryDirectory(prefix="sublet-rig-") as folder, contextlib.ExitStack() as stack:
        rig = make_rig(Path(folder), personality)
        stack.callback(rig.close)
        print(f"{LABEL}: {personality.name}. No GPU is used, and yours is not touched.")
        memory = ", ".join(format_size(kind.fields["memory"]) for kind in personality.cards)
        print(f"The driver's libraries are pretended, in {rig.folder}; the memory of each card is a file ({memory}).")
        show = Show(rig, Path(folder))
        stack.callback(remove_locks)
        stack.callback(show.end)
        try:
            play(show)
        except Failed as failed:
            sys.stderr.write(f"\nA check failed: {failed}.\n")
            return 1
        if sys.stdin.isatty() and sys.stdout.isatty():
            print(f"\n-- A shell on this machine ({LABEL}); `exit` ends it and removes everything.")
            env = {**show.env, "PS1": "(pretended cards) $ "}
            subprocess.run([os.environ.get("SHELL") or "sh"], env=env, check=False)
        print(f"\n{LABEL}: the end. What a real card does may differ; docs/gpus.md says what is known, and how.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
