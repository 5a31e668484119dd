"""House rules that a machine can check. Each message names the better way."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest

from tests.unit.package_source import LOOKS_AT_SOURCE, source_files

pytestmark = LOOKS_AT_SOURCE

ROOT: Final = Path(__file__).parents[2]
FILES: Final = {file.name: file for file in source_files()}

PURE: Final = ("values.py", "errors.py", "settings.py", "lease/*", "office/*", "node/*/core.py")
"""Rooms and modules that decide. They are handed the time, chance and everything they know."""

EDGES: Final[dict[str, str]] = {
    "office/driver.py": "carries the ledger's effects out, on the clock it was given",
    "office/ledger/bills.py": "a CSV table, in memory",
    "office/journal/files.py": "SQLite",
    "office/journal/journal.py": "SQLite",
    "office/journal/reader.py": "SQLite",
    "office/journal/schema.py": "SQLite",
    "office/journal/disk_room.py": "the room that is reserved for the journal on its disk",
    "office/api/app.py": "the control service",
    "office/api/server.py": "the control service, on its sockets",
    "office/api/service.py": "what its handlers share",
    "office/api/bills.py": "its handlers",
    "office/api/leases.py": "its handlers",
    "office/api/listings.py": "its handlers",
    "office/api/office.py": "its handlers",
    "office/api/policy.py": "its handlers",
    "office/api/reservations.py": "its handlers",
    "office/api/sse.py": "its streams of events, which wait",
    "office/api/processes.py": "processes of holders, as the kernel and /proc name them, and their pidfds in the loop",
    "office/api/signing.py": "keys are made from the system's randomness",
    "office/journal/backup.py": "copies the journal's file",
    "lease/drawing.py": "puts the drawings of the tables into a page of the docs",
}
"""Modules in a pure room that touch the world, and what for. A new edge is written here, or it is not one."""

WORLD: Final = frozenset(
    (
        *("asyncio", "concurrent", "multiprocessing", "select", "signal", "subprocess", "threading"),
        *("fcntl", "glob", "http", "io", "os", "pathlib", "shutil", "socket", "sqlite3", "ssl", "tempfile", "urllib"),
        *("random", "secrets", "time", "uuid"),
    )
)
"""Modules through which a decision would come to depend on more than its arguments."""

CONTROL: Final = ("office/*", "node/*", "wire/*", "logs.py", "metrics.py", "lease/*", "client/transport*.py")
"""Where bytes of a client pass. They stay opaque: only a guest or the holder itself ever loads them."""

LOADERS: Final = frozenset(("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"))

# ------------------------------------------------------------------------------------------------ rules over a module

Nodes = list[ast.AST]
Found = Iterator[tuple[int, str]]


def reads_the_world(nodes: Nodes) -> Found:
    for line, name in imported(nodes):
        if name in WORLD:
            yield line, f"a pure room imports {name}; take what it would tell as an argument, or be an edge"
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="now" | "utcnow" | "today" as attr)):
                yield node.lineno, f".{attr}() reads a clock; take now_ns as an argument"
            case ast.Call(func=ast.Name(id="open" | "print" | "input" as name)):
                yield node.lineno, f"{name}() touches the world; hand back an effect and let the driver do it"
            case _:
                pass


def loads_client_bytes(nodes: Nodes) -> Found:
    for line, name in imported(nodes):
        if name in LOADERS:
            yield line, f"the control plane never unpickles ({name}); keep the bytes opaque, the guest loads them"
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id="eval" | "exec" | "__import__" as name)):
                yield node.lineno, f"{name}() runs what somebody sent; decode into a declared type instead"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr=attr)) if attr != "safe_load":
                yield node.lineno, f"yaml.{attr} can build any object; use JSON into a declared type"
            case _:
                pass


def starts_a_shell(nodes: Nodes) -> Found:
    for node in nodes:
        match node:
            case ast.Call(keywords=keywords) if any(
                k.arg == "shell" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                for k in keywords
            ):
                yield node.lineno, "a shell parses what a user wrote; pass a list of arguments"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen" as attr)):
                yield node.lineno, f"os.{attr} is a shell; use subprocess with a list of arguments"
            case _:
                pass


def numbers_its_blanks(nodes: Nodes) -> Found:
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if "?" in text and re.search(r"\b[A-Z]{3,}\b.*[\s(,]\?\d", text):
                yield node.lineno, "Python 3.12 before 3.12.4 warns of ?1 in SQL; write ?, and give the value twice"
            case _:
                pass


def imported(nodes: Nodes) -> Found:
    """Line and first part of the name of everything imported from outside, wherever it stands."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name.partition(".")[0]) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module.partition(".")[0]
            case _:
                pass


def is_pure(name: str) -> bool:
    return any(fnmatch(name, room) for room in PURE) and not any(fnmatch(name, edge) for edge in EDGES)


def is_control(name: str) -> bool:
    return any(fnmatch(name, room) for room in CONTROL)


def everywhere(name: str) -> bool:
    return True


RULES: Final[tuple[tuple[Callable[[Nodes], Found], Callable[[str], bool]], ...]] = (
    (reads_the_world, is_pure),
    (loads_client_bytes, is_control),
    (starts_a_shell, everywhere),
    (numbers_its_blanks, everywhere),
)


def looked_at(nodes: Iterable[ast.AST]) -> Nodes:
    """Of a whole tree, the nodes that rules are about."""
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.Call | ast.Constant)]


def test_modules_keep_the_house_rules() -> None:
    wrong: list[tuple[str, int, str]] = []
    for name, file in FILES.items():
        nodes = looked_at(file.nodes)
        wrong += [(name, *found) for rule, applies in RULES if applies(name) for found in rule(nodes)]
    assert not wrong, "\n".join(f"src/sublet/{name}:{line}: {message}" for name, line, message in sorted(wrong))


def test_every_edge_names_a_reason() -> None:
    assert all(EDGES.values())


@pytest.mark.parametrize("pattern", sorted({*PURE, *EDGES, *CONTROL}))
def test_every_pattern_of_a_rule_matches_a_file(pattern: str) -> None:
    """A room that was renamed would otherwise leave its rule without a word."""
    assert any(fnmatch(name, pattern) for name in FILES), f"nothing is {pattern}; name where it lies now"


def test_an_edge_lies_in_a_pure_room() -> None:
    assert [edge for edge in EDGES if not any(fnmatch(edge, room) for room in PURE)] == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (reads_the_world, "import time"),
        (reads_the_world, "from random import random"),
        (reads_the_world, "def f():\n    import os.path"),
        (reads_the_world, "stamp = datetime.datetime.now(tz=UTC)"),
        (reads_the_world, "open('x')"),
        (loads_client_bytes, "import pickle"),
        (loads_client_bytes, "from cloudpickle import loads"),
        (loads_client_bytes, "eval(text)"),
        (loads_client_bytes, "yaml.load(text)"),
        (starts_a_shell, "subprocess.run(text, shell=True)"),
        (starts_a_shell, "subprocess.run(text, shell=flag)"),
        (starts_a_shell, "os.system(text)"),
        (numbers_its_blanks, "db.execute('SELECT seq FROM audit WHERE seq > ?1', (seq,))"),
    ],
)
def test_a_rule_catches_what_it_is_for(rule: Callable[[Nodes], Found], source: str) -> None:
    assert len(list(rule(looked_at(ast.walk(ast.parse(source)))))) == 1


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (reads_the_world, "from datetime import datetime\nstamp = datetime.fromtimestamp(seconds, tz=UTC)"),
        (reads_the_world, "from sublet.clock import Clock\nnow_ns = clock.now_ns()"),
        (loads_client_bytes, "import json\nyaml.safe_load(text)"),
        (starts_a_shell, "subprocess.run([program], shell=False)"),
        (numbers_its_blanks, "db.execute('SELECT seq FROM audit WHERE seq > ?', (seq,))"),
    ],
)
def test_a_rule_lets_the_better_way_pass(rule: Callable[[Nodes], Found], source: str) -> None:
    assert list(rule(looked_at(ast.walk(ast.parse(source))))) == []


# --------------------------------------------------------------------------------------------- rules over every text

# Written in pieces, so that this file is not the first to break its own rule.
HOMES: Final = r"root|work|farm|home/[a-z]\w*|Users/\w+"
INDEXES: Final = "|".join(("py" + "pi", "python" + "hosted", "npm" + "js", "deb" + "ian"))

TEXT_RULES: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (
        re.compile(rf"(?<![\w.$}}\])*-])/(?:{HOMES})/"),
        "a path of one person's machine; use a temporary folder, or a path below the project",
    ),
    (
        re.compile(rf"https?://[\w.-]*(?:{INDEXES})\.(?:org|com)|--(?:extra-)?index-url[= ]\S*:/"),
        "the address of a package index belongs to a machine's settings; name packages by name",
    ),
    (
        re.compile(
            r"(?i)\bas (?:requested|instructed|discussed|you asked)\b|\bper (?:the|your) (?:brief|instructions)\b"
        ),
        "this speaks to whoever asked for the change; tell a stranger why the code is as it is",
    ),
)


def committed_texts() -> list[Path]:
    """Every file git knows or would take, without binary ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    paths = [ROOT / name.decode() for name in listed if name]
    return [path for path in paths if path.is_file() and b"\0" not in begin_of(path)]


def begin_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8192)


def spoken(text: str) -> Iterator[tuple[int, str]]:
    for pattern, message in TEXT_RULES:
        for line in {text.count("\n", 0, found.start()) + 1 for found in pattern.finditer(text)}:
            yield line, message


def test_no_text_speaks_of_one_machine_or_of_the_talk_around_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {message}"
        for path in committed_texts()
        for number, message in spoken(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "/ro" + "ot/.venv/bin/python",
        "cd /wo" + "rk/main",
        "see /home/" + "mallory/notes",
        "https://files.python" + "hosted.org/x",
        "pip install --index-url " + "file:///x y",
        "As " + "requested, the queue is bounded.",
    ],
)
def test_the_rule_over_texts_catches_what_it_is_for(line: str) -> None:
    assert len(list(spoken(line))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "src/sublet/lease/",
        "a lease as requested_by its holder",
        "https://example.org/",
        "the root / of all",
    ],
)
def test_the_rule_over_texts_lets_ordinary_prose_pass(line: str) -> None:
    assert list(spoken(line)) == []


LINK: Final = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def test_every_link_within_the_project_leads_somewhere() -> None:
    pages = [path for path in committed_texts() if path.suffix == ".md"]
    assert pages
    for page in pages:
        targets = [one for one in LINK.findall(page.read_text()) if "://" not in one and "mailto:" not in one]
        lost = [target for target in targets if not (page.parent / target).exists()]
        assert not lost, f"{page.relative_to(ROOT)} links to {', '.join(lost)}; make the page, or take the link out"
