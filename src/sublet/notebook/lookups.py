"""Finds names in strings: where a cell calls a function that looks names up in a text, they count as read.

``df.query("a > @limit")`` reads ``limit``, and no syntax tree says so. So where a cell calls one of the functions
below, the words of its string constants, and of the strings that it reads, are compared with the names of the notebook.
A word that is a name is sent if it can be. One that cannot be sent keeps no cell from running: it may be a column.
"""

from __future__ import annotations

import ast
import functools
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any, Final

from sublet.lazy_dataclass import dataclass

TEXT: Final = frozenset(
    {
        *("query", "eval", "evaluate", "re_evaluate"),  # pandas, numexpr
        *("sql", "execute", "from_query", "query_df", "sqldf"),  # DuckDB, pandasql
        *("timeit", "repeat", "Timer", "exec", "get_type_hints", "run_docstring_examples"),
    }
)
"""Functions and methods whose text may name variables."""
DOCTEST: Final = frozenset({"testmod", "run_docstring_examples"})
PICKLE_CALLS: Final = frozenset({"load", "loads", "read_pickle", "Unpickler"})
PICKLE_MODULES: Final = frozenset(
    {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "torch", "pd", "pandas"}
)
MAIN: Final = "__main__"
WORD: Final = re.compile(r"[^\W\d]\w*")
TEXT_MAX: Final = 100_000
"""Letters of a string that is looked through."""
PICKLE_MAX: Final = 16 << 20
"""Bytes of a pickle that is looked through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """What a text has in it that may look names up."""

    looks_in_text: bool = False
    """It calls a function that looks names up in a text, or speaks of ``__main__``."""
    unpickles: bool = False
    runs_doctests: bool = False
    words: frozenset[str] = frozenset()
    """Of its string constants; and attributes, where it speaks of ``__main__``."""

    def joined(self, others: Iterable[Lookups]) -> Lookups:
        """Those of this text and of texts within it."""
        every = (self, *others)
        return Lookups(
            looks_in_text=any(one.looks_in_text for one in every),
            unpickles=any(one.unpickles for one in every),
            runs_doctests=any(one.runs_doctests for one in every),
            words=frozenset().union(*(one.words for one in every)),
        )


NO_LOOKUPS: Final = Lookups()


def lookups_of(tree: ast.AST) -> Lookups:
    """Of a cell."""
    called: set[str] = set()
    words: set[str] = set()
    attributes: set[str] = set()
    unpickles = speaks_of_main = False
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=of, attr=name)):
                called.add(name)
                unpickles |= name in PICKLE_CALLS and isinstance(of, ast.Name) and of.id in PICKLE_MODULES
            case ast.Call(func=ast.Name(id=name)):
                called.add(name)
            case ast.Constant(value=str() as text):
                speaks_of_main |= text == MAIN
                words.update(_find_words(text))
            case ast.Name(id=name):
                speaks_of_main |= name == MAIN
            case ast.Attribute(attr=name):
                attributes.add(name)
            case ast.ImportFrom(module=module, names=names) if module == MAIN:
                speaks_of_main = True
                attributes.update(alias.name for alias in names)
            case ast.alias(name=name):
                speaks_of_main |= name == MAIN
            case ast.arg(annotation=ast.Constant()) | ast.AnnAssign(annotation=ast.Constant()):
                called.add("get_type_hints")
            case _:
                pass
    looks = speaks_of_main or not TEXT.isdisjoint(called)
    return Lookups(
        looks_in_text=looks,
        unpickles=unpickles,
        runs_doctests=not DOCTEST.isdisjoint(called),
        words=frozenset(words | attributes if speaks_of_main else words) if looks else frozenset(),
    )


def possible_lookups(found: Lookups, reads: Iterable[str], names: Mapping[str, Any]) -> frozenset[str]:
    """Names of the namespace that may be looked up. ``reads``: names that the cell reads by name."""
    words: set[str] = set(found.words)
    if found.looks_in_text or found.unpickles:
        for name in reads:
            value = names.get(name)
            if type(value) is str and found.looks_in_text:
                words.update(_find_words(value))
            elif type(value) is bytes and found.unpickles:
                words.update(_words_of_pickle(value))
    if found.unpickles:
        bound = list(names.items())
        words.update(name for name, one in bound if isinstance(one, type) and one.__module__ == MAIN)
    if found.runs_doctests:
        words.update(_words_of_doctests(names))
    return frozenset(names.keys() & words)


@functools.lru_cache(4096)
def words_of_code(code: CodeType) -> frozenset[str]:
    """Of a function: the words of its string constants, where it calls a function that looks names up."""
    words: set[str] = set()
    codes = [code]
    calls: set[str] = set()
    while codes:
        one = codes.pop()
        calls.update(one.co_names)
        for constant in one.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            elif type(constant) is str:
                words.update(_find_words(constant))
    return (
        frozenset()
        if TEXT.isdisjoint(calls) and MAIN not in calls
        else frozenset(words | (calls if MAIN in calls else set()))
    )


def words_of_annotations(value: Any) -> frozenset[str]:
    """Of a function or class whose type hints are strings."""
    annotations = vars(value).get("__annotations__") if isinstance(value, type) else value.__annotations__
    texts = [one for one in dict(annotations or {}).values() if type(one) is str]
    return frozenset(word for text in texts for word in _find_words(text))


def _find_words(text: str) -> list[str]:
    return WORD.findall(text) if len(text) <= TEXT_MAX else []


def _words_of_pickle(data: bytes) -> Iterator[str]:
    """Of a pickle that names something of ``__main__``."""
    if MAIN.encode() not in data or len(data) > PICKLE_MAX:
        return
    import pickletools  # as doctest, below: few cells need it, and its tables take a while

    try:
        for _, argument, _ in pickletools.genops(data):
            if type(argument) is str:
                yield from _find_words(argument)
    except Exception:  # noqa: BLE001 - it is no pickle, or a damaged one: loading it raises that
        return


def _words_of_doctests(names: Mapping[str, Any]) -> set[str]:
    """Functions and classes of the notebook that have examples, and what the examples name."""
    import doctest  # which loads unittest and a debugger

    found: set[str] = set()
    parser = doctest.DocTestParser()
    for name, value in list(names.items()):
        if not isinstance(value, types.FunctionType | type) or value.__module__ != MAIN:
            continue
        members = list(vars(value).values()) if isinstance(value, type) else []
        for text in [getattr(one, "__doc__", None) for one in (value, *members)]:
            if type(text) is str and ">>>" in text:
                found.add(name)
                try:
                    examples = parser.get_examples(text)
                except ValueError:
                    continue
                found.update(word for example in examples for word in _find_words(example.source))
    return found
