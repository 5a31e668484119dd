"""Compares two runs of a notebook cell by cell. A difference without a named reason is a failure.

Text is brought into one form by rules that have names; what still differs is looked up in ``reasons``.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from tests.notebook.corpus.reasons import Difference, Facet, find_reason
from tests.notebook.corpus.run import Cell, Run

__all__ = ["RULES", "compare", "images_differ", "normalised"]

TEXT_MAX: Final = 160
NUMBER: Final = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
TIME_UNIT: Final = r"(?:ns|µs|μs|us|ms|s|min|h)"

RULES: Final[dict[str, tuple[re.Pattern[str], str]]] = {
    "escape sequences: colours": (re.compile(r"\x1b\[[\d;]*m"), ""),
    "carriage returns: a terminal shows what was written last": (re.compile(r"(?<![^\n\r])[^\n\r]*\r(?=[^\n])"), ""),
    "lines that were wiped: as many spaces as were last written there": (re.compile(r"^ +\r$", re.MULTILINE), ""),
    "addresses": (re.compile(r"(?:\b0|\.\.\.)x[0-9a-fA-F]{6,}\b"), "0x…"),
    "object ids": (re.compile(r"\bid=\d{9,}"), "id=…"),
    "the file that ipykernel gives a cell": (re.compile(r"(?:/[^\s:'\"]+)?/ipykernel_\d+/\d+\.py"), "<cell>"),
    "line numbers of cells": (
        re.compile(r"((?:Cell In\s?\[\d+\]|<cell>|__main__|<ipython-input-\S+>)[\"']?(?:, line |:))\d+"),
        r"\1…",
    ),
    "the file and line behind a syntax error": (re.compile(r" \((?:\d+\.py|<\S+>|the cell), line \d+\)$"), ""),
    "arrows of tracebacks": (re.compile(r"^(?:-+>)?\s+\d+ .*$", re.MULTILINE), "…"),
    "%%time": (re.compile(rf"((?:CPU times|Wall time|user|sys|total)[: ]+){NUMBER} {TIME_UNIT}"), r"\1…"),
    "%time and %timeit: what they say only of slow runs": (
        re.compile(r"^(?:The slowest run took|Compiler(?: time)?\s*:|Parser\s*:) .*\n", re.MULTILINE),
        "",
    ),
    "%timeit": (re.compile(rf"{NUMBER} {TIME_UNIT} ± {NUMBER} {TIME_UNIT} per loop \(.*?\)"), "… per loop"),
    "progress bars": (re.compile(r"\[[\d:?]+<[\d:?]+,\s*[\d.?]+\s?(?:it/s|s/it|[A-Za-z]+/s|s/[A-Za-z]+)\S*\]"), "[…]"),
    "ids of widgets": (re.compile(r"('model_id': ')[0-9a-f]{32}"), r"\1…"),
    "dates in pictures": (re.compile(r"(<dc:date>)[^<]*"), r"\1…"),
    "ids in pictures": (re.compile(r"(id=\"|#)[a-z][0-9a-f]{10}\b"), r"\1…"),
    "numbers of scikit-learn's drawings": (re.compile(r"sk-(container|estimator)-id-\d+"), r"sk-\1-id-…"),
    "process ids": (re.compile(r"\b(pid|PID)(\W{1,3})\d+"), r"\1\2…"),
    "temporary folders": (re.compile(r"/tmp/(?:tmp|sublet-)[\w.-]+"), "/tmp/…"),
}
"""Named rules, applied in this order to every text of both runs."""


def normalised(text: str, run: Run | None = None) -> str:
    """A text without what differs from run to run for a reason that has a name."""
    if run is not None:
        text = text.replace(str(run.folder), "<folder>")
    for pattern, replacement in RULES.values():
        text = pattern.sub(replacement, text)
    return text


def compare(plain: Run, again: Run | None, leased: Run) -> list[Difference]:
    """What differs between the plain run and the leased one, with reasons. ``again``: a second plain run; what differs
    between the two plain ones is the notebook's own randomness."""
    own = set() if again is None else {(one.cell, one.facet, one.key) for one in _raw(plain, again)}
    return [
        replace(one, reason=find_reason(one, is_own=(one.cell, one.facet, one.key) in own))
        for one in _raw(plain, leased)
    ]


def _raw(plain: Run, other: Run) -> Iterator[Difference]:
    def found(cell: int, facet: Facet, key: str, one: object, two: object) -> Difference:
        source = plain.cells[cell].source if cell < len(plain.cells) else ""
        return Difference(
            notebook=plain.notebook,
            cell=cell,
            mode=other.mode,
            seed=other.seed,
            facet=facet,
            key=key,
            plain=_short(one),
            leased=_short(two),
            source=source,
        )

    for number, (one, two) in enumerate(zip(plain.cells, other.cells, strict=False)):
        for facet, key, a, b in _cells(one, two, plain, other):
            yield found(number, facet, key, a, b)
    if len(plain.cells) != len(other.cells):
        yield found(len(other.cells), "run", "kernel", "went on", f"died in cell {other.died_in}")


def _cells(one: Cell, two: Cell, plain: Run, other: Run) -> Iterator[tuple[Facet, str, object, object]]:
    for name in sorted({*one.streams, *two.streams}):
        texts = [normalised(cell.streams.get(name, ""), run) for cell, run in ((one, plain), (two, other))]
        if texts[0] != texts[1]:
            yield ("stream", name, *_where_they_differ(*texts))
    errors = [
        None if cell.error is None else (cell.error[0], normalised(cell.error[1], run))
        for cell, run in ((one, plain), (two, other))
    ]
    if errors[0] != errors[1]:
        yield "error", "", errors[0], errors[1]
    pagers = [
        [normalised(str(part.get("data", {}).get("text/plain", part)), run) for part in cell.payload]
        for cell, run in ((one, plain), (two, other))
    ]
    if pagers[0] != pagers[1]:
        yield "pager", "", pagers[0], pagers[1]
    if len(one.shown) != len(two.shown):
        kinds = [[sorted(part["data"]) for part in cell.shown] for cell in (one, two)]
        yield "shown", "number of outputs", kinds[0], kinds[1]
    for place, (a, b) in enumerate(zip(one.shown, two.shown, strict=False)):
        yield from _outputs(place, a, b, plain, other)
    yield from _names(one.names, two.names)
    for key in sorted({*one.settings, *two.settings}):
        values = [normalised(cell.settings.get(key, "-"), run) for cell, run in ((one, plain), (two, other))]
        if values[0] != values[1]:
            yield "setting", key, values[0], values[1]


def _outputs(
    place: int, one: dict[str, Any], two: dict[str, Any], plain: Run, other: Run
) -> Iterator[tuple[Facet, str, object, object]]:
    if one["kind"] != two["kind"]:
        yield "shown", f"{place} kind", one["kind"], two["kind"]
    for kind in sorted({*one["data"], *two["data"]}):
        a, b = one["data"].get(kind), two["data"].get(kind)
        if a is None or b is None:
            yield "shown", f"{place} {kind}", a and "there", b and "there"
        elif kind in ("image/png", "image/jpeg"):
            if said := images_differ(a, b):
                yield "shown", f"{place} {kind}", said[0], said[1]
        else:
            texts = [normalised(value if isinstance(value, str) else str(value)) for value in (a, b)]
            texts = [text.replace(str(run.folder), "<folder>") for text, run in zip(texts, (plain, other), strict=True)]
            if texts[0] != texts[1]:
                yield ("shown", f"{place} {kind}", *_where_they_differ(*texts))


def images_differ(one: str, two: str) -> tuple[str, str] | None:
    """Sizes, and how many pixels differ how much; None where they are the same picture."""
    if one == two:
        return None
    import numpy as np
    from PIL import Image

    a, b = (np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGBA")) for text in (one, two))
    if a.shape != b.shape:
        return f"{a.shape[1]}x{a.shape[0]} pixels", f"{b.shape[1]}x{b.shape[0]} pixels"
    off = np.abs(a.astype(int) - b.astype(int)).max(axis=2)
    if not off.any():
        return None
    share = float((off > 0).mean())
    return f"{a.shape[1]}x{a.shape[0]} pixels", f"{share:.2%} of the pixels differ, by at most {off.max()} of 255"


def _names(one: dict[str, list[str]], two: dict[str, list[str]]) -> Iterator[tuple[Facet, str, object, object]]:
    for name in sorted({*one, *two}):
        a, b = one.get(name), two.get(name)
        if a is None or b is None:
            yield "name", name, a[0] if a else "not there", b[0] if b else "not there"
        elif a[0] != b[0]:
            yield "name", name, a[0], b[0]
        elif a[1] != b[1]:
            yield "name", name, f"{a[0]} {a[1]}", f"another value {b[1]}"
        elif a[2] != b[2]:
            yield "name", name, f"the same object as {a[2]!r}", f"the same object as {b[2]!r}"
        elif a[3] != b[3]:
            yield "name", f"{name}: order of attributes", a[3], b[3]
        elif a[4] != b[4]:
            yield "name", f"{name}: autograd graph", a[4], b[4] or "none"


def _where_they_differ(one: str, two: str) -> tuple[str, str]:
    """From a little before the first letter that is another one."""
    at = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    start = max(0, at - 40)
    before = "…" if start else ""
    return before + repr(one[start : start + TEXT_MAX]), before + repr(two[start : start + TEXT_MAX])


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 2 * TEXT_MAX else text[: 2 * TEXT_MAX] + "…"
