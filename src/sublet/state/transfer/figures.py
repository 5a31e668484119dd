"""Pickles a matplotlib figure as a unit, and restores it into the existing objects.

A figure is a graph of thousands of objects that find each other by weak references, callbacks and registries, which
only ``__getstate__`` and ``__setstate__`` of their classes know how to write and to restore. So the graph is a pickle
of its own, without a record for each array and dict in it. Its objects are numbered in the order of that pickle: what
holds one of them from outside (``axes``, a legend) refers to it by figure and number. Where it is put together an
object that is there already is cleared and gets the new state, so that it keeps its identity for all who hold it.

Functions, large arrays, and objects of classes that matplotlib does not know are pickled outside the unit, by the rules
that hold for all values.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

OWN: Final = frozenset({"matplotlib", "mpl_toolkits"})
PLAIN: Final = frozenset({"numpy", "cycler", "dateutil", "kiwisolver"})
"""Libraries whose objects are part of a figure and have no identity that a program would ask for."""
SMALL_BYTES: Final = 4096
"""An array with less is part of the figure; a larger one may be shared with others and is compared apart."""
CHUNK_BYTES: Final = 128 * 1024
"""The pickle is cut into pieces of this size, since longer ones would be told apart by their address."""
LINKS: Final = ("figure", "axes", "ax", "_gridspec")
"""Attributes by which objects that are no artists lead to their figure."""
LINKS_MAX: Final = 8
FIRST_NUMBER: Final = 1 << 32
"""Above all numbers that a pickler gives."""
PARTS_BITS: Final = 24

_local = threading.local()


class FigurePickle:
    """A figure, pickled."""

    def __init__(self, figure: Any, rule_for: Callable[[type], Any]) -> None:
        """``rule_for``: the rule that the values outside have for a type, or None."""
        file = io.BytesIO()
        pickler = _Pickler(file, rule_for)
        pickler.dump(figure)
        stream = file.getvalue()
        self.state = (
            tuple(stream[at : at + CHUNK_BYTES] for at in range(0, len(stream), CHUNK_BYTES)),
            pickler.outside,
        )
        self.parts: list[Any] = pickler.parts
        self._numbers = pickler.numbers

    def number_of(self, value: Any) -> int | None:
        """Of an object of the figure; None if it is none."""
        return self._numbers.get(id(value))


def numbered(units: list[FigurePickle]) -> Iterator[tuple[int, Any]]:
    """All objects of these figures under numbers that ``Assembly.met`` gives them as well."""
    for n, unit in enumerate(units):
        first = FIRST_NUMBER + (n << PARTS_BITS)
        yield from enumerate(unit.parts, first)


def is_part_kind(kind: type) -> bool:
    """Whether objects of this class may be part of a figure."""
    return any(str(base.__module__).partition(".")[0] in OWN for base in kind.__mro__ if base is not object)


def figure_of(value: Any) -> Any:
    """The figure that an object belongs to, in the end; None if to none."""
    artist = sys.modules.get("matplotlib.figure")
    if artist is None:
        return None
    for _ in range(LINKS_MAX):
        if isinstance(value, artist.Figure):
            return value
        held = getattr(value, "__dict__", {})
        value = held.get("_parent_figure") or next((held[one] for one in LINKS if held.get(one) is not None), None)
        if value is None:
            return None
    return None


def unit_of(figure: Any, known: dict[int, FigurePickle], rule_for: Callable[[type], Any]) -> FigurePickle:
    """Pickled once for all encodings that look at it together."""
    unit = known.get(id(figure))
    if unit is None:
        unit = known[id(figure)] = FigurePickle(figure, rule_for)
    return unit


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, rule_for: Callable[[type], Any]) -> None:
        super().__init__(file, 5)
        self.parts: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.outside: list[Any] = []
        self._rule_for = rule_for
        self._ways: dict[type, Callable[[Any], Any] | None] = {}

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        try:
            way = self._ways[kind]
        except KeyError:
            way = self._ways[kind] = self._way_of(kind)
        return NotImplemented if way is None else way(value)

    def _way_of(self, kind: type) -> Callable[[Any], Any] | None:
        if issubclass(kind, type) or kind is types.FunctionType:
            return self._by_name
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind is numpy.ndarray:
            return self._array
        if is_part_kind(kind):
            return self._plain_part if _has_state_alone(kind) else self._part
        top = str(kind.__module__).partition(".")[0]
        if (top in PLAIN or top in sys.stdlib_module_names) and self._rule_for(kind) is None:
            return None
        return None if kind is types.MethodType else self._beside

    def _part(self, value: Any) -> Any:
        reduced = value.__reduce_ex__(5)
        if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            # Such as a logarithmic norm, which names and other figures may hold as well.
            return self._beside(value) if figure_of(value) is None else reduced
        _, (_, *arguments), state, *more = (*reduced, None, None, None)[:5]
        if arguments or any(one is not None for one in more):
            return reduced
        return self._taken_apart(value, state)

    def _plain_part(self, value: Any) -> Any:
        """The same, without a look at what ``object.__reduce_ex__`` would say beside the state: nothing. Of an object
        with 100 axes there are 34,000 of these."""
        return self._taken_apart(value, value.__getstate__())

    def _taken_apart(self, value: Any, state: Any) -> Any:
        number = self.numbers[id(value)] = len(self.parts)
        self.parts.append(value)
        if type(state) is dict and type(state.get("_cid_gen")) is int:  # asking the registry has used up a number
            value._cid_gen = itertools.count(state["_cid_gen"])
        if number == 0:
            return part, (type(value), number), state, None, None, set_figure
        return part, (type(value), number), state

    def _by_name(self, value: Any) -> Any:
        from sublet.state.transfer.names import found_by_name

        return NotImplemented if found_by_name(value) else self._beside(value)

    def _array(self, value: Any) -> Any:
        return NotImplemented if value.nbytes < SMALL_BYTES and not value.dtype.hasobject else self._beside(value)

    def _beside(self, value: Any) -> Any:
        self.outside.append(value)
        return outside, (len(self.outside) - 1,)


def _has_state_alone(kind: type) -> bool:
    """Whether instances are pickled by ``object.__reduce_ex__``, which has no more to say of them than their state."""
    named = [getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__")]
    return (
        all(named)
        and not kind.__itemsize__
        and not issubclass(kind, (list, dict, set))
        and not any(hasattr(kind, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
    )


class Assembly:
    """The figures of one value that is being put together.

    While the value is loaded a figure and what refers to its parts are only found or made. ``finish`` then loads the
    figures; until it is called every object that was here is as it was.
    """

    def __init__(self, load: Callable[[bytes], Any], find: Callable[[int], Any] | None = None) -> None:
        """``load``: loads a pickle; ``find``: the object here that has this number on the other side, or None."""
        self.beside: list[list[Any]] = []
        """Of each figure, the objects that were pickled outside it. They may be replaced until ``finish``."""
        self._load = load
        self._find = find
        self._streams: dict[int, bytes] = {}
        """By the figure's index."""
        self._beside: dict[int, list[Any]] = {}
        self._parts: list[dict[int, Any]] = []
        self._index: dict[int, int] = {}
        """By the id of a figure."""
        self._loading: int | None = None
        self._old: list[Any] = []
        """Objects that were here and are still to be cleared."""
        self._before: list[tuple[Any, dict[str, Any]]] = []
        """Objects that were here, and what they were."""
        self._canvases: dict[int, Any] = {}

    @property
    def met(self) -> dict[int, Any]:
        """Every object of the figures by its number."""
        return {
            FIRST_NUMBER + (n << PARTS_BITS) + number: parts[number]
            for n, parts in enumerate(self._parts)
            for number in sorted(parts)
        }

    def finish(self) -> None:
        """Load the figures. An error leaves every object that was here as it was."""
        with assembling(self):
            for old in self._old:
                self._clear(old)
            self._old.clear()
            for index, stream in self._streams.items():
                self._loading = index
                self._load(stream)
                _follow(self._parts[index].values())
            self._loading = None

    def undo(self) -> None:
        """Make all objects that were here what they were."""
        for value, before in reversed(self._before):
            value.__dict__ = before
        self._before.clear()

    def figure(self, kind: type) -> Any:
        """A figure begins."""
        self._parts.append({})
        made = self._made(len(self._parts) - 1, kind, 0)
        self._index[id(made)] = len(self._parts) - 1
        return made

    def fill(self, figure: Any, chunks: tuple[bytes, ...], beside: list[Any]) -> None:
        """What is to be loaded into a figure."""
        index = self._index[id(figure)]
        self._streams[index], self._beside[index] = b"".join(chunks), beside
        self.beside.append(beside)

    def part_of(self, figure: Any, kind: type, number: int) -> Any:
        """An object of a figure, referred to from outside."""
        return self._made(self._index[id(figure)], kind, number)

    def part(self, kind: type, number: int) -> Any:
        """An object of the figure that is loaded just now."""
        assert self._loading is not None
        return self._made(self._loading, kind, number)

    def outside(self, number: int) -> Any:
        """Of that figure an object that was pickled outside it."""
        assert self._loading is not None
        return self._beside[self._loading][number]

    def set_figure(self, figure: Any, state: dict[str, Any]) -> None:
        """A figure that was here keeps its canvas, and pyplot's window with it."""
        canvas = self._canvases.get(id(figure))
        if canvas is None:
            figure.__setstate__(state)
            return
        state.pop("_restore_to_pylab", None)
        figure.__setstate__(state)
        figure.set_canvas(canvas)

    def _made(self, figure: int, kind: Any, number: int) -> Any:
        parts = self._parts[figure]
        if number in parts:
            return parts[number]
        old = None if self._find is None else self._find(FIRST_NUMBER + (figure << PARTS_BITS) + number)
        if old is None or type(old) is not kind or not isinstance(getattr(old, "__dict__", None), dict):
            parts[number] = kind.__new__(kind)
            return parts[number]
        parts[number] = old
        if number == 0 and (canvas := old.__dict__.get("canvas")) is not None:
            self._canvases[id(old)] = canvas
        if self._loading is None:
            self._old.append(old)
        else:
            self._clear(old)
        return old

    def _clear(self, old: Any) -> None:
        self._before.append((old, old.__dict__))
        old.__dict__ = {}


def _follow(parts: Iterable[Any]) -> None:
    """Images follow their limits and colours, and colour bars what they explain, by callbacks, which matplotlib's own
    pickle leaves behind."""
    for part in parts:
        attributes: dict[str, Any] = getattr(part, "__dict__", {})
        colorizer = attributes.get("_colorizer")  # from matplotlib 3.10 on
        if colorizer is not None and "_id_colorizer" in attributes:
            colorizer._id_norm = colorizer.norm.callbacks.connect("changed", colorizer.changed)
            part._id_colorizer = colorizer.callbacks.connect("changed", part.changed)
        bar: Any = getattr(part, "colorbar", None) if attributes.keys() & {"_id_colorizer", "colorbar_cid"} else None
        if bar is not None and bar.mappable is part:
            part.colorbar_cid = part.callbacks.connect("changed", bar.update_normal)


class assembling:  # noqa: N801 - a context manager
    """Figures that are loaded meanwhile, by this thread, belong to this assembly."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._outer: Assembly | None = None

    def __enter__(self) -> Assembly:
        self._outer = getattr(_local, "assembly", None)
        _local.assembly = self._assembly
        return self._assembly

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        _local.assembly = self._outer
        if kind is not None:
            self._assembly.undo()


# ---- called by pickles


def figure(kind: type) -> Any:
    return _local.assembly.figure(kind)


def fill_figure(value: Any, state: tuple[tuple[bytes, ...], list[Any]]) -> None:
    _local.assembly.fill(value, *state)


def set_figure(value: Any, state: dict[str, Any]) -> None:
    _local.assembly.set_figure(value, state)


def part_of(value: Any, kind: type, number: int) -> Any:
    return _local.assembly.part_of(value, kind, number)


def part(kind: type, number: int) -> Any:
    return _local.assembly.part(kind, number)


def outside(number: int) -> Any:
    return _local.assembly.outside(number)
