"""Write the commands into docs/cli.md, from where they are declared: `.venv/bin/python tools/cli_docs.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sublet.cli.declare import DeclaredCommand, Opt
from sublet.cli.table import COMMANDS, SECTIONS, load

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "cli.md"
MARK: Final = "<!-- From here on made by tools/cli_docs.py from the commands themselves; a test compares. -->\n"


def document(before: str) -> str:
    """The document as it should be: what people wrote, up to the mark, and the commands after it."""
    head, mark, _ = before.partition(MARK)
    if not mark:
        raise SystemExit(f"{DOCUMENT} has lost its mark; put this line where the commands begin:\n{MARK}")
    return head + MARK + "".join(f"\n{line}" if line.startswith("#") else line for line in _commands())


def _commands() -> Iterator[str]:
    for section, words in SECTIONS.items():
        yield f"### {section}\n"
        for path in COMMANDS:
            if path.split()[0] in words:
                yield from _command(load(path))


def _command(command: DeclaredCommand) -> Iterator[str]:
    arguments = "".join(f" {p.spec.metavar}" for p in command.params if not isinstance(p.spec, Opt))
    yield f"#### `sublet {command.path}{arguments}`\n"
    yield f"\n{command.summary}\n"
    for paragraph in command.details.strip().split("\n\n") if command.details.strip() else ():
        yield f"\n{' '.join(paragraph.split())}\n"
    shown = [p for p in command.params if not (isinstance(p.spec, Opt) and p.spec.hidden)]
    if shown:
        yield "\n| | |\n|---|---|\n"
    for param in shown:
        spec = param.spec
        name = " ".join([*spec.flags, spec.metavar]).strip() if isinstance(spec, Opt) else spec.metavar
        yield f"| `{name.replace('|', chr(92) + '|')}` | {spec.help} |\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
