"""Names that leave the process stay: in journals, messages, metrics, pickles, commands and files of other versions.

``written_names.txt`` lists them, a line for each message, fact, record and kind: what it is called here, and the names
that are written. A better Python name never changes a written one (``rename=`` and ``tag=`` carry it). What is new is
added to the list; what is gone from it breaks something that was written, or is said there to be over.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec
import pytest

import sublet
from sublet import errors
from sublet.durable import rebuild
from sublet.state.transfer.names import MOVED

SOURCE: Final = Path(sublet.__file__).parent
LIST: Final = Path(__file__).with_name("written_names.txt")

FACTS: Final = ("office.ledger.events",)
RECORDS: Final = ("office.ledger.records", "office.ledger.state", "office.ledger.fairness")
HTTP: Final = ("wire.http", "wire.http_views")
MESSAGES: Final = (
    *("cards", "caps", "device", "guests", "log_records", "manifest", "orders", "refusals", "settings"),
    *("served", "volumes", "work", "zygote"),
)
ENUMS: Final = (
    *("values", "lease_end", "lease.states", "office.ledger.answers", "jobs.states"),
    *("wire.device", "wire.frames", "wire.guests", "wire.page", "wire.scalars", "wire.served", "wire.work"),
)
FILES: Final = {
    "office.journal.files": ("JOURNAL_NAME", "LOCK_NAME", "INCARNATION_NAME"),
    "engines.start_settings": ("SETTINGS_NAME",),
    "node.agent.starting": ("SOCKET_NAME", "LOG_NAME"),
    "node.storage.publish_door": ("NAME",),
    "node.storage.stores_work": ("NOTE", "KEPT", "REMOVING"),
}


def written() -> dict[str, frozenset[str]]:
    """Every line of the list, as the source has it: what it is about → the names that are written."""
    found: dict[str, frozenset[str]] = {}
    for name in (*FACTS, *RECORDS, *HTTP):
        for label, struct in structs_of(module(name)):
            tag = struct.__struct_config__.tag
            found[f"{name} {label}"] = frozenset((*struct.__struct_encode_fields__, *([f"type={tag}"] if tag else [])))
    for name in MESSAGES:
        for label, kind in classes_of(module(f"wire.{name}")):
            if dataclasses.is_dataclass(kind):
                found[f"wire.{name} {label}"] = frozenset(field.name for field in dataclasses.fields(kind))
    for name in ENUMS:
        for label, kind in classes_of(module(name)):
            if issubclass(kind, enum.Enum):
                found[f"{name} {label}"] = frozenset(str(one.value) for one in kind)
    texts = "\n".join(path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py")))
    found["errors"] = frozenset(
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.SubletError)
    )
    found["environment"] = frozenset(re.findall(r"\bSUBLET_[A-Z][A-Z_]*[A-Z]\b", texts))
    found["metrics"] = frozenset(re.findall(r"\"(sublet_[a-z_]+)\"", texts))
    found["pickled functions"] = frozenset(
        f"{one.__module__}.{name}"
        for name, one in vars(rebuild).items()
        if inspect.isroutine(one) and one.__module__ == rebuild.__name__ and not name.startswith("_")
    )
    found["pickled classes"] = frozenset(f"{module}.{name}" for module, name in MOVED)
    found["programs"] = frozenset(
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in SOURCE.rglob("*.py")
        if "\nif __name__ == " in path.read_text(encoding="utf-8") or path.name == "__main__.py"
    )
    found["entries"] = frozenset(re.findall(r"\"(sublet\.[\w.]+:\w+)\"", texts))
    for name, attributes in FILES.items():
        found[f"files of {name}"] = frozenset(str(getattr(module(name), one)) for one in attributes)
    return found


def module(name: str) -> ModuleType:
    return importlib.import_module(f"sublet.{name}")


def classes_of(where: ModuleType) -> Iterator[tuple[str, type]]:
    for name, kind in sorted(vars(where).items()):
        if isinstance(kind, type) and kind.__module__ == where.__name__ and not name.startswith("_"):
            yield name, kind


def structs_of(where: ModuleType) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for name, kind in classes_of(where):
        if issubclass(kind, msgspec.Struct):
            yield name, kind


def listed() -> dict[str, frozenset[str]]:
    rows = (line.partition(": ") for line in LIST.read_text(encoding="utf-8").splitlines() if ": " in line)
    return {label: frozenset(names.split(" | ")) for label, _, names in rows}


def lines(found: dict[str, frozenset[str]]) -> str:
    return "".join(f"{label}: {' | '.join(sorted(names))}\n" for label, names in sorted(found.items()) if names)


@pytest.fixture(scope="module")
def now() -> dict[str, frozenset[str]]:
    return {label: names for label, names in written().items() if names}


def test_what_was_written_under_a_name_is_still_written_and_read_under_it(now: dict[str, frozenset[str]]) -> None:
    gone = [f"{label}: {name}" for label, names in listed().items() for name in names - now.get(label, frozenset())]
    assert not gone, "written names that are gone; rename= and tag= carry one under a better Python name"


def test_the_list_has_every_name_that_is_written(now: dict[str, frozenset[str]]) -> None:
    old = listed()
    new = [f"{label}: {name}" for label, names in now.items() for name in names - old.get(label, frozenset())]
    assert not new, f"add to {LIST.name} what is written from now on: python -m tests.unit.test_written_names"


def test_the_list_is_in_order() -> None:
    assert lines(listed()) == LIST.read_text(encoding="utf-8")


if __name__ == "__main__":
    LIST.write_text(lines(written()), encoding="utf-8")
