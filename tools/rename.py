"""Moves and renames modules of the package over the whole tree, from one table of old and new names.

    python tools/rename.py TABLE

Each line of the table is ``old new``, dotted below ``sublet`` (``office.ledger.step office.ledger.transaction``),
or two paths with a slash (``tests/unit/durable tests/unit/state``). Files and folders move with ``git mv``, and the
test of a module (``tests/unit/<room>/test_<module>.py``) moves with it. Then every text that git knows is rewritten:
imports and the names they bind, dotted names in texts and comments, and paths. What it cannot decide it names, and
leaves alone.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = "sublet"
NONE: Final = "(?!)"
"""A pattern that matches nothing: of a table that has only paths."""


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def read_table(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Modules, and paths."""
    modules: dict[str, str] = {}
    paths: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            old, new = line.split()
            (paths if "/" in old else modules)[old] = new
    return modules, paths


def move(modules: dict[str, str], paths: dict[str, str]) -> dict[str, str]:
    """Move the files; every path that changed, old → new."""
    moved = dict(paths)
    for old, new in modules.items():
        before, after = (f"src/{PACKAGE}/{name.replace('.', '/')}" for name in (old, new))
        suffix = "" if (ROOT / before).is_dir() else ".py"
        moved[before + suffix] = after + suffix
        room, _, leaf = old.rpartition(".")
        new_room, _, new_leaf = new.rpartition(".")
        test = f"tests/unit/{room.replace('.', '/')}/test_{leaf}.py"
        if not suffix or not (ROOT / test).is_file():
            continue
        moved[test] = f"tests/unit/{new_room.replace('.', '/')}/test_{new_leaf}.py"
    for before, after in sorted(moved.items(), key=lambda pair: -len(pair[0])):
        (ROOT / after).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / after).exists():
            raise SystemExit(f"{after} exists already")
        git("mv", before, after)
    return moved


class Rewriter:
    """Rewrites texts by the table."""

    def __init__(self, modules: dict[str, str], moved: dict[str, str]) -> None:
        self.modules = modules
        ordered = sorted(modules, key=len, reverse=True)
        names = "|".join(re.escape(one) for one in ordered) or NONE
        self.full = re.compile(rf"(?<![\w.])({PACKAGE}\.)({names})(?![\w])")
        self.short = re.compile(
            rf"(?<![\w./])()({'|'.join(re.escape(one) for one in ordered if '.' in one) or NONE})(?![\w/])"
        )
        inside = {
            old.removeprefix(f"src/{PACKAGE}/"): new.removeprefix(f"src/{PACKAGE}/")
            for old, new in moved.items()
            if old.startswith("src/")
        }
        as_modules = {
            old.removesuffix(".py").replace("/", "."): new.removesuffix(".py").replace("/", ".")
            for old, new in moved.items()
            if old.startswith("tests/")
        }
        self.paths = {**moved, **inside, **as_modules}
        longest = sorted(self.paths, key=len, reverse=True)
        self.path = re.compile(rf"(?<![\w.-])({'|'.join(re.escape(one) for one in longest)})(?![\w-])")

    def text(self, text: str, *, short: bool) -> str:
        text = self.full.sub(lambda found: found[1] + self.modules[found[2]], text)
        if short:
            text = self.short.sub(lambda found: self.modules[found[2]], text)
        return self.path.sub(lambda found: self.paths[found[1]], text)

    def python(self, source: str, where: str) -> str:
        if not self.full.search(source) and not re.search(rf"\b(from|import) {PACKAGE}\b", source):
            return self._texts(source)
        return self._texts(self._imports(source, where))

    def _texts(self, source: str) -> str:
        """Texts and comments, and full names in code."""
        lines = source.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        pieces: list[str] = []
        at = 0
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                begin = starts[token.start[0] - 1] + token.start[1]
                pieces.append(self.text(source[at:begin], short=False))
                pieces.append(self.text(token.string, short=True))
                at = begin + len(token.string)
        pieces.append(self.text(source[at:], short=False))
        return "".join(pieces)

    def _imports(self, source: str, where: str) -> str:
        """``from sublet.room import module`` and the uses of that name."""
        tree = ast.parse(source)
        edits: list[tuple[int, int, int, str]] = []
        bound: dict[str, str] = {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
                continue
            if node.module != PACKAGE and not node.module.startswith(f"{PACKAGE}."):
                continue
            room = node.module.removeprefix(PACKAGE).removeprefix(".")
            going: dict[str, list[str]] = {}
            staying: list[str] = []
            for alias in node.names:
                new = self.modules.get(f"{room}.{alias.name}" if room else alias.name)
                if new is None:
                    staying.append(ast.unparse(alias))
                    continue
                new_room, _, leaf = new.rpartition(".")
                going.setdefault(new_room, []).append(leaf + (f" as {alias.asname}" if alias.asname else ""))
                if alias.asname is None and leaf != alias.name:
                    bound[alias.name] = leaf
            if not going:
                continue
            rows = [f"from {node.module} import {', '.join(staying)}"] if staying else []
            rows += [
                f"from {PACKAGE}{'.' if new_room else ''}{new_room} import {', '.join(leaves)}"
                for new_room, leaves in going.items()
            ]
            indent = " " * node.col_offset
            edits.append((node.lineno, node.end_lineno or node.lineno, node.col_offset, f"\n{indent}".join(rows)))
        if not edits:
            return source
        others = {
            one
            for node in ast.walk(tree)
            for one in (
                [node.arg]
                if isinstance(node, ast.arg)
                else [node.id]
                if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
                else []
            )
        }
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for old, new in bound.items():
            if old in others or new in others or new in used:
                print(f"{where}: the name {old} → {new} is bound otherwise too; look at it by hand")
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in bound]
        lines = source.splitlines(keepends=True)
        for name in sorted(names, key=lambda one: (one.lineno, one.col_offset), reverse=True):
            line = lines[name.lineno - 1].encode()
            before, after = line[: name.col_offset], line[name.col_offset + len(name.id) :]
            lines[name.lineno - 1] = (before + bound[name.id].encode() + after).decode()
        for begin, end, column, text in sorted(edits, reverse=True):
            rest = "".join(lines[begin - 1 : end])
            tail = "\n" if rest.endswith("\n") else ""
            comment = re.search(r"\)?\s*(#[^\n]*)\n?$", rest)
            lines[begin - 1 : end] = [" " * column + text + (f"  {comment[1]}" if comment else "") + tail]
        return "".join(lines)


def main() -> None:
    modules, paths = read_table(Path(sys.argv[1]))
    moved = move(modules, paths)
    rewriter = Rewriter(modules, moved)
    for name in git("ls-files", "-z").split("\0"):
        path = ROOT / name
        if not name or not path.is_file() or path.is_symlink() or b"\0" in (raw := path.read_bytes()):
            continue
        source = raw.decode("utf-8")
        new = rewriter.python(source, name) if path.suffix == ".py" else rewriter.text(source, short=True)
        if new != source:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
