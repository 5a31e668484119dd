"""Finds which module names the bodies of functions, classes and comprehensions use."""

from __future__ import annotations

import ast
import contextlib
from typing import NamedTuple


class Opaque(NamedTuple):
    """Something that can reach any name."""

    what: str
    line: int


class NameScope(ast.NodeVisitor):
    """A function or comprehension: which names of the module it uses, whenever it runs."""

    def __init__(self) -> None:
        self.loads: set[str] = set()
        self.locals: set[str] = set()
        self.globals_: set[str] = set()
        self.nonlocals: set[str] = set()
        self.walrus: set[str] = set()
        self.outer_bound: set[str] = set()
        self.globals_bound: set[str] = set()
        self.opaque: list[Opaque] = []
        self._inner: set[str] = set()

    @classmethod
    def of_function(cls, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> NameScope:
        scope = cls()
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        scope.locals.update(argument.arg for argument in every if argument is not None)
        for part in node.body if isinstance(node.body, list) else [node.body]:
            scope.visit(part)
        scope.globals_bound |= scope.globals_ & scope.locals
        return scope

    @classmethod
    def of_comprehension(cls, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> NameScope:
        scope = cls()
        for number, generator in enumerate(node.generators):
            scope.visit(generator.target)
            for part in (*((generator.iter,) if number else ()), *generator.ifs):
                scope.visit(part)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            scope.visit(part)
        scope.outer_bound = scope.walrus
        scope.locals -= scope.walrus - _targets(node)
        return scope

    @property
    def free(self) -> set[str]:
        """Names it takes from outside."""
        return ((self.loads | self._inner) - (self.locals - self.globals_)) | self.globals_

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.loads.add(node.id)
        else:
            self.locals.add(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.walrus.add(node.target.id)
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        self.globals_.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.nonlocals.update(node.names)
        self.loads.update(node.names)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.locals.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)

    visit_Import = visit_ImportFrom = _import

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.locals.update([node.name] if node.name else [])
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.locals.update([node.name] if node.name else [])
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self.locals.update([node.name] if node.name else [])

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.locals.update([node.rest] if node.rest else [])
        self.generic_visit(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, *outside(node.args), node.returns):
            if part is not None:
                self.visit(part)
        self.locals.add(node.name)
        self._take(NameScope.of_function(node))

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for part in outside(node.args):
            if part is not None:
                self.visit(part)
        self._take(NameScope.of_function(node))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(part)
        self.locals.add(node.name)
        inner = NameScope()
        for statement in node.body:
            inner.visit(statement)
        inner.locals.clear()  # its functions do not see them, and what it reads itself may be read before it is bound
        self._take(inner)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.visit(node.generators[0].iter)
        inner = NameScope.of_comprehension(node)
        self.locals |= inner.outer_bound
        self._take(inner)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_Call(self, node: ast.Call) -> None:
        if magic_of(node) is not None:
            self.opaque.append(Opaque("a magic within a function", node.lineno))
        elif (text := code_of(node)) is not None:
            with contextlib.suppress(SyntaxError):
                self.visit(ast.parse(text))
        elif isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval", "globals"):
            self.opaque.append(Opaque(f"{node.func.id}()", node.lineno))
        self.generic_visit(node)

    def _take(self, inner: NameScope) -> None:
        self._inner |= inner.free
        self.globals_bound |= inner.globals_bound
        self.opaque += inner.opaque


def code_of(node: ast.Call) -> str | None:
    """The text of ``eval("x + 1")``: a constant, run in the namespace where the call stands."""
    if not (isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec") and len(node.args) == 1):
        return None
    text = node.args[0]
    return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) and not node.keywords else None


def outside(arguments: ast.arguments) -> list[ast.expr | None]:
    """What of a signature is evaluated where the function is made."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [argument.annotation for argument in every if argument is not None]
    return [*arguments.defaults, *arguments.kw_defaults, *annotations]


def stored(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _targets(node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> set[str]:
    return set().union(*(stored(generator.target) for generator in node.generators))


def magic_of(node: ast.Call) -> tuple[str, list[str]] | None:
    """``get_ipython().run_line_magic("time", "f(x)")`` and its like, as IPython writes what began with % or !."""
    function = node.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call)):
        return None
    shell = function.value.func
    if not (isinstance(shell, ast.Name) and shell.id == "get_ipython"):
        return None
    texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    return function.attr, [text for text in texts if isinstance(text, str)]
