"""The studio's API as its OpenAPI document describes it: what fits is answered so, and what does not is refused.

Requests are made from the document, from a seed: for each operation bodies that fit its schema, and bodies that are
wrong in one place or altogether. No answer is an internal error, each is JSON of the form that the document gives it,
and no request takes the studio away from the others.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

import msgspec
import pytest

from sublet.studio.api import API, StudioErrorBody
from sublet.values import MIB
from tests.integration.studio_inside import StudioInside, studio_inside
from tests.integration.studio_stage import Member

SEED: Final = int(os.environ.get("SUBLET_FUZZ_SEED", "20"))
ROUNDS: Final = int(os.environ.get("SUBLET_FUZZ_ROUNDS", "25"))
"""Of each operation."""
ANSWERS: Final = {(one.method.lower(), one.path): one.answer for one in API}
REFUSED: Final = frozenset((400, 404, 409, 413))
TEXTS: Final = (
    "",
    "x" * 5000,
    "\u0000",
    "☃",
    "../../etc/passwd",
    "<script>",
    "'; DROP TABLE record",
    "s-",
    " ",
    "%s%n",
)
ODD: Final[tuple[Any, ...]] = (None, True, -1, 0, 1 << 63, 1e308, [], {}, [[]] * 50, *TEXTS)


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudioInside]:
    with studio_inside(tmp_path_factory.mktemp("studio"), "1x1GiB") as stage:
        stage.tenant("physics")
        yield stage


class Maker:
    """Values of schemas, and what is wrong with them."""

    def __init__(self, document: dict[str, Any], chance: random.Random) -> None:
        self._schemas, self.chance = document["components"]["schemas"], chance

    def fit(self, schema: dict[str, Any]) -> Any:
        """A value of this schema."""
        if "$ref" in schema:
            return self.fit(self._schemas[schema["$ref"].rpartition("/")[2]])
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.chance.choice(schema["enum"])
        if "anyOf" in schema:
            return self.fit(self.chance.choice(schema["anyOf"]))
        match schema.get("type"):
            case "object":
                needed, known = schema.get("required", ()), schema.get("properties", {})
                names = [name for name in known if name in needed or self.chance.random() < 0.5]
                return {name: self.fit(known[name]) for name in names}
            case "array":
                one = schema.get("items") or {}
                parts = schema.get("prefixItems") or [one] * self.chance.randrange(3)
                return [self.fit(part) for part in parts]
            case "integer":
                least = schema.get("minimum", 0)
                return self.chance.randint(least, min(schema.get("maximum", least + 99), least + 99))
            case "number":
                return self.chance.uniform(schema.get("minimum", 0.0), min(schema.get("maximum", 9.0), 9.0))
            case "boolean":
                return self.chance.random() < 0.5
            case "null":
                return None
            case _:
                return f"n{self.chance.randrange(10**6)}"

    def spoiled(self, value: Any) -> Any:
        """The same, wrong in one place."""
        if isinstance(value, dict) and value and self.chance.random() < 0.8:
            made, name = copy.deepcopy(value), self.chance.choice(sorted(value))
            match self.chance.randrange(3):
                case 0:
                    del made[name]
                case 1:
                    made[f"{name}x"] = made.pop(name)
                case _:
                    made[name] = self.spoiled(made[name])
            return made
        return self.chance.choice(ODD)

    def raw(self) -> bytes:
        """No JSON, or no UTF-8, or too much of it."""
        return self.chance.choice(
            (b"", b"\xff\xfe", b"{", b"[" * 10_000, b'{"a":' * 500, b"{} {}", b"nul", b"x" * 20_000, b'"\\ud800"')
        )


def test_the_document_is_that_of_the_routes(studio: StudioInside) -> None:
    answer = studio.ask("GET", "/openapi.json")
    assert answer.status == 200
    said = {(method, path) for path, methods in answer.doc["paths"].items() for method in methods}
    assert said == ANSWERS.keys()
    assert not [one for one in json.dumps(answer.doc).split('"') if one.startswith("#/") and "schemas" not in one]


def test_each_request_that_the_document_allows_or_forbids_is_answered_as_it_says(studio: StudioInside) -> None:
    document, met = studio.ask("GET", "/openapi.json").doc, Counter[int]()
    fay = studio.member("fay", "physics")
    known = [fay.done("POST", "/v1/sessions", {"name": name, "vram": MIB, "later": True})["id"] for name in ("a", "b")]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            maker = Maker(document, random.Random(f"{SEED} {method} {path}"))  # a new route changes nothing for others
            for number in range(ROUNDS):
                one = _asked(fay, maker, method, path, operation, known)
                where = f"{method} {path}, round {number} (SUBLET_FUZZ_SEED={SEED}): {one}"
                assert one.status == 200 or one.status in REFUSED, where
                met[one.status] += 1
                shape = ANSWERS[method, path] if one.status == 200 else StudioErrorBody
                try:
                    msgspec.json.decode(one.body, type=shape)
                except msgspec.ValidationError as error:
                    raise AssertionError(f"{where}: {error}") from error
    assert {200, 400, 404, 409} <= set(met), met
    assert studio.ask("GET", "/readyz").status == 200
    for session in fay.done("GET", "/v1/sessions"):
        assert fay.done("POST", f"/v1/sessions/{session['id']}/end", {"now": True})["state"] == "ended"
    records = fay.done("GET", "/v1/records?after=0")
    assert [one["seq"] for one in records] == list(range(1, len(records) + 1))


def _asked(person: Member, maker: Maker, method: str, path: str, operation: dict[str, Any], known: list[str]) -> Any:
    chance = maker.chance
    ident = chance.choice((*known, "a", "nothing", "s-0123456789ab", *TEXTS[1:]))
    address = path.replace("{id}", quote(ident, safe=""))
    for one in operation["parameters"]:
        if one["in"] == "query" and chance.random() < 0.5:
            address += f"?{one['name']}={quote(str(chance.choice((*TEXTS, '1', '0', '99999999999999999999'))))}"
    body: Any = None
    if method == "post":
        schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        body = maker.fit(schema) if schema else {}
        drawn = chance.random()
        if drawn < 0.5:
            body = maker.spoiled(body)
        elif drawn < 0.6:
            body = maker.raw()
        if isinstance(body, dict) and path == "/v1/sessions":
            body |= {"later": True}  # what waits is another test's
        if isinstance(body, dict) and path.endswith("/resume"):
            body |= {"wait": 0}
    return person.ask(method.upper(), address, body)
