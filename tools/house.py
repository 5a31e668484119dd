"""Counts the source: sizes, small modules with one importer, functions, helpers with one caller, import circles,
names of classes that stand in two modules.

    python tools/house.py                  a table of src, tests, tools, benchmarks and examples
    python tools/house.py --list small     modules under 150 lines that one module imports
    python tools/house.py --list helpers   helpers of at most two statements with one caller
    python tools/house.py --list names     names of classes that several modules define
    python tools/house.py --list circles   modules that import each other, type-only imports included
    python tools/house.py --json           the same figures as one document

``--root`` counts another checkout (``git worktree add``), so that figures before and after come from one script.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("src", "tests", "tools", "benchmarks", "examples")
SMALL_LINES: Final = 150
HELPER_STATEMENTS: Final = 2
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT: Final = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
)


@dataclass
class Module:
    """One file, as it is counted."""

    path: Path
    source: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    """Modules of the package that it imports, and how: ``load``, ``late`` (in a function) or ``type``."""

    @property
    def lines(self) -> int:
        return len(self.source.splitlines())

    @property
    def code_lines(self) -> int:
        """Lines with code: neither blank, nor a comment, nor a docstring."""
        docstrings = set[int]()
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and ast.get_docstring(node, clean=False):
                text = node.body[0]
                docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        found = set[int]()
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type not in _LAYOUT and token.string:
                found.update(range(token.start[0], token.end[0] + 1))
        return len(found - docstrings)

    @property
    def statements(self) -> int:
        return sum(isinstance(node, ast.stmt) and not is_text(node) for node in ast.walk(self.tree))

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, _FUNCTIONS)]


def is_text(node: ast.AST) -> bool:
    """Whether it is a docstring, or another text that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def read(root: Path) -> list[Module]:
    return [
        Module(path, source := path.read_text(encoding="utf-8"), ast.parse(source))
        for path in sorted(root.rglob("*.py"))
        if "__pycache__" not in path.parts and "node_modules" not in path.parts
    ]


# ------------------------------------------------------------------------------------------------------------ imports


def package(root: Path) -> dict[str, Module]:
    """Dotted name → module of the package below ``root/src``, with what each imports."""
    return linked(root / "src", read(root / "src"))


def linked(source: Path, modules: list[Module]) -> dict[str, Module]:
    """The same of modules below ``source`` that were read already."""
    found: dict[str, Module] = {}
    for module in modules:
        parts = module.path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = module
    for name, module in found.items():
        module.imports = {
            other: how for other, how in _imports(module, name, set(found)).items() if other != name and how
        }
    return found


def _imports(module: Module, name: str, known: set[str]) -> dict[str, str]:
    strength = {"type": 0, "late": 1, "load": 2}
    found: dict[str, str] = {}

    def note(target: str, how: str) -> None:
        parts = target.split(".")
        for length in range(len(parts), 0, -1):
            if (other := ".".join(parts[:length])) in known:
                if strength[how] >= strength.get(found.get(other, "type"), 0):
                    found[other] = how
                return

    def walk(node: ast.AST, how: str) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    note(alias.name, how)
            case ast.ImportFrom(module=origin, names=names, level=level):
                base = name.split(".") if module.path.name == "__init__.py" else name.split(".")[:-1]
                stem = ".".join([*base[: len(base) - level + 1], *([origin] if origin else [])]) if level else origin
                for alias in names:
                    note(f"{stem}.{alias.name}", how)
            case ast.expr():  # nothing is imported within
                pass
            case ast.If(
                test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), body=body, orelse=orelse
            ):
                for statement in body:
                    walk(statement, "type")
                for statement in orelse:
                    walk(statement, how)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for child in ast.iter_child_nodes(node):
                    walk(child, "late" if how == "load" else how)
            case _:
                for child in ast.iter_child_nodes(node):
                    walk(child, how)

    walk(module.tree, "load")
    return found


def circles(modules: dict[str, Module], kinds: frozenset[str]) -> list[list[str]]:
    """Sets of modules that import each other by imports of these kinds: strongly connected components."""
    graph = {name: [other for other, how in one.imports.items() if how in kinds] for name, one in modules.items()}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        todo: list[tuple[str, Iterator[str]]] = [(name, iter(graph[name]))]
        order[name] = low[name] = len(order)
        stack.append(name)
        while todo:
            here, others = todo[-1]
            for other in others:
                if other not in order:
                    order[other] = low[other] = len(order)
                    stack.append(other)
                    todo.append((other, iter(graph[other])))
                    break
                if other in stack:
                    low[here] = min(low[here], order[other])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[here])
                if low[here] == order[here]:
                    at = stack.index(here)
                    members = stack[at:]
                    del stack[at:]
                    if len(members) > 1:
                        found.append(sorted(members))

    for name in graph:
        if name not in order:
            visit(name)
    return sorted(found)


def small(modules: dict[str, Module]) -> list[tuple[str, int, str]]:
    """Modules under ``SMALL_LINES`` that exactly one other imports: their name, their lines, their importer."""
    importers: dict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for other in module.imports:
            importers[other].append(name)
    return [
        (name, module.lines, importers[name][0])
        for name, module in modules.items()
        if module.path.name not in ("__init__.py", "__main__.py")
        and module.lines < SMALL_LINES
        and len(importers[name]) == 1
    ]


def helpers(modules: dict[str, Module]) -> list[tuple[str, str, int]]:
    """Private functions of at most two statements whose name stands once beside their definition."""
    names = Counter[str]()
    for module in modules.values():
        for node in ast.walk(module.tree):
            match node:
                case ast.Name(id=one) | ast.Attribute(attr=one) | ast.alias(name=one):
                    names[one] += 1
                case _:
                    pass
    return [
        (name, function.name, function.lineno)
        for name, module in modules.items()
        for function in module.functions
        if function.name.startswith("_")
        and not function.name.endswith("__")
        and names[function.name] == 1
        and sum(isinstance(node, ast.stmt) and not is_text(node) for node in ast.walk(function))
        <= HELPER_STATEMENTS + 1
    ]


def doubles(modules: dict[str, Module]) -> dict[str, list[str]]:
    """Names of public classes that several modules define: the name, and the modules."""
    places: dict[str, set[str]] = defaultdict(set)
    for name, module in modules.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(name)
    return {one: sorted(found) for one, found in sorted(places.items()) if len(found) > 1}


# ------------------------------------------------------------------------------------------------------------ figures


def figures(root: Path) -> dict[str, dict[str, float]]:
    """The figures of each folder; those of ``src`` have what only a package has."""
    found: dict[str, dict[str, float]] = {}
    for folder in FOLDERS:
        modules = read(root / folder)
        functions = [function for module in modules for function in module.functions]
        lengths = [(one.end_lineno or one.lineno) - one.lineno + 1 for one in functions]
        single = sum(sum(not is_text(node) for node in one.body) == 1 for one in functions)
        found[folder] = {
            "files": len(modules),
            "lines": sum(module.lines for module in modules),
            "code_lines": sum(module.code_lines for module in modules),
            "statements": sum(module.statements for module in modules),
            "functions": len(functions),
            "function_lines_mean": round(sum(lengths) / max(1, len(lengths)), 1),
            "functions_of_one_statement_percent": round(100 * single / max(1, len(functions)), 1),
        }
    whole = package(root)
    found["src"] |= {
        "small_modules_with_one_importer": len(small(whole)),
        "helpers_with_one_caller": len(helpers(whole)),
        "class_names_in_several_modules": len(doubles(whole)),
        "circles_on_load": len(circles(whole, frozenset({"load"}))),
        "circles_with_late_imports": len(circles(whole, frozenset({"load", "late"}))),
        "circles_of_all_kinds": len(circles(whole, frozenset({"load", "late", "type"}))),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count (default: this one)")
    parser.add_argument("--list", choices=("small", "helpers", "names", "circles"), help="list instead of counting")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    asked = parser.parse_args()
    if asked.list:
        modules = package(asked.root)
        rows = {
            "small": lambda: [f"{lines:4} {name}  ← {importer}" for name, lines, importer in small(modules)],
            "helpers": lambda: [f"{name}:{line} {function}" for name, function, line in helpers(modules)],
            "names": lambda: [f"{one}: {', '.join(found)}" for one, found in doubles(modules).items()],
            "circles": lambda: [" ".join(one) for one in circles(modules, frozenset({"load", "late", "type"}))],
        }[asked.list]()
        print("\n".join(rows))
        return
    found = figures(asked.root)
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    columns = list(dict.fromkeys(name for one in found.values() for name in one))
    width = max(map(len, columns)) + 2
    print(" " * width + "".join(f"{folder:>12}" for folder in found))
    for name in columns:
        print(f"{name:{width}}" + "".join(f"{one.get(name, ''):>12}" for one in found.values()))


if __name__ == "__main__":
    main()
