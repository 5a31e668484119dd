"""The map: imports point up the list, never down, so that the law knows no office and an office no node's insides.

A *room* is a file or folder directly below ``sublet``, or a part of ``state/``, ``office/`` and ``node/``. A module may
import from its own room and from rooms earlier in the list; imports inside functions and below
``if TYPE_CHECKING`` count, since they are knowledge too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Final

import pytest

import sublet
from tests.unit.package_source import LOOKS_AT_SOURCE, SOURCE, source_files

pytestmark = LOOKS_AT_SOURCE

PROGRAMS: Final = ("training", "jobs", "notebook", "studio")
FACE: Final = "(face)"
"""``import sublet`` itself, the public face. Who stands after it in the list may use it as any user does."""

NODE: Final = ("node", "node.sandbox", "node.storage", "node.processes")
"""What the supervisor puts together."""

LIST: Final[tuple[tuple[str, ...], ...]] = (
    ("lease_end", "values", "errors", "clock", "invocation", "background", "settings", "lazy_dataclass"),
    ("wire",),
    ("lease",),
    ("logs", "metrics"),
    ("state",),
    ("durable",),  # a written name: checkpoints call the functions of ``durable.rebuild`` by it
    ("state.transfer",),
    ("state.checkpoints",),
    ("state.replicated",),
    ("replicated",),
    ("office.ledger",),
    ("office.journal",),
    ("office",),
    ("office.api",),
    NODE,
    ("node.supervisor",),
    ("devices",),
    ("node.agent",),
    ("supervisor", "agent"),  # old names, for a supervisor of the version before
    ("guest",),
    ("client",),
    ("aio",),
    ("compute",),
    (FACE,),
    PROGRAMS,
    ("engines",),
    ("simulate",),
    ("testing",),
    ("cli",),
    ("__main__",),
)
RANK: Final = {room: rank for rank, rooms in enumerate(LIST) for room in rooms}
HOUSEHOLDS: Final = (frozenset(LIST[0]), frozenset(NODE))
"""Rooms of equal rank that may know each other. Equal rank is otherwise a wall: so it is for the four programs."""

NEVER: Final[dict[str, tuple[frozenset[str], str]]] = {
    **{
        part: (
            frozenset({"office", "node", "node.agent", "guest", "client"}),
            "these five share wire/ and nothing else",
        )
        for part in ("office", "node", "node.agent", "guest", "client")
    },
    **{
        program: (
            frozenset({"office", "node", "devices", "node.agent", "guest"}),
            "the programs users meet stand on the public API: client/, compute/ and `import sublet`",
        )
        for program in PROGRAMS
    },
}
"""Walls that the order alone does not build: room → the rooms it never imports, and why."""

STDLIB_ONLY: Final = (
    "lease_end",
    "values",
    "errors",
    "clock",
    "invocation",
    "background",
    "settings",
    "lazy_dataclass",
    "wire",
    "lease",
    *NODE,
    "node.supervisor",
)
NOT_STDLIB: Final = {
    "wire.http": "msgspec types of the HTTP part, used by office and client only",
    "wire.http_views": "the same, those that only show",
    "wire.decoders": "the decoders of these, made one at a time",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exemption:
    importer: str
    imported: str
    type_only: bool
    reason: str


EXEMPT: Final = (
    Exemption(
        importer="aio",
        imported="jobs.aio",
        type_only=False,
        reason="sublet.aio.jobs is the twin of sublet.jobs, loaded on use",
    ),
    Exemption(
        importer="notebook.mapped",
        imported="jobs",
        type_only=False,
        reason="`%%gpu --map` is a burst, through the public sublet.jobs as any program's",
    ),
    Exemption(
        importer="notebook.cells",
        imported="studio",
        type_only=False,
        reason="a kernel with SUBLET_SESSION holds its session through the public sublet.studio, as any program may",
    ),
    Exemption(
        importer="notebook.cell_terms",
        imported="studio",
        type_only=True,
        reason="what a cell does not say is as the session's public Terms have it",
    ),
    Exemption(
        importer="notebook.cells",
        imported="jobs",
        type_only=True,
        reason="what a mapped cell has finished is a public MemoryOutputStore",
    ),
    Exemption(
        importer="node.supervisor.real_hardware",
        imported="node.agent.clean_card",
        type_only=False,
        reason="a program, run in a forked copy that ends after it: it is started twice for each lease of a card",
    ),
    Exemption(
        importer="client.lease",
        imported="compute.options",
        type_only=False,
        reason="lease.run is the door to compute/, opened on use",
    ),
    Exemption(
        importer="client.aio_lease",
        imported="compute.options",
        type_only=False,
        reason="the same door, awaited",
    ),
    Exemption(
        importer="client.aio_lease",
        imported="compute.aio_calls",
        type_only=False,
        reason="the same door, awaited",
    ),
)
"""Imports that point down all the same. Each is one pair of modules with its reason; a stale one is an error."""

UNTOLD: Final = {
    "durable.rebuild": "the modules in which a user's objects were defined",
    "state.transfer.names": "the same, on the way to another process",
    "guest.calls": "the module of a function that a holder calls",
    "guest.program": "the module of a function that a guest is to run",
    "guest.zygote": "what a warm interpreter is asked to have loaded",
    "cli.burst": "the module that a user names on the command line",
    "notebook.import_hook": "what a user's import statement names",
    "notebook.settings.libraries": "libraries of the user's, from a table",
    "client.home": "modules of Python's own, of which one is there",
    "testing": "the names of its own room, from a table",
    "wire.zygote": "a program that another room names: whoever calls `run_here` imports it",
    "node.supervisor.real_hardware": "what the program that cleans a card needs, before it is run in a forked copy",
}
"""Modules that import what no source tells, each with what that is."""

# ------------------------------------------------------------------------------------------------------- the rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported module, as written in ``importer`` (both without the leading ``sublet.``)."""

    importer: str
    imported: str
    line: int
    type_only: bool

    def __str__(self) -> str:
        return f"sublet.{self.importer}:{self.line} imports sublet.{self.imported}"


def room_of(module: str) -> str:
    part = ".".join(module.split(".")[:2])
    return part if part in RANK else module.partition(".")[0]


def process_of(room: str) -> str:
    """Office and node are one each; the agent lives in the office's process, and is apart from both."""
    return room if room == "node.agent" else room.partition(".")[0]


def verdict(found: Import) -> str | None:
    """Why this import may not be, or None."""
    here, there = room_of(found.importer), room_of(found.imported)
    for room in (here, there):
        if room not in RANK:
            return f"{found}: the room {room!r} is not in the list of DESIGN §8; put it in its place in LIST"
    if here == there or any(_covers(exemption, found) for exemption in EXEMPT):
        return None
    never, reason = NEVER.get(process_of(here), (frozenset(), ""))
    if process_of(there) in never - {process_of(here)}:
        return f"{found}: {reason}"
    if RANK[there] < RANK[here] or any({here, there} <= household for household in HOUSEHOLDS):
        return None
    if RANK[there] == RANK[here]:
        return f"{found}: {here} and {there} stand side by side and do not know each other; share through a room above"
    return f"{found}: that points down the map; move what is shared up, or hand it in as an argument"


def stdlib_verdict(importer: str, imported: str, line: int) -> str | None:
    """``imported`` is a full dotted name here: rooms of standard library only stay so through what they import."""
    if imported.partition(".")[0] in sys.stdlib_module_names:
        return None
    inner = imported.removeprefix("sublet.")
    if inner != imported and room_of(inner) in STDLIB_ONLY and not _is_outside_stdlib(inner):
        return None
    return f"sublet.{importer}:{line} imports {imported}: {room_of(importer)} uses the standard library only"


def _is_outside_stdlib(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in NOT_STDLIB)


def _covers(exemption: Exemption, found: Import) -> bool:
    same_pair = (exemption.importer, exemption.imported) == (found.importer, found.imported)
    return same_pair and (found.type_only or not exemption.type_only)


# -------------------------------------------------------------------------------------------- reading the imports


def all_imports(
    source: str, importer: str, *, is_package: bool = False, tree: ast.Module | None = None
) -> list[tuple[str, int, bool]]:
    """Every imported name in full, with its line and whether only a type checker sees it.

    ``from sublet.lease import value`` gives ``sublet.lease.value``, which may be a module or a name in one; both lie
    in the same room, so the rule need not know. ``import_module("sublet.lease")`` is an import as well, also where the
    name is a constant of the module, or begins with one. What no source tells is ``ANYTHING``. ``tree``: the source,
    parsed.
    """
    package = ["sublet", *importer.split(".")] if importer else ["sublet"]
    if not is_package:
        package = package[:-1]
    children = ast.iter_child_nodes if any(name in source for name in CALLS) else _statements_in
    """Where no expression holds an import, none is looked at: most of a source is expressions."""
    found: list[tuple[str, int, bool]] = []
    parsed = ast.parse(source) if tree is None else tree
    constants = dict(_constants_of(parsed))

    def walk(node: ast.AST, type_only: bool) -> None:
        match node:
            case ast.Import(names=names):
                found.extend((alias.name, node.lineno, type_only) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                base = [*base, *(module.split(".") if module else [])]
                found.extend((".".join([*base, alias.name]), node.lineno, type_only) for alias in names)
                found.extend(
                    (ANYTHING, node.lineno, type_only) for alias in names if alias.asname and alias.name in CALLS
                )
            case ast.Call(func=func, args=[named, *more]) if _is_import_call(func):
                found.append((_told(named, constants), node.lineno, type_only))
                for argument in more:
                    walk(argument, type_only)
            case ast.If(test=test, body=body, orelse=orelse) if _is_type_checking(test):
                for statement in body:
                    walk(statement, True)
                for statement in orelse:
                    walk(statement, type_only)
            case _:
                for child in children(node):
                    walk(child, type_only)

    walk(parsed, False)
    return found


CALLS: Final = ("import_module", "__import__", "run_module", "run_here")
"""What imports a module by its name; the last one to run it as a program in a forked copy."""
ANYTHING: Final = "sublet.*"
"""In the place of a name that no source tells."""


def _told(named: ast.expr, constants: dict[str, str]) -> str:
    """The module that a call names, or the part of its name that is told."""
    match named:
        case ast.Constant(value=str(name)):
            return name
        case ast.Name(id=name):
            return constants.get(name, ANYTHING)
        case ast.JoinedStr(values=[ast.Constant(value=str(begins)), *_]) if begins.count(".") > 1:
            return begins.rpartition(".")[0]
        case _:
            return ANYTHING


def _constants_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of a module that stand for one text."""
    for statement in tree.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))):
                yield name, text
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                yield name, text
            case _:
                pass


def _statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """Those of a block, with the handlers and cases that hold further ones."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        yield from getattr(node, name, ())


def _is_import_call(func: ast.expr) -> bool:
    return ast.unparse(func).rpartition(".")[2] in CALLS


def _is_type_checking(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(value=ast.Name(id="typing"), attr="TYPE_CHECKING"):
            return True
        case _:
            return False


def house_imports(source: str, importer: str) -> list[Import]:
    """The imports of ``sublet`` modules, named by module; ``from sublet import connect`` is the face's."""
    return _of_the_house(importer, all_imports(source, importer))


def _of_the_house(importer: str, imports: Iterable[tuple[str, int, bool]]) -> list[Import]:
    found = []
    for name, line, type_only in imports:
        if name == ANYTHING or name == "sublet.__version__":
            continue  # the one name of the face that belongs to everybody: it costs no import
        if name == "sublet" or (name.startswith("sublet.") and not _is_in_the_house(name)):
            imported = FACE
        elif name.startswith("sublet."):
            imported = _module_part(name.removeprefix("sublet."))
        else:
            continue
        found.append(Import(importer=importer, imported=imported, line=line, type_only=type_only))
    return found


@functools.cache
def _is_in_the_house(name: str) -> bool:
    """Whether ``sublet.x`` names a room (a known or a new one), not something the face fetches from one."""
    room = name.split(".")[1]
    return room in RANK or (SOURCE / room).is_dir() or (SOURCE / f"{room}.py").is_file()


@functools.cache
def _module_part(name: str) -> str:
    """``lease.value.HolderNews`` → ``lease.value``, as far as the files tell; else the name as it stands."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:length])
        if path.is_dir() or path.with_suffix(".py").is_file():
            return ".".join(parts[:length])
    return name


# ------------------------------------------------------------------------------------------------------- the house


MODULES: Final = {file.module: file for file in source_files() if file.module}
"""By their names; the face itself is left out, it is a table."""


@functools.cache
def imports_of(module: str) -> tuple[tuple[str, int, bool], ...]:
    file = MODULES[module]
    return tuple(all_imports(file.text, module, is_package=file.is_package, tree=file.tree))


def house_imports_of(module: str) -> list[Import]:
    return _of_the_house(module, imports_of(module))


def test_imports_point_up_the_map() -> None:
    wrong = [text for module in MODULES for one in house_imports_of(module) if (text := verdict(one))]
    assert not wrong, "\n".join(wrong)


def test_the_centre_uses_the_standard_library_only() -> None:
    centre = [module for module in MODULES if room_of(module) in STDLIB_ONLY and not _is_outside_stdlib(module)]
    exempt = {(exemption.importer, f"sublet.{exemption.imported}") for exemption in EXEMPT}
    imported = ((module, name, line) for module in centre for name, line, _ in imports_of(module) if name != ANYTHING)
    found = (one for one in imported if one[:2] not in exempt)
    wrong = [text for one in found if (text := stdlib_verdict(*one))]
    assert not wrong, "\n".join(wrong)


def loads(statements: list[ast.stmt]) -> Iterator[str]:
    """The modules of the house that are loaded while a module with these statements is."""
    for one in statements:
        match one:
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.startswith("sublet."):
                yield from (_module_part(f"{module}.{alias.name}".removeprefix("sublet.")) for alias in names)
            case ast.Import(names=names):
                yield from (alias.name.removeprefix("sublet.") for alias in names if alias.name.startswith("sublet."))
            case ast.If(test=test, body=body, orelse=orelse):
                yield from loads([*([] if _is_type_checking(test) else body), *orelse])
            case ast.Try(body=body) | ast.With(body=body) | ast.ClassDef(body=body):
                yield from loads(body)
            case _:
                pass


def circle_in(trees: dict[str, ast.Module]) -> list[str]:
    """Modules that load each other, if there are any: which of them is imported first decides whether it works."""
    loaded = {name: {other for other in loads(tree.body) if other != name} for name, tree in trees.items()}
    try:
        TopologicalSorter(loaded).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_is_loaded_in_a_circle() -> None:
    assert circle_in({name: file.tree for name, file in MODULES.items()}) == []


@pytest.mark.parametrize(
    ("one", "other", "is_circle"),
    [
        ("from sublet.lease import node", "from sublet.lease.holder import Holder", True),
        ("if True:\n    import sublet.lease.node", "from sublet.lease.holder import Holder", True),
        ("if TYPE_CHECKING:\n    from sublet.lease import node", "from sublet.lease.holder import Holder", False),
        ("def late():\n    from sublet.lease import node", "from sublet.lease.holder import Holder", False),
        ("from sublet.lease import node", "from sublet.lease import policy", False),
    ],
)
def test_a_circle_is_noticed(one: str, other: str, is_circle: bool) -> None:
    assert bool(circle_in({"lease.holder": ast.parse(one), "lease.node": ast.parse(other)})) is is_circle


def test_every_room_of_the_list_is_there() -> None:
    """One that was renamed would otherwise take its walls along without a word."""
    there = {room_of(module) for module in MODULES} | {FACE}
    assert {*RANK} <= there
    assert {room for never, _ in NEVER.values() for room in never} | {*NEVER} <= {*map(process_of, there)}
    assert {*STDLIB_ONLY} <= there
    assert {*NOT_STDLIB} <= {*MODULES}


def test_every_exemption_is_still_needed() -> None:
    for exemption in EXEMPT:
        found = house_imports_of(exemption.importer)
        assert any(_covers(exemption, one) for one in found), f"nobody uses {exemption}; take it out"


def test_what_no_source_tells_is_imported_where_a_reason_is_given() -> None:
    """A name in a variable hid what it imported: a program of the agent's loaded the room of the supervisor."""
    untold = {module for module in MODULES if any(name == ANYTHING for name, _, _ in imports_of(module))}
    assert untold == UNTOLD.keys()


def test_every_module_imports_and_has_what_it_promises() -> None:
    """A name in ``__all__`` that is not there fails a user, not us."""
    wrong = [f"{module}: {why}" for module in MODULES if module != "__main__" and (why := broken_promise(module))]
    assert not wrong, "\n".join(wrong)


def broken_promise(module: str) -> str | None:
    try:
        loaded = importlib.import_module(f"sublet.{module}")
    except Exception as error:
        return f"cannot be imported: {error!r}"
    names = getattr(loaded, "__all__", [])
    if len(set(names)) != len(names):
        return "a name stands twice in __all__"
    missing = [name for name in names if not hasattr(loaded, name)]
    return f"promises {', '.join(missing)} and does not have them" if missing else None


def test_the_face_has_what_it_promises() -> None:
    assert {*sublet._LAZY, *sublet._LAZY_MODULES} == {*sublet.__all__} - {"__version__"}
    for name in sublet.__all__:
        assert getattr(sublet, name) is not None
        assert name in dir(sublet)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        sublet.__getattr__("nonsense")


# ------------------------------------------------------------------------- the rule itself, on small made-up sources


def judge(source: str, importer: str) -> list[str]:
    return [text for one in house_imports(source, importer) if (text := verdict(one))]


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("office.ledger.ledger", "from sublet.lease.value import HolderNews"),
        ("office.ledger.ledger", "from sublet.office.ledger import records"),
        ("office.ledger.ledger", "from . import records"),
        ("office.ledger.ledger", "from .records import LeaseRecord"),
        ("office.ledger.ledger", "from ...lease.value import HolderNews"),
        ("office.ledger.ledger", "import sublet.wire.orders"),
        ("office.ledger.ledger", "from sublet import __version__"),
        ("office.ledger.ledger", "import json, sqlite3"),
        ("node.storage.stores", "from sublet.node.processes.lease_runtime import LeaseRuntime"),
        ("errors", "from sublet.values import LeaseId"),
        ("errors", "if TYPE_CHECKING:\n    from sublet.lease_end import LeaseEnd"),
        ("jobs.executor", "import sublet"),
        ("jobs.executor", "from sublet import connect"),
        ("cli.demo", "from sublet.engines import local"),
    ],
)
def test_the_rule_lets_an_import_pass(importer: str, source: str) -> None:
    assert judge(source, importer) == []


@pytest.mark.parametrize(
    ("importer", "source", "why"),
    [
        ("lease.value", "from sublet.office.ledger.ledger import Ledger", "points down"),
        ("lease.value", "import sublet.office", "points down"),
        ("lease.value", "from sublet import office", "points down"),
        ("lease.value", "from ..office import ledger", "points down"),
        ("lease.value", "def late():\n    import sublet.office.ledger.ledger", "points down"),
        ("lease.value", "if TYPE_CHECKING:\n    from sublet.office.ledger import ledger", "points down"),
        ("lease.value", "try:\n    import sublet.cli\nexcept ImportError: pass", "points down"),
        ("lease.value", "importlib.import_module('sublet.cli')", "points down"),
        ("lease.value", "it = __import__('sublet.cli')", "points down"),
        ("lease.value", "import_module(f'sublet.cli.{name}')", "points down"),
        ("lease.value", "CLI: Final = 'sublet.cli'\ndef late():\n    import_module(CLI).main()", "points down"),
        (
            "node.agent.rehearsal",
            "SPAWN = 'sublet.node.processes.spawn'\nrun = importlib.import_module(SPAWN).run_to_end",
            "share wire/ and nothing else",
        ),
        ("node.agent.health", "run_here('sublet.node.sandbox.trial', (), 1, needed='')", "share wire/"),
        ("lease.value", "import sublet", "points down"),
        ("lease.value", "from sublet import connect", "points down"),
        ("errors", "from sublet.lease.value import rfc3339", "points down"),
        ("errors", "if TYPE_CHECKING:\n    from sublet.lease.value import HolderNews", "points down"),
        (
            "node.agent.supervised",
            "from sublet.office.ledger.records import LeaseRecord",
            "share wire/ and nothing else",
        ),
        ("client.leases", "from sublet.node.agent import supervised", "share wire/ and nothing else"),
        ("office.api.service", "from sublet.node.agent import supervised", "share wire/ and nothing else"),
        ("jobs.executor", "from sublet.training import run_training_step", "do not know each other"),
        ("studio.people", "from sublet.office.ledger import ledger", "stand on the public API"),
        ("office.ledger.ledger", "from sublet.office.journal import journal", "points down"),
        ("office.driver", "from sublet.office.api import service", "points down"),
        ("office.journal.backup", "import sublet.office.driver", "points down"),
        ("node.storage.stores", "from sublet.node.supervisor import service", "points down"),
        ("node.supervisor.service", "from sublet.node.agent import nvml", "share wire/ and nothing else"),
        ("attic.junk", "from sublet import values", "not in the list"),
    ],
)
def test_the_rule_catches_an_import_that_points_down(importer: str, source: str, why: str) -> None:
    wrong = judge(source, importer)
    assert len(wrong) == 1
    assert why in wrong[0]


@pytest.mark.parametrize("source", ["import_module(name)", "__import__(f'{room}.x')", "x = import_module(TABLE[name])"])
def test_a_name_that_no_source_tells_is_noticed(source: str) -> None:
    assert all_imports(source, "lease.value") == [(ANYTHING, 1, False)]


def test_nor_does_another_name_for_the_call_hide_it() -> None:
    assert (ANYTHING, 1, False) in all_imports("from importlib import import_module as get", "lease.value")


def test_the_rule_names_the_line() -> None:
    [wrong] = judge("import json\n\nimport sublet.cli", "lease.value")
    assert wrong.startswith("sublet.lease.value:3 imports sublet.cli")


@pytest.mark.parametrize(
    "name", ["json", "collections.abc.Iterator", "sublet.values.LeaseId", "sublet.wire.orders.Order"]
)
def test_the_centre_may_use_the_standard_library_and_itself(name: str) -> None:
    assert stdlib_verdict("lease.value", name, 1) is None


@pytest.mark.parametrize(
    "name", ["msgspec", "msgspec.json", "numpy", "sublet.wire.http.Acquire", "sublet.metrics", "sublet"]
)
def test_the_centre_may_use_nothing_else(name: str) -> None:
    assert stdlib_verdict("lease.value", name, 7) is not None
