"""Analyses a cell's text for the names it reads and binds, which must travel before it runs.

The answer errs on one side only. A name that is *not* listed is not read before the cell has bound it, whatever way the
cell takes; a name that is listed may turn out not to be needed. Where a text can reach any name there is (``exec``,
``globals()``), that is said with its line, and it is for the caller to send everything or to refuse.

Functions that are called may read more: ``names_of`` tells that of a code object, and what follows objects asks it of
every function it meets.
"""

from __future__ import annotations

import ast
import dis
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from types import CodeType
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.notebook.lookups import NO_LOOKUPS, Lookups, lookups_of
from sublet.notebook.scopes import NameScope, Opaque, code_of, magic_of, outside, stored

__all__ = ["Opaque", "Reading", "names_of", "names_set_by", "read_cell"]

CODES_MAX: Final = 4096
"""Functions whose names are remembered: each cell asks again for all that it sends."""
CELLS_MAX: Final = 16
"""Cells whose reading is remembered: each is asked for before its lease and after it."""
OF_ALL: Final = frozenset({"exec", "eval", "globals", "locals"})
"""Calls that can look up or bind any name."""
OF_NONE: Final = frozenset({"vars", "dir"})
"""The same, without an argument; with one they look at that."""
RUNS_CODE: Final = frozenset({"time", "timeit", "prun", "capture", "memit", "mprun"})
"""Magics whose line or body is code of this very namespace."""
DESCRIBES: Final = frozenset({"pinfo", "pinfo2", "pdef", "pdoc", "pfile", "psource"})
"""Magics that describe one object: their line, as in ``f.x?``, is an expression."""
HARMLESS: Final = frozenset(
    {
        "matplotlib",
        "config",
        "cd",
        "pwd",
        "ls",
        "env",
        "pip",
        "conda",
        "precision",
        "pprint",
        "load_ext",
        "reload_ext",
        "autoreload",
        "set_env",
        "system",
        "sx",
        "cat",
        "xmode",
        "lsmagic",
    }
)
"""Magics that read no variable."""
OTHER_TEXT: Final = frozenset(
    {
        "bash",
        "sh",
        "script",
        "perl",
        "ruby",
        "writefile",
        "html",
        "HTML",
        "javascript",
        "js",
        "latex",
        "markdown",
        "svg",
    }
)
"""Magics whose body is no Python, and is taken as it stands."""
_EXPANDED: Final = re.compile(r"\{([^{}]+)\}|\$\$?([A-Za-z_]\w*)")
"""What IPython puts in place of variables within a command."""
_NO_CODE: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
_GLOBAL_OPS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a text does with the names outside it."""

    reads: frozenset[str]
    """May be read before the text has bound them."""
    binds: frozenset[str]
    """May be bound or deleted by it."""
    deletes: frozenset[str] = frozenset()
    """May be deleted by it and are not read, so that it does not matter what they have."""
    opaque: tuple[Opaque, ...] = ()
    lookups: Lookups = NO_LOOKUPS
    """Functions that it calls which look names up in strings."""
    maybe: frozenset[str] = frozenset()
    """Names that stand in strings, and that are there: sent if they can be."""
    requested: frozenset[str] | None = None
    """Where ``reads`` has only names that are there: those that are not as well; None: any may be."""
    is_quiet: bool = False
    """It ends in a semicolon: what its last line gives is not wanted."""


@lru_cache(CELLS_MAX)
def read_cell(source: str) -> Reading:
    """Of a cell, as Python: what IPython makes of it. Raises ``SyntaxError`` as Python does."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree: ast.Module = compile(source, "<cell>", "exec", flags, dont_inherit=True)
    compile(tree, "<cell>", "exec", flags & ~ast.PyCF_ONLY_AST, dont_inherit=True)  # a return outside a function, say
    reader = _Reader()
    reader.block(tree.body)
    return Reading(
        reads=frozenset(reader.reads),
        binds=frozenset(reader.binds),
        deletes=frozenset(reader.deletes - reader.reads),
        opaque=tuple(reader.opaque),
        lookups=lookups_of(tree).joined(reader.lookups),
        is_quiet=_ends_quietly(source),
    )


def _ends_quietly(source: str) -> bool:
    if ";" not in source:
        return False
    tokens = [one for one in tokenize.generate_tokens(io.StringIO(source).readline) if one.type not in _NO_CODE]
    return bool(tokens) and tokens[-1].string == ";"


@lru_cache(CODES_MAX)
def names_of(code: CodeType) -> tuple[frozenset[str], bool]:
    """The global names that a function reads or binds, with those of functions within it; and whether it may reach
    any."""
    found: set[str] = set()
    for one in _codes(code):
        for instruction in dis.get_instructions(one):
            if instruction.opname in _GLOBAL_OPS:
                found.add(str(instruction.argval))
    return frozenset(found), not found.isdisjoint(OF_ALL | {"get_ipython"})


def names_set_by(code: CodeType) -> frozenset[str]:
    """The global names that a function or a function within it binds or deletes."""
    found = {
        str(instruction.argval)
        for one in _codes(code)
        for instruction in dis.get_instructions(one)
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    }
    return frozenset(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class _Reader(ast.NodeVisitor):
    """Goes through the statements as they run, and knows which names are bound for sure at each point."""

    def __init__(self, *, is_class: bool = False) -> None:
        self.reads: set[str] = set()
        self.binds: set[str] = set()
        self.deletes: set[str] = set()
        self.opaque: list[Opaque] = []
        self.lookups: list[Lookups] = []
        """Of texts within it that are run."""
        self._bound: set[str] = set()
        self._is_class = is_class
        """The names of a class's body are not seen by the functions in it."""

    # ---- names ----

    def _read(self, name: str) -> None:
        if name not in self._bound:
            self.reads.add(name)

    def _bind(self, name: str) -> None:
        self.binds.add(name)
        self._bound.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        match node.ctx:
            case ast.Load():
                self._read(node.id)
            case ast.Store():
                self._bind(node.id)
            case _:
                self._delete(node.id)

    def _delete(self, name: str) -> None:
        self.deletes.add(name)  # even if it was bound here: the other side may have it
        self.binds.add(name)
        self._bound.discard(name)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self.visit(node.value)
        self.visit(node.target)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        self._all(node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._bind(alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":  # it binds unknown names, and reads none
                continue
            self._bind(alias.asname or alias.name)

    # ---- ways through ----

    def block(self, statements: Iterable[ast.stmt]) -> None:
        """One after the other."""
        for statement in statements:
            self.visit(statement)

    def _all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def _ways(self, *ways: Callable[[], None]) -> None:
        """One of these happens: afterwards is bound what each of them binds."""
        before, after = self._bound, None
        for way in ways:
            self._bound = set(before)
            way()
            after = self._bound if after is None else after & self._bound
        self._bound = before if after is None else after

    def _perhaps(self, *ways: Callable[[], None]) -> None:
        """These happen, or do not."""
        before = set(self._bound)
        for way in ways:
            self._bound = set(before)
            way()
        self._bound = before

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._ways(lambda: self.block(node.body), lambda: self.block(node.orelse))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._ways(lambda: self.visit(node.body), lambda: self.visit(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._perhaps(lambda: self._all(node.values[1:]))

    def visit_Compare(self, node: ast.Compare) -> None:
        self._all([node.left, node.comparators[0]])
        self._perhaps(lambda: self._all(node.comparators[1:]))

    def _loop(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)

        def once() -> None:
            self.visit(node.target)
            self.block(node.body)

        self._perhaps(once)
        self._perhaps(lambda: self.block(node.orelse))
        self.binds.update(stored(node.target))

    visit_For = visit_AsyncFor = _loop

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._perhaps(lambda: self.block(node.body), lambda: self.block(node.orelse))

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self._all([item.context_expr, item.optional_vars])
        self._perhaps(lambda: self.block(node.body))  # it may swallow an exception in the middle

    visit_With = visit_AsyncWith = _with

    def _try(self, node: ast.Try | ast.TryStar) -> None:
        self._perhaps(
            lambda: self.block([*node.body, *node.orelse]),
            *(partial(self._handler, handler) for handler in node.handlers),
        )
        self.block(node.finalbody)

    visit_Try = visit_TryStar = _try

    def _handler(self, handler: ast.ExceptHandler) -> None:
        self._all([handler.type])
        if handler.name:
            self._bind(handler.name)
        self.block(handler.body)
        if handler.name:  # Python deletes it at the end
            self._delete(handler.name)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self._perhaps(*(partial(self._case, case) for case in node.cases))

    def _case(self, case: ast.match_case) -> None:
        self.visit(case.pattern)
        self._all([case.guard])
        self.block(case.body)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._all([node.pattern])
        if node.name:
            self._bind(node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self._bind(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._all([*node.keys, *node.patterns])
        if node.rest:
            self._bind(node.rest)

    # ---- scopes within ----

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._all([*node.decorator_list, *outside(node.args), node.returns])
        self._inner(node)
        self._bind(node.name)

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._all(outside(node.args))
        self._inner(node)

    def _inner(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """What its body reads it may read at any time from now on: what is bound now may be deleted by then, but that
        is an error in any case."""
        scope = NameScope.of_function(node)
        self._read_within(scope)
        self.binds.update(scope.globals_bound)

    def _read_within(self, scope: NameScope) -> None:
        self.reads |= scope.free if self._is_class else scope.free - self._bound
        self.opaque += scope.opaque

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._all([*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)])
        inner = _Reader(is_class=True)
        inner.block(node.body)
        for name in inner.reads:
            self._read(name)
        self.opaque += inner.opaque
        self.lookups += inner.lookups
        self._bind(node.name)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.visit(node.generators[0].iter)
        scope = NameScope.of_comprehension(node)
        self._read_within(scope)
        self.binds.update(scope.outer_bound)  # by :=, and only if it runs

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    # ---- what reaches any name ----

    def visit_Call(self, node: ast.Call) -> None:
        self._visit_magic_call(node)
        self.generic_visit(node)

    def _visit_magic_call(self, node: ast.Call) -> None:
        magic = magic_of(node)
        if magic is not None:
            self._magic(*magic, node.lineno)
        elif (text := code_of(node)) is not None:
            self._code(text, node.lineno)
        elif isinstance(node.func, ast.Name) and node.func.id in (OF_ALL if node.args else OF_ALL | OF_NONE):
            self.opaque.append(Opaque(f"{node.func.id}()", node.lineno))

    def _magic(self, kind: str, arguments: list[str], line: int) -> None:
        if kind in ("system", "getoutput"):
            self._expanded(" ".join(arguments))
            return
        name, *rest = arguments or [""]
        if name in RUNS_CODE | DESCRIBES:
            for text in rest:
                self._code(text, line)
        elif name in OTHER_TEXT and kind == "run_cell_magic":
            self._expanded(rest[0] if rest else "")
        elif name in HARMLESS:
            self._expanded(" ".join(rest))
        else:
            self.opaque.append(Opaque(f"%{name}" if kind == "run_line_magic" else f"%%{name}", line))

    def _code(self, text: str, line: int) -> None:
        """The line or body of a magic that runs it; its options, which are none, come first."""
        words = text.split()
        while words and words[0].startswith("-"):
            words.pop(0)
        try:
            reading = read_cell(text if "\n" in text else " ".join(words))
        except SyntaxError:
            self.opaque.append(Opaque("a magic whose text is no Python", line))
            return
        for name in reading.reads:
            self._read(name)
        self.binds |= reading.binds
        self.deletes |= reading.deletes
        self.opaque += reading.opaque
        self.lookups.append(reading.lookups)

    def _expanded(self, text: str) -> None:
        for braces, word in _EXPANDED.findall(text):
            try:
                reads = read_cell(braces).reads if braces else {word}
            except SyntaxError:
                continue  # a brace of the shell's
            for name in reads:
                self._read(name)
