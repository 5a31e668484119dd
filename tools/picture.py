"""Make the pictures in docs/: the terminal of a real `sublet demo` and of a real `sublet top`, drawn by rich.

Run it as `.venv/bin/python tools/picture.py demo` (or `top`). A picture is what the command printed, so remake it when
the command changes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 120
DEMO_COLUMNS = 101
"""The demo prints at most 100: a narrower picture has larger letters."""
DOCS = Path(__file__).resolve().parent.parent / "docs"
SUBLET = (sys.executable, "-m", "sublet")


def main(words: list[str]) -> int:
    match words:
        case ["demo"]:
            picture("demo", "make demo", shown(("demo",), os.environ, DEMO_COLUMNS), DEMO_COLUMNS)
        case ["top"]:
            with busy_office() as environment:
                picture("top", "sublet top", shown(("top", "--once"), environment))
        case _:
            raise SystemExit(__doc__)
    return 0


def picture(name: str, typed: str, text: str, columns: int = COLUMNS) -> None:
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ {typed}\n{text}"))
    svg = console.export_svg(title=typed)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # a picture fetches nothing from anywhere
    path = DOCS / f"{name}.svg"
    path.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE), encoding="utf-8")
    print(f"{path.name}: {len(svg) // 1024} KiB")


def shown(words: tuple[str, ...], environment: Mapping[str, str], columns: int = COLUMNS) -> str:
    """What a command writes to a terminal of a fixed width."""
    ours, theirs = pty.openpty()
    environment = {**environment, "COLUMNS": str(columns), "LINES": "200", "TERM": "xterm-256color"}
    process = subprocess.Popen([*SUBLET, *words], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    if process.wait() != 0:
        raise SystemExit(f"it ended with status {process.returncode}")
    return settled(b"".join(parts).decode())


@contextlib.contextmanager
def busy_office() -> Iterator[dict[str, str]]:
    """Two host devices, three tenants, commands that run, somebody who is being preempted, and somebody who waits."""
    with tempfile.TemporaryDirectory(prefix="sublet-") as folder:
        owner = {**os.environ, "SUBLET_HOME": f"{folder}/office"}
        held: list[subprocess.Popen[bytes]] = []

        def done(environment: Mapping[str, str], *words: str) -> str:
            return subprocess.run([*SUBLET, *words], env=environment, capture_output=True, text=True, check=True).stdout

        def holds(environment: Mapping[str, str], *words: str) -> None:
            null = subprocess.DEVNULL
            held.append(subprocess.Popen([*SUBLET, *words], env=environment, stdin=null, stdout=null, stderr=null))

        def until(part: str, count: int) -> None:
            while len(json.loads(done(owner, "top", "--json"))[part]) < count:
                time.sleep(0.1)

        done(owner, "up", "--host-gpus", "2x16GiB")
        try:
            of = {
                name: {**owner, "SUBLET_AS_TENANT": "1", "SUBLET_TOKEN": done(owner, "tenant", "add", name).strip()}
                for name in ("ana", "bob", "eve")
            }
            done(
                of["ana"],
                "lease",
                "acquire",
                "--gpu",
                "6GiB",
                "--exclusivity",
                "shared",
                "--ttl",
                "10m",
                "--name",
                "nb",
            )
            done(of["bob"], "lease", "acquire", "--gpu", "16GiB", "--spot", "--ttl", "20m", "--name", "sweep-17")
            work = "while :; do :; done"
            holds(owner, "run", "--cpu", "1", "--ttl", "5m", "--name", "index", "--", "sh", "-c", f"sleep 600 & {work}")
            until("guests", 1)
            time.sleep(4)
            holds(of["eve"], "lease", "acquire", "--gpu", "16GiB", "--wait", "10m", "--name", "eval")
            holds(of["ana"], "lease", "acquire", "--gpu", "16GiB", "--tier", "batch", "--wait", "10m")
            until("queue", 2)
            yield owner
        finally:
            done(owner, "down", "--now")
            for process in held:
                process.kill()
                process.wait()


def settled(raw: str) -> str:
    """What is left on the screen: lines that were drawn over count only as they were last."""
    raw = re.sub(r"\x1b\[\?25[lh]", "", raw)
    lines: list[str] = [""]
    row = 0
    for piece in re.split(r"(\r\n|\n|\r|\x1b\[\d*A|\x1b\[2?K)", raw):
        if piece in ("\r\n", "\n"):
            row += 1
            if row == len(lines):
                lines.append("")
        elif piece == "\r":
            pass  # what follows clears the line before it writes
        elif match := re.fullmatch(r"\x1b\[(\d*)A", piece):
            row = max(0, row - int(match[1] or 1))
        elif re.fullmatch(r"\x1b\[2?K", piece):
            lines[row] = ""
        else:
            lines[row] += piece
    return "\n".join(lines).strip("\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
