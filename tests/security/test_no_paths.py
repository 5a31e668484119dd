"""The privileged part changes nothing by a path on which a guest may have put something else in between.

It reads the source of the supervisor, which runs as root. Owner and rights are changed in one module alone, by
descriptor. What opens, makes, moves or removes files goes from a descriptor (``dir_fd``), or names a fixed place of the
system, or stands in a table with the reason why no guest and no other user can write on the way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet.supervisor

SUPERVISOR = Path(sublet.supervisor.__file__).parent
CHANGES_OWNER = "by_descriptor.py"

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
METHODS = {"chmod", "lchmod", "mkdir", "rename", "rmdir", "symlink_to", "touch", "unlink", "write_bytes", "write_text"}
"""Of ``pathlib``, which the supervisor does without."""
OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/", "/usr")

PRIVATE = "below the state or the runtime folder, up to the last name: both are 0700, and so is what lies above"
BEHIND = "in the child behind its new root, where it has no rights that a guest has not"
KERNEL = "in /proc or a file system of control groups, where nobody can put a link"
ALLOWED = {
    "__main__.py": PRIVATE,
    "aside.py": PRIVATE,
    "cgroups_places.py": KERNEL,
    "copying_work.py": PRIVATE,
    "handed_files.py": PRIVATE,
    "launch.py": KERNEL,
    "locks.py": "with O_NOFOLLOW in a sticky folder of root's, and owner, kind and number of names are looked at",
    "logs.py": PRIVATE,
    "memory_order.py": KERNEL,
    "memory_watch.py": KERNEL,
    "mounts.py": "an image, a loop device or a mount point: " + PRIVATE,
    "notes.py": PRIVATE,
    "priority.py": KERNEL,
    "procs.py": KERNEL,
    "project_quota.py": PRIVATE,
    "publish_door.py": PRIVATE,
    "publishing_work.py": PRIVATE,
    "segment.py": "a file that was made by descriptor, through /proc/self/fd, or " + PRIVATE,
    "service.py": PRIVATE,
    "spawn.py": KERNEL,
    "stores.py": PRIVATE,
    "stores_work.py": PRIVATE,
    "tenancy.py": PRIVATE,
    "volume_folder.py": PRIVATE,
    "walls.py": "of an interpreter that only root and the owner can change; read if it is a file, and not waited for",
    "isolation/enter.py": KERNEL,
    "isolation/landlock.py": BEHIND,
    "isolation/probe.py": BEHIND,
    "isolation/root.py": BEHIND,
    "isolation/uids.py": PRIVATE,
}
"""Modules that name files by a path that is made at run time, and why that is right."""


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


def by_path(source: str) -> Iterator[tuple[int, str]]:
    """Each call that names a file by a path: its line and what it calls."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
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


SOURCES = {str(path.relative_to(SUPERVISOR)): path.read_text() for path in sorted(SUPERVISOR.rglob("*.py"))}


@pytest.mark.parametrize("name", SOURCES)
def test_owner_and_rights_are_changed_in_one_module_and_by_descriptor(name: str) -> None:
    found = [
        f"{name}:{line}: {call}" for line, call in by_path(SOURCES[name]) if call in OWNER_AND_RIGHTS | WHOLE_TREES
    ]
    assert name == CHANGES_OWNER or not found, f"{found}: call by_descriptor.change, or os.fchown and os.fchmod"


@pytest.mark.parametrize("name", SOURCES)
def test_files_are_named_by_path_only_where_that_is_known_to_be_right(name: str) -> None:
    found = [f"{name}:{line}: {call}" for line, call in by_path(SOURCES[name]) if call not in OWNER_AND_RIGHTS]
    assert name in ALLOWED or not found, (
        f"{found}: open the folder first (by_descriptor.opened_folder) and go on with dir_fd=; where no guest and no "
        "other user can write on the way, say so in ALLOWED"
    )


def test_the_table_names_nothing_that_needs_no_exception() -> None:
    assert [name for name in ALLOWED if name not in SOURCES or not any(by_path(SOURCES[name]))] == []


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
    assert len(list(by_path(f"def f():\n    {line}\n"))) == 1


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
    assert not list(by_path(f"def f():\n    {line}\n"))
