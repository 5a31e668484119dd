"""Make docs/demo.svg: the terminal of a real `sublet demo`, drawn by rich.

Run it as `.venv/bin/python tools/picture.py`. The picture in the README is what the demo printed, so remake it when the
demo changes.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 120
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"


def main() -> int:
    shown = settled(run_demo())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("$ make demo\n" + shown))
    svg = console.export_svg(title="make demo")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # a picture fetches nothing from anywhere
    PICTURE.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE), encoding="utf-8")
    print(f"{PICTURE.name}: {len(svg) // 1024} KiB")
    return 0


def run_demo() -> str:
    """What the demo writes to a terminal of a fixed width."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "200", "TERM": "xterm-256color"}
    demo = subprocess.Popen([sys.executable, "-m", "sublet", "demo"], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    if demo.wait() != 0:
        raise SystemExit(f"the demo ended with status {demo.returncode}")
    return b"".join(parts).decode()


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
    sys.exit(main())
