"""Finds the small mistakes that can be planted in a source: one change of its text each, found through its syntax tree.

Operators are the fields of ``OPERATORS``. Texts, log lines, messages of errors, types, annotations, docstrings and
assertions are left alone. A mutant is known by the text around it, not by its line, so that it stays the same mutant
while its file changes elsewhere.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

__all__ = ["OPERATORS", "Mutant", "Statement", "is_python", "mutants_of", "planted", "probed"]

OPERATORS: Final[dict[str, str]] = {
    "compare": "a comparison is another one: < and <=, > and >=, == and !=, is and is not, in and not in",
    "negate": "the condition of an if, a while or a conditional expression is negated",
    "condition": "one part of an `and` or an `or` is left out",
    "and-or": "`and` is `or`, `or` is `and`",
    "leave-out": "a statement is left out: a call, a raise, an assignment to an attribute or an item, a return",
    "call": "of max, min, abs, sorted, reversed, set, list or tuple only the first argument is left",
    "swap": "two statements, or the first two arguments of a call, stand in each other's place",
    "number": "a number is off by one, or True is False",
    "plus-minus": "+ is -, - is +",
    "except": "an `except` takes every Exception, or every BaseException",
}

COMPARES: Final[dict[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
TURNS_AROUND: Final = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
FIRST_LEFT: Final = frozenset(("max", "min", "abs", "sorted", "reversed", "set", "list", "tuple", "frozenset"))
LOGS: Final = re.compile(r"(^|[._])(log|logger|logging|warn|warnings|print)([._]|$)")
WRITTEN: Final = frozenset(("__repr__", "__str__", "__doc__"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake. ``start`` to ``end`` of the source, in bytes, become ``text``."""

    file: str
    where: str
    """Classes and functions around it, with dots; "module" outside of them."""
    operator: str
    before: str
    after: str
    """What stands there and what is planted, in one line each."""
    statement: str
    """The first line of the statement around it."""
    nth: int
    """1 for the first of those that are alike in everything above."""
    line: int
    start: int
    end: int
    text: str
    reached_by: str
    """The key of the statement, by which the tests are known that reach it; "" outside of functions."""
    source_hash: str
    """Of the function around it; a result counts only as long as this is the same."""

    @property
    def key(self) -> str:
        """What it is called in results and explanations."""
        told = (self.file, self.where, self.operator, self.before, self.after, self.statement, str(self.nth))
        return hashlib.sha256("\0".join(told).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement of a function, known by its text, as a mutant is."""

    where: str
    text: str
    nth: int

    @property
    def key(self) -> str:
        return f"{self.where}:{one_line(self.text)}:{self.nth}"


def one_line(text: str) -> str:
    return " ".join(text.split())


class Source:
    """The text of one file, and where the nodes of its tree stand in it."""

    def __init__(self, text: str) -> None:
        self.bytes = text.encode()
        self.tree = ast.parse(text)
        self.lines = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        return self.lines[line - 1] + column

    def span(self, node: ast.expr | ast.stmt | ast.ExceptHandler) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()


Edit = tuple[str, ast.AST, int, int, str]
"""Operator, node, and the change of the text."""


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Every mistake that can be planted, in the order of the source."""
    source = Source(text)
    found: list[Mutant] = []
    alike: Counter[tuple[str, ...]] = Counter()
    reached = {id(node): statement.key for statement, node in _within_functions(source)}
    for where, statement, around in _statements(source.tree, (), source.tree):
        whole = source.text(around).encode() if isinstance(around, ast.stmt) else source.text(statement).encode()
        hashed = hashlib.sha256(whole).hexdigest()[:12]
        for operator, node, start, end, new in _edits(source, statement):
            before = one_line(source.bytes[start:end].decode())
            first = source.text(statement).splitlines()[0].strip()
            same = (where, operator, before, one_line(new), first)
            alike[same] += 1
            found.append(
                Mutant(
                    file=file,
                    where=where,
                    operator=operator,
                    before=before,
                    after=one_line(new),
                    statement=first,
                    nth=alike[same],
                    line=getattr(node, "lineno", 1),
                    start=start,
                    end=end,
                    text=new,
                    reached_by=reached.get(id(statement), ""),
                    source_hash=hashed,
                )
            )
    return sorted(found, key=lambda one: (one.start, one.end))


def planted(text: str, mutant: Mutant) -> str:
    raw = text.encode()
    return (raw[: mutant.start] + mutant.text.encode() + raw[mutant.end :]).decode()


def is_python(text: str, mutant: Mutant) -> bool:
    """Whether what is planted is Python, and another program than before."""
    try:
        return ast.dump(ast.parse(planted(text, mutant))) != _dumped(text)
    except SyntaxError:
        return False


@functools.lru_cache(maxsize=8)
def _dumped(text: str) -> str:
    return ast.dump(ast.parse(text))


# --------------------------------------------------------------------------------------------- what is looked through


def _statements(node: ast.AST, names: tuple[str, ...], around: ast.AST) -> Iterator[tuple[str, ast.stmt, ast.AST]]:
    """All statements whose text may be changed, with the names around each and the outermost function around it."""
    for body in _bodies(node):
        for child in body:
            if _is_left_alone(child):
                continue
            where = ".".join(names) or "module"
            match child:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    if child.name not in WRITTEN:
                        outermost = around if isinstance(around, Function) else child
                        yield from _statements(child, (*names, child.name), outermost)
                case ast.ClassDef():
                    yield from _statements(child, (*names, child.name), around)
                case _:
                    yield where, child, around
                    yield from _statements(child, names, around)


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if isinstance(body := getattr(node, name, None), list):
            yield body
    for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield handler.body


def _is_left_alone(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Pass() | ast.Global() | ast.Nonlocal():
            return True
        case ast.Expr(value=value):
            call = value.value if isinstance(value, ast.Await) else value
            return isinstance(call, ast.Call) and bool(LOGS.search(ast.unparse(call.func)))
        case ast.If(test=test):
            return ast.unparse(test).endswith("TYPE_CHECKING")
        case ast.Assign(targets=[ast.Name(id=str(name))]):
            return name in ("__all__", "__slots__")
        case _:
            return False


def _own_expressions(node: ast.stmt) -> Iterator[ast.expr]:
    """What stands in the statement itself, not in the statements within it."""
    match node:
        case ast.If(test=test) | ast.While(test=test):
            yield test
        case ast.For(iter=iter) | ast.AsyncFor(iter=iter):
            yield iter
        case ast.With(items=items) | ast.AsyncWith(items=items):
            yield from (item.context_expr for item in items)
        case ast.Match(subject=subject, cases=cases):
            yield subject
            yield from (case.guard for case in cases if case.guard is not None)
        case ast.AnnAssign(value=value):
            if value is not None:
                yield value
        case ast.Raise():
            return  # what an error says
        case ast.Try():
            return
        case _:
            yield from (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("cast", "TypeVar", "NewType"):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _expressions(child)
        elif isinstance(child, ast.keyword):
            yield from _expressions(child.value)
        elif isinstance(child, ast.comprehension):
            for part in (child.iter, *child.ifs):
                yield from _expressions(part)


# ------------------------------------------------------------------------------------------------------ the mistakes


def _edits(source: Source, statement: ast.stmt) -> Iterator[Edit]:
    yield from _left_out(source, statement)
    yield from _swapped_statements(source, statement)
    yield from _widened(source, statement)
    yield from _negated(source, statement)
    is_tuning = _names_a_unit(statement)
    for expression in _own_expressions(statement):
        for node in _expressions(expression):
            yield from _compared(source, node)
            yield from _conditions(source, node)
            yield from _calls(source, node)
            if not is_tuning:
                yield from _numbers(source, node)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add | ast.Sub):
        yield from _between(source, statement, statement.target, statement.value, statement.op, "=")


def _left_out(source: Source, node: ast.stmt) -> Iterator[Edit]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.AugAssign() | ast.Delete():
            pass
        case ast.Return(value=None) | ast.Continue() | ast.Break():
            pass
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            pass
        case _:
            return
    yield "leave-out", node, *source.span(node), "pass"


def _swapped_statements(source: Source, node: ast.stmt) -> Iterator[Edit]:
    """Neighbours of which none ends the block, since to swap those is to leave one out."""
    simple = (ast.Expr, ast.Assign, ast.AugAssign)
    for body in _bodies(node):
        yield from _swaps_in(source, body, simple)


def _swaps_in(source: Source, body: list[ast.stmt], simple: tuple[type[ast.stmt], ...]) -> Iterator[Edit]:
    for one, other in pairwise(body):
        if isinstance(one, simple) and isinstance(other, simple) and not _is_left_alone(one):
            if _is_left_alone(other) or (_stores(one) & _reads(other)) or (_stores(other) & _reads(one)):
                continue
            if not (_does(one) and _does(other)):
                continue
            (start, middle), (after, end) = source.span(one), source.span(other)
            between = source.bytes[middle:after].decode()
            yield "swap", one, start, end, source.text(other) + between + source.text(one)


def _does(node: ast.stmt) -> bool:
    """Whether a statement does something that an order could matter for."""
    return isinstance(node, ast.Expr | ast.AugAssign) or any(isinstance(one, ast.Call) for one in ast.walk(node))


def _stores(node: ast.stmt) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _reads(node: ast.stmt) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _widened(source: Source, node: ast.stmt) -> Iterator[Edit]:
    for handler in node.handlers if isinstance(node, ast.Try) else ():
        if handler.type is not None and (taken := source.text(handler.type)) != "BaseException":
            yield (
                "except",
                handler,
                *source.span(handler.type),
                "BaseException" if taken == "Exception" else "Exception",
            )


def _negated(source: Source, node: ast.stmt) -> Iterator[Edit]:
    tests = [node.test] if isinstance(node, ast.If | ast.While) else []
    for expression in _own_expressions(node):
        for inner in _expressions(expression):
            if isinstance(inner, ast.IfExp):
                tests.append(inner.test)
            elif isinstance(inner, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
                tests += [test for generator in inner.generators for test in generator.ifs]
    for test in tests:
        match test:
            case ast.Compare(ops=[op]) if isinstance(op, TURNS_AROUND):
                continue  # planted as a comparison
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "negate", test, *source.span(test), f"({source.text(operand)})"
            case _:
                yield "negate", test, *source.span(test), f"(not ({source.text(test)}))"


def _compared(source: Source, node: ast.expr) -> Iterator[Edit]:
    if not isinstance(node, ast.Compare):
        return
    for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
        old, new = COMPARES[type(op)]
        start, end = source.span(left)[1], source.span(right)[0]
        between = source.bytes[start:end].decode()
        if "#" not in between and (found := re.search(old, between)):
            yield "compare", node, start + found.start(), start + found.end(), new


def _conditions(source: Source, node: ast.expr) -> Iterator[Edit]:
    if not isinstance(node, ast.BoolOp):
        return
    word = " and " if isinstance(node.op, ast.And) else " or "
    texts = [f"({source.text(value)})" for value in node.values]
    for number, value in enumerate(node.values):
        rest = texts[:number] + texts[number + 1 :]
        yield "condition", value, *source.span(node), f"({word.join(rest)})"
    yield "and-or", node, *source.span(node), f"({(' or ' if word == ' and ' else ' and ').join(texts)})"


def _calls(source: Source, node: ast.expr) -> Iterator[Edit]:
    match node:
        case ast.Call(func=ast.Name(id=str(name)), args=[first, *_]) if name in FIRST_LEFT:
            if not isinstance(first, ast.Starred) and not (name in ("max", "min") and len(node.args) == 1):
                yield "call", node, *source.span(node), f"({source.text(first)})"
        case ast.Call(args=[first, second, *_]):
            words = source.text(first), source.text(second)
            if isinstance(first, ast.Starred) or isinstance(second, ast.Starred) or words[0] == words[1]:
                return
            if ast.unparse(node.func) in ("isinstance", "getattr", "setattr", "hasattr", "issubclass"):
                return
            (start, middle), (after, end) = source.span(first), source.span(second)
            yield "swap", node, start, end, words[1] + source.bytes[middle:after].decode() + words[0]
        case _:
            pass


def _numbers(source: Source, node: ast.expr) -> Iterator[Edit]:
    match node:
        case ast.Constant(value=bool(value)):
            yield "number", node, *source.span(node), str(not value)
        case ast.Constant(value=int(value)):
            yield "number", node, *source.span(node), f"{value + 1}"
        case ast.Constant(value=float(value)):
            yield "number", node, *source.span(node), f"{value + 1.0}"
        case ast.BinOp(op=ast.Add() | ast.Sub() as op) if not _is_text(node.left) and not _is_text(node.right):
            yield from _between(source, node, node.left, node.right, op, "")
        case _:
            pass


def _between(
    source: Source, node: ast.AST, left: ast.expr, right: ast.expr, op: ast.operator, tail: str
) -> Iterator[Edit]:
    old, new = ("+", "-") if isinstance(op, ast.Add) else ("-", "+")
    start, end = source.span(left)[1], source.span(right)[0]
    between = source.bytes[start:end].decode()
    if "#" not in between and (at := between.find(old + tail)) >= 0:
        yield "plus-minus", node, start + at, start + at + 1, new


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _names_a_unit(node: ast.stmt) -> bool:
    """A time or a size that the module settles on by judgement: one more or less of it breaks no promise."""
    match node:
        case ast.AnnAssign(target=ast.Name(id=str(name))) | ast.Assign(targets=[ast.Name(id=str(name))]):
            return bool(re.search(r"_(S|NS|MS|BYTES|B)(_MAX|_MIN)?$", name))
        case _:
            return False


# ------------------------------------------------------------------------------------------- which lines a test reaches


def _within_functions(source: Source) -> Iterator[tuple[Statement, ast.stmt]]:
    alike: Counter[tuple[str, str]] = Counter()
    for where, node, around in _statements(source.tree, (), source.tree):
        if isinstance(around, Function):
            first = source.text(node).splitlines()[0].strip()
            alike[where, first] += 1
            yield Statement(where=where, text=first, nth=alike[where, first]), node


def probed(text: str, first: int) -> tuple[str, list[str]]:
    """The source with a mark before each statement of its functions, and the statements' keys from ``first`` on."""
    source = Source(text)
    tree = source.tree
    wanted = {id(node): statement.key for statement, node in _within_functions(source)}
    keys: list[str] = []
    for node in list(ast.walk(tree)):
        for body in _bodies(node):
            marked: list[ast.stmt] = []
            for child in body:
                if id(child) in wanted:
                    marked += ast.parse(f"_reached_[{first + len(keys)}] = 1").body
                    keys.append(wanted[id(child)])
                marked.append(child)
            body[:] = marked
    before = 0  # its docstring and what it imports from __future__
    while isinstance(child := tree.body[before], ast.Expr) or ast.unparse(child).startswith("from __future__"):
        before += 1
    tree.body[before:before] = ast.parse("from _reached import REACHED as _reached_").body
    return ast.unparse(ast.fix_missing_locations(tree)), keys
