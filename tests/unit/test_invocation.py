"""A command that a message prints can be typed as it stands: `sublet` on the PATH, its path where it is not.

The rule over the source: a text that names a command of ours either is given to ``typed``, or has the command in
backticks, so that the edge that shows it (``typeable``) can find it. What is printed at once must be given to one of
the two there and then.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.cli.table import COMMANDS, GROUPS
from sublet.errors import NotFound
from sublet.invocation import installing, program, typeable, typed
from tests.unit.package_source import LOOKS_AT_SOURCE, source_files

FIRST_WORDS: Final = sorted({*GROUPS, *(path.split()[0] for path in COMMANDS)})
COMMAND: Final = re.compile(rf"\bsublet (?:{'|'.join(FIRST_WORDS)})\b")
IN_BACKTICKS: Final = re.compile(r"`[^`\n]*`")
SHOWING: Final = frozenset({"print", "write"})
"""Calls whose texts a person sees at once. Errors are shown by ``exits``, ``plain`` and ``status``."""
RENDERING: Final = frozenset({"typed", "typeable"})
HELP: Final = frozenset({"Opt", "Arg", "Option", "Argument"})
"""Help texts name the program, as `--help` does in its first line."""
NOT_COMMANDS: Final = {
    ("cli/acquire.py", "sublet lease"): "the name that the holder gives itself in listings",
    ("cli/run.py", "sublet run"): "the same",
    ("cli/session.py", "sublet session"): "the same",
}


# ------------------------------------------------------------------------------------------------------ what is typed


def a_script(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "sublet"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an environment in .venv, entered, and nothing of it on the PATH."""
    a_script(tmp_path / "project" / ".venv" / "bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "project" / ".venv" / "bin" / "python"))
    monkeypatch.setattr(sys, "argv", ["something else"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def test_not_on_the_path_it_is_the_script_beside_the_interpreter(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program() == ".venv/bin/sublet"
    assert typed("sublet lease ls") == ".venv/bin/sublet lease ls"
    monkeypatch.chdir("/")
    assert program() == str(here / ".venv/bin/sublet"), "elsewhere the whole path"


def test_on_the_path_it_is_its_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"/nowhere:{here}/.venv/bin")
    assert program() == "sublet"


def test_a_link_on_the_path_to_this_installation_counts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `uv tool install` and `pipx` put one into ~/.local/bin."""
    local = here / "local"
    local.mkdir()
    (local / "sublet").symlink_to(here / ".venv/bin/sublet")
    monkeypatch.setenv("PATH", str(local))
    assert program() == "sublet"


def test_another_installation_on_the_path_is_not_taken_for_this_one(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(a_script(tmp_path / "other").parent))
    assert program() == ".venv/bin/sublet"


def test_a_script_elsewhere_is_the_one_that_was_started(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --user` with the system's Python: no script lies beside the interpreter."""
    (here / ".venv/bin/sublet").unlink()
    script = a_script(tmp_path / "user bin")
    monkeypatch.setattr(sys, "argv", [str(script), "run"])
    assert program() == f"'{script}'", "quoted, for its space"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert program() == ".venv/bin/python -m sublet"
    monkeypatch.setenv("PATH", str(script.parent))
    assert program() == "sublet"


def test_every_command_in_backticks_is_rendered_and_nothing_else(here: Path) -> None:
    text = "sublet has no `sublets`: see `sublet`, `sublet lease ls` or `%gpu`."
    assert typeable(text) == ("sublet has no `sublets`: see `.venv/bin/sublet`, `.venv/bin/sublet lease ls` or `%gpu`.")
    assert str(NotFound("no lease", do="See `sublet lease ls`.")) == "no lease. See `.venv/bin/sublet lease ls`."
    with pytest.raises(ValueError, match="is no command"):
        typed("ls")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ('{"url": "file:///a%20clone", "dir_info": {}}', "'/a clone[notebook]'"),
        ('{"url": "file:///clone", "dir_info": {"editable": true}}', "--editable '/clone[notebook]'"),
        (
            '{"url": "file:///w/sublet-1-py3-none-any.whl", "archive_info": {}}',
            "'sublet[notebook] @ file:///w/sublet-1-py3-none-any.whl'",
        ),
        (None, "'sublet[notebook]'"),
        ("not json", "'sublet[notebook]'"),
    ],
)
def test_an_extra_is_installed_from_where_this_installation_came_from(
    told: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return told

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Told())
    python = shlex.quote(sys.executable)
    assert installing("jupyterlab", "sublet[notebook]") == f"{python} -m pip install jupyterlab {words}"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert installing("jupyterlab") == f"uv pip install --python {python} jupyterlab"


# --------------------------------------------------------------------------------------------------- the whole source


def faults(nodes: list[ast.AST], name: str) -> Iterator[str]:
    """Texts with a command that no edge would render, among all nodes of a tree."""
    texts = [
        (node, text)
        for node in nodes
        if isinstance(node, ast.Constant | ast.JoinedStr) and COMMAND.search(text := _text_of(node))
    ]
    if not texts:
        return
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}

    def callers(node: ast.AST) -> Iterator[str]:
        while node in parents:
            node = parents[node]
            if isinstance(node, ast.Call):
                function = node.func
                yield function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")

    for node, text in texts:
        if isinstance(parents.get(node), ast.Expr | ast.JoinedStr):  # a docstring, or a part of an f-string
            continue
        around = set(callers(node))
        if around & (RENDERING | HELP):
            continue
        where = f"{name}:{node.lineno}"
        for found in COMMAND.finditer(IN_BACKTICKS.sub("", text)):
            if (name, found[0]) not in NOT_COMMANDS:
                yield f"{where}: {found[0]!r} stands outside backticks and is not given to typed()"
        if around & SHOWING and name.startswith("cli/"):
            yield f"{where}: shown at once, and not given to typeable()"


def _text_of(node: ast.AST) -> str:
    """A string as it is written, with a sign for each value in it."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text_of(part) or "…" for part in parts)
        case _:
            return ""


def test_no_message_installs_an_extra_of_ours_by_its_name_alone() -> None:
    """No index need have it: ``installing`` knows where it came from."""
    wrong = [
        f"{file.name}: {line.strip()}"
        for file in source_files()
        for line in file.text.splitlines()
        if re.search(r"install[^(]*sublet\[", line, re.IGNORECASE) and "installing(" not in line
    ]
    assert [line for line in wrong if "where that kernel is" not in line and "newer" not in line] == []


@LOOKS_AT_SOURCE
def test_every_message_names_commands_so_that_they_can_be_rendered() -> None:
    wrong = [fault for file in source_files() for fault in faults(file.nodes, file.name)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        'print("Ask: sublet lease acquire --gpu 1GiB")',
        'print("See `sublet lease ls`.")',
        'print(f"Ask: sublet lease show {lease}")',
        'text = "Ask: sublet run -- true"',
    ],
)
def test_the_rule_finds_what_it_is_for(line: str) -> None:
    assert list(faults([*ast.walk(ast.parse(line))], "cli/somewhere.py"))


@pytest.mark.parametrize(
    "line",
    [
        "print(f\"Ask: {typed('sublet lease acquire')}\")",
        'print(typeable("See `sublet lease ls`."))',
        'raise NotFound("no lease", do="See `sublet lease ls`.")',
        '"""The first line of `sublet run`."""',
    ],
)
def test_the_rule_lets_pass_what_is_rendered(line: str) -> None:
    assert not list(faults([*ast.walk(ast.parse(line))], "cli/somewhere.py"))


# ------------------------------------------------------------------------------------------------------- really typed


def test_what_a_command_prints_is_typed_into_a_shell_and_works(tmp_path: Path) -> None:
    """Without an activated environment: the office is not on, so `status` says how to start one."""
    script = Path(sys.executable).parent / "sublet"
    assert script.exists()
    project = script.parents[2]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SUBLET_HOME": str(tmp_path / "home"), "LANG": "C.UTF-8"}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "-c", line], cwd=project, env=env, capture_output=True, text=True, timeout=240)

    said = run(f"{shlex.quote(str(script))} status")
    assert said.returncode == 1, said.stdout
    printed = re.findall(r"`([^`]+)`", said.stderr)
    assert printed, said.stderr
    try:
        for line in printed:
            assert line.startswith(f"{script.relative_to(project)} "), said.stderr
            again = run(line)
            assert again.returncode == 0, f"{line}: {again.stderr}"
    finally:
        run(f"{script} down --now")
