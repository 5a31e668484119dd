"""NVIDIA's own headers, from its packages: what the pretended libraries declare is compared with them.

A prototype is compared by its types as the machine passes them: whether each argument is a pointer or a number, of how
many bytes, and where a pointer leads to something with a size, of how many that is. ``gcc`` says all of it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["HERE", "Prototype", "facts_of", "headers_folder", "numbers_of", "prototypes"]

HERE: Final = Path(__file__).parent
PACKAGES: Final = {"nvml.h": "nvidia-nvml-dev", "cuda.h": "nvidia-cuda-runtime"}
_PROTOTYPE: Final = re.compile(r"extern (?P<answer>.+?)(?P<name>\b\w+) \((?P<takes>.*?)\);")
_ARGUMENT: Final = re.compile(r"^(?P<type>.*?[\s*])(?P<name>\w+)$")


class Prototype(NamedTuple):
    """The types of a function, as they are written."""

    answer: str
    takes: tuple[str, ...]


def headers_folder() -> Path:
    """Where they are: the packages are among those for development."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for include in Path(folder).glob("cu*/include"):
            if all((include / name).is_file() for name in PACKAGES):
                return include
    raise AssertionError(f"there are no headers of NVIDIA's here: run `make setup` ({', '.join(PACKAGES.values())})")


def _printed(text: str, *options: str, place: Path) -> str:
    """What a program of this text prints."""
    source, program = place / "program.c", place / "program"
    source.write_text(text)
    subprocess.run(["gcc", "-w", "-std=gnu11", f"-I{HERE}", *options, "-o", str(program), str(source)], check=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


def prototypes(include: str, *options: str, place: Path) -> dict[str, Prototype]:
    """Of all functions that this file declares or defines."""
    source, said = place / "declares.c", place / "declared"
    source.write_text(include)
    argv = ["gcc", "-w", "-std=gnu11", f"-I{HERE}", *options, "-fsyntax-only", "-aux-info", str(said), str(source)]
    subprocess.run(argv, check=True)
    found = {}
    for line in said.read_text().splitlines():
        match = _PROTOTYPE.search(line)
        if match is None:
            continue
        is_definition = ":NF */" in line  # there the arguments have names
        listed = [] if match["takes"] == "void" else _split(match["takes"])
        takes = tuple(_type_in(one) if is_definition else one for one in listed)
        found[match["name"]] = Prototype(match["answer"].strip(), takes)
    return found


def _split(text: str) -> list[str]:
    """At the commas that stand in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _type_in(argument: str) -> str:
    if "(" in argument:  # a pointer to a function: its name stands within
        return "void *"
    match = _ARGUMENT.match(argument)
    assert match is not None, argument
    return match["type"].strip()


class Fact(NamedTuple):
    """Of a type: whether it is a pointer, how many bytes it has, and how many what it leads to; 0 where that has no
    size of its own."""

    is_pointer: bool
    size: int
    pointee: int


def facts_of(types: Iterable[str], include: str, *options: str, place: Path) -> dict[str, Fact]:
    """Of these types, for one who has this file."""
    rows = []
    for name in sorted({*types} - {"void"}):
        inner = name[:-1].strip() if name.endswith("*") else ""
        bare = re.sub(r"\bconst\b", "", inner).strip()
        pointee = f"sizeof({inner})" if bare and bare != "void" else "0"
        is_pointer = "1" if "(" in name else f"__builtin_classify_type(*({name} *)0) == 5"
        size = "8" if "(" in name else f"sizeof({name})"
        rows.append(f'printf("%s|%d|%zu|%zu\\n", "{name}", (int)({is_pointer}), (size_t){size}, (size_t){pointee});')
    said = _printed(_main(include, rows), *options, place=place)
    found = {"void": Fact(False, 0, 0)}
    for line in said.splitlines():
        name, pointer, count, led_to = line.split("|")
        found[name] = Fact(pointer == "1", int(count), int(led_to))
    return found


def numbers_of(expressions: Mapping[str, str], include: str, *options: str, place: Path) -> dict[str, int]:
    """The values of these expressions of C, by the names that they are given."""
    rows = [f'printf("%s|%lld\\n", "{name}", (long long)({text}));' for name, text in expressions.items()]
    said = _printed(_main(include, rows), *options, place=place)
    return {name: int(value) for name, _, value in (line.partition("|") for line in said.splitlines())}


def _main(include: str, rows: Iterable[str]) -> str:
    return "\n".join((include, "#include <stdio.h>", "#include <stddef.h>", "int main(void) {", *rows, "return 0; }"))
