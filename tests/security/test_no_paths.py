"""The privileged part changes nothing by a path on which a guest may have put something else in between.

It reads the source of every module that root's processes run: supervisor, office, agent and warm interpreters, and all
that these import. Owner and rights are changed in one module of the supervisor alone, by descriptor. What opens, makes,
moves or removes files goes from a descriptor (``dir_fd``), or names a fixed place of the system, or stands in a table
with the reason why no guest and no other user can write on the way. A new module is in neither, and fails.
"""

from __future__ import annotations

import ast
import bisect
import functools
import re
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from tests.unit.package_source import LOOKS_AT_SOURCE
from tests.unit.test_map import MODULES, house_imports_of

pytestmark = LOOKS_AT_SOURCE

BEGIN = ("engines", "node", "office", "guest.zygote")
"""Rooms and programs that root's processes start from."""
NEVER = ("cli", "compute", "durable", "jobs", "notebook", "replicated", "state", "studio", "training")
"""Rooms of which nothing belongs there: they run with the rights of the one who calls them, or behind walls."""
CHANGES_OWNER = "node.by_descriptor"

OWNER_AND_RIGHTS = {"os.chown", "os.lchown", "os.chmod", "os.lchmod"}
WHOLE_TREES = {"shutil.rmtree", "shutil.copytree", "shutil.move", "shutil.chown", "os.removedirs", "os.renames"}
FILES = {
    "open",
    "os.link",
    "os.makedirs",
    "os.mkdir",
    "os.mkfifo",
    "os.mknod",
    "os.open",
    "os.remove",
    "os.rename",
    "os.replace",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "os.unlink",
}
METHODS = {
    *("chmod", "hardlink_to", "lchmod", "mkdir", "read_bytes", "read_text", "rename", "rmdir", "symlink_to", "touch"),
    *("unlink", "write_bytes", "write_text"),
}
"""Of ``pathlib``."""
OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/", "/usr")

PRIVATE = "below the state or the runtime folder, up to the last name: both are 0700, and so is what lies above"
BEHIND = "in the child behind its new root, where it has no rights that a guest has not"
KERNEL = "in /proc or a file system of control groups, where nobody can put a link"
OF_ALL = "with O_NOFOLLOW in a sticky folder of root's, and owner, kind and number of names are looked at"
ALLOWED = {
    "node.agent.limits": (1, KERNEL),
    "node.agent.nvml": (1, KERNEL),
    "node.agent.starting": (2, PRIVATE),
    "office.journal.backup": (
        4,
        PRIVATE + "; elsewhere only where the owner named the place over its own socket, and nothing is",
    ),
    "office.journal.disk_room": (4, PRIVATE),
    "office.journal.files": (16, PRIVATE),
    "office.journal.journal": (2, PRIVATE),
    "office.journal.reader": (1, PRIVATE),
    "office.api.processes": (3, KERNEL),
    "office.api.office": (1, PRIVATE),
    "office.api.signing": (4, PRIVATE),
    "client.home": (2, PRIVATE),
    "engines.local": (2, PRIVATE),
    "engines.operator_limits": (1, PRIVATE),
    "engines.shared_folder": (3, "below folders that only root and the owner can change, as was looked at before"),
    "engines.start_settings": (4, PRIVATE),
    "invocation": (1, "of what is installed with the interpreter, which only root can change"),
    "node.supervisor.__main__": (7, PRIVATE),
    "node.processes.trash": (1, PRIVATE),
    "node.processes.cgroups_places": (6, KERNEL),
    "node.storage.copying_work": (3, PRIVATE),
    "node.storage.handed_files": (2, PRIVATE),
    "node.sandbox.enter": (1, KERNEL),
    "node.sandbox.landlock": (1, BEHIND),
    "node.sandbox.probe": (2, BEHIND),
    "node.sandbox.root": (12, BEHIND),
    "node.sandbox.trial": (1, "a new folder in /tmp by a name that nobody can guess; mkdir refuses one that is there"),
    "node.sandbox.uids": (8, PRIVATE),
    "node.processes.launch": (1, KERNEL),
    "node.supervisor.locks": (5, OF_ALL),
    "node.processes.logs": (5, PRIVATE),
    "node.processes.memory_order": (2, KERNEL),
    "node.processes.memory_watch": (1, KERNEL),
    "node.storage.mounts": (5, "an image, a loop device or a mount point: " + PRIVATE),
    "node.processes.guest_records": (6, PRIVATE),
    "node.supervisor.office_lock": (2, OF_ALL + "; or in a folder of root's"),
    "node.priority": (2, KERNEL),
    "node.processes.procs": (3, KERNEL),
    "node.storage.project_quota": (2, PRIVATE),
    "node.storage.publish_door": (2, PRIVATE),
    "node.storage.publish": (1, PRIVATE),
    "node.supervisor.service": (1, PRIVATE),
    "node.processes.spawn": (1, KERNEL),
    "node.storage.stores": (2, PRIVATE + ", or a file that was made by descriptor, through /proc/self/fd"),
    "node.storage.stores_work": (17, PRIVATE),
    "node.processes.lease_runtime": (4, PRIVATE),
    "node.storage.volume_folder": (4, PRIVATE),
    "node.sandbox.walls": (1, "of an interpreter that only root and the owner can change; read if it is a file"),
    "wire.cards": (1, KERNEL),
    "wire.open_files": (4, KERNEL),
    "wire.page": (4, PRIVATE + "; guests read theirs"),
    "wire.usage_counters": (2, PRIVATE + ", made before there is a guest; guests open theirs"),
    "wire.unix": (1, "a folder to connect through, of which the owner is looked at by descriptor"),
}
"""Modules that name files by a path that is made at run time: in how many calls, and why that is right."""


def name_of(call: ast.Call) -> str:
    """``os.open``, ``open``, or ``.method``."""
    match call.func:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="os" | "shutil" as module), attr=name):
            return f"{module}.{name}"
        case ast.Attribute(attr=name):
            return f".{name}"
        case _:
            return ""


def is_of_the_system(path: ast.expr) -> bool:
    """Whether the path begins with a text that is a fixed place."""
    first = path.values[0] if isinstance(path, ast.JoinedStr) and path.values else path
    if isinstance(first, ast.Attribute) and first.attr == "devnull":
        return True
    text = first.value if isinstance(first, ast.Constant) else ""
    return isinstance(text, str) and (text == "/" or text.startswith(OF_THE_SYSTEM))


CALLED: Final = {name.rpartition(".")[2] for name in (*OWNER_AND_RIGHTS, *WHOLE_TREES, *FILES, *METHODS)}
MAY_CALL: Final = re.compile(rf"\b(?:{'|'.join(sorted(CALLED))})\s*[()\\#]")
"""What the text of a module has where it calls one of these; most have none, and need not be taken apart."""


def calls_in(node: ast.AST, lines: list[int]) -> Iterator[ast.Call]:
    """Every call within. What none of these lines belongs to holds none that is looked for, and is passed over."""
    for child in ast.iter_child_nodes(node):
        first, last = getattr(child, "lineno", 0), getattr(child, "end_lineno", sys.maxsize)
        for decorator in getattr(child, "decorator_list", ()):
            first = min(first, decorator.lineno)
        at = bisect.bisect_left(lines, first)
        if at < len(lines) and lines[at] <= last:
            if isinstance(child, ast.Call):
                yield child
            yield from calls_in(child, lines)


def by_path(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each call that names a file by a path: its line and what it calls."""
    lines = [source.count("\n", 0, found.start()) + 1 for found in MAY_CALL.finditer(source)]
    for node in calls_in(tree, lines) if lines else ():
        name, words = name_of(node), {word.arg for word in node.keywords}
        if name in OWNER_AND_RIGHTS | WHOLE_TREES:
            inside = bool(node.args) and isinstance(node.args[0], ast.JoinedStr) and is_of_the_system(node.args[0])
            if name in WHOLE_TREES or not inside:
                yield node.lineno, name
        elif name in FILES and not words & {"dir_fd", "src_dir_fd", "dst_dir_fd", "closefd"}:
            if not (node.args and is_of_the_system(node.args[0])):
                yield node.lineno, name
        elif name[:1] == "." and name[1:] in METHODS and len(node.args) < 2 and "dir_fd" not in words:
            yield node.lineno, name


def privileged() -> Iterator[tuple[str, str, ast.Module]]:
    """Each module that root's processes run, once: its name, its source, and that parsed."""
    waiting = [name for name in MODULES if name.startswith(tuple(f"{room}." for room in BEGIN)) or name in BEGIN]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        yield name, MODULES[name].text, MODULES[name].tree
        for found in house_imports_of(name):
            if not found.type_only and found.imported in MODULES and found.imported not in seen:
                seen.add(found.imported)
                waiting.append(found.imported)


@functools.cache  # not while tests are collected, which every process of a run does
def calls_by_path() -> dict[str, list[tuple[int, str]]]:
    found = {name: list(by_path(source, tree)) for name, source, tree in privileged()}
    return dict(sorted(found.items()))


def test_owner_and_rights_are_changed_in_one_module_and_by_descriptor() -> None:
    found = [
        f"{name}:{line}: {call}"
        for name, calls in calls_by_path().items()
        for line, call in calls
        if call in OWNER_AND_RIGHTS | WHOLE_TREES and name != CHANGES_OWNER
    ]
    assert not found, "call by_descriptor.change, or os.fchown and os.fchmod"


def test_files_are_named_by_path_only_where_that_is_known_to_be_right() -> None:
    found = [
        f"{name}:{line}: {call}"
        for name, calls in calls_by_path().items()
        for line, call in calls
        if call not in OWNER_AND_RIGHTS and name not in ALLOWED
    ]
    assert not found, (
        "open the folder first (by_descriptor.opened_folder) and go on with dir_fd=; where no guest and no other user "
        "can write on the way, say so in ALLOWED"
    )


def test_a_reason_holds_for_the_calls_that_were_looked_at_and_for_no_other() -> None:
    found = {name: sum(call not in OWNER_AND_RIGHTS for _, call in calls_by_path().get(name, ())) for name in ALLOWED}
    assert found == {name: calls for name, (calls, _) in ALLOWED.items()}, (
        "a module that may name files by path does it in another number of calls; see that the reason holds for each"
    )


def test_the_table_names_nothing_that_needs_no_exception() -> None:
    assert [name for name, (calls, reason) in ALLOWED.items() if not calls or not reason] == []


def test_the_tables_name_what_there_is() -> None:
    """A room that was renamed would otherwise leave them without a word, and nothing of it be guarded."""
    rooms = {".".join(name.split(".")[:length]) for name in MODULES for length in (1, 2)}
    assert {*BEGIN, *NEVER} <= rooms
    assert {*ALLOWED, CHANGES_OWNER} <= MODULES.keys()


def test_all_that_root_runs_is_read() -> None:
    """And nothing that it does not: then a table of reasons would be about something else."""
    rooms = {name.partition(".")[0] for name in calls_by_path()}
    assert {"engines", "node", "office", "wire", "lease", "logs", "metrics", "client", "guest"} <= rooms
    assert rooms.isdisjoint(NEVER)
    of_these = {name for name in MODULES if name.partition(".")[0] in ("engines", "node", "office")}
    assert of_these <= calls_by_path().keys()


def found_in(line: str) -> list[tuple[int, str]]:
    source = f"def f():\n    {line}\n"
    return list(by_path(source, ast.parse(source)))


@pytest.mark.parametrize(
    "line",
    [
        "os.chown(path, 1, 1)",
        "os.chown(path, 1, 1, follow_symlinks=False)",
        "os.chmod(os.path.join(home, 'x'), 0o700)",
        "os.chmod(f'{home}/x', 0o700)",
        "shutil.rmtree(home)",
        "open(os.path.join(home, 'x'), 'w')",
        "os.open(path, os.O_RDONLY | os.O_NOFOLLOW)",
        "os.makedirs(home)",
        "os.rename(a, b)",
        "os.unlink(f'{home}/x')",
        "Path(home).write_text('')",
        "Path(home).mkdir()",
    ],
)
def test_a_source_that_breaks_the_rule_is_found(line: str) -> None:
    assert len(found_in(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "os.open(name, FILE, dir_fd=folder)",
        "os.rename(a, b, src_dir_fd=x, dst_dir_fd=y)",
        "open('/proc/self/mountinfo', 'rb')",
        "open(f'/proc/{pid}/stat', 'rb')",
        "os.open(os.devnull, os.O_RDWR)",
        "os.fchown(fd, 1, 1)",
        "os.chmod(f'/proc/self/fd/{fd}', 0o700)",
        "text.replace('a', 'b')",
    ],
)
def test_what_goes_by_descriptor_or_to_the_system_is_not(line: str) -> None:
    assert not found_in(line)
