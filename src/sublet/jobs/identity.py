"""Ids of chunks: a digest of the content of the work, the same in every process.

What counts for a function: its code (with the code of nested functions), its default values and its closure. Its name,
its file, line numbers, and what it finds in global variables or calls do not. For objects it is what pickle would save
of them. Nothing is taken from ``hash()``, ``repr()``, an address, the clock or a counter: sets are put in order by
digest, and whether two equal texts are one object changes nothing.

The encoding is never decoded, so it needs to be unambiguous and stable, and no more: each value begins with a tag and
its length.
"""

from __future__ import annotations

import copyreg
import functools
import os
import pickle
import struct
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import repeat
from typing import Any, Final, NewType

from blake3 import blake3
from xxhash import xxh3_128_digest

from sublet.errors import InvalidRequest, Unpicklable
from sublet.state.transfer.memory import address_of
from sublet.values import shown

ChunkId = NewType("ChunkId", bytes)
"""What a chunk is known by: ``ID_BYTES`` bytes that follow from its content."""

ID_BYTES: Final = 16
LONGEST_ID: Final = 64
DEPTH_MAX: Final = 400
_VERSION: Final = b"sublet chunk 1\0"
_READ_BYTES: Final = 1 << 20
_POSITION: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<Q")
_FLOAT: Final = struct.Struct("<d")
_NO_CODE: Final = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


class File:
    """A file as input of a chunk: its content counts for the chunk's id, its path does not.

    A worker gets this object and reads the file itself (``open(file)``, ``file.read()``), so it must find it under the
    same path. A path given as text is a text: then the path counts, and the content does not.
    """

    __slots__ = ("path",)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"File({self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, File) and self.path == other.path

    def __hash__(self) -> int:
        return hash((File, self.path))

    def __reduce__(self) -> tuple[type[File], tuple[str]]:
        return File, (self.path,)

    def read(self) -> bytes:
        """Its content."""
        with open(self.path, "rb") as file:
            return file.read()

    def digest(self) -> bytes:
        """Of its content. A file that cannot be read is refused by name."""
        hasher = blake3()
        try:
            with open(self.path, "rb", buffering=0) as file:
                while data := file.read(_READ_BYTES):
                    hasher.update(data)
        except OSError as error:
            raise InvalidRequest(
                f"the input {self.path} cannot be read: {error.strerror}", do="See that it is a file you may read."
            ) from error
        return hasher.digest()


def valid_id(found: object) -> ChunkId:
    """The id that a chunk of the user's own class says it has."""
    if not isinstance(found, bytes) or not ID_BYTES <= len(found) <= LONGEST_ID:
        raise InvalidRequest(
            f"chunk_id() returned {shown(found)}",
            do=f"Return {ID_BYTES} to {LONGEST_ID} bytes that follow from the chunk's content, such as a digest.",
        )
    return ChunkId(found)


def chunk_id_of(work: bytes, content: bytes) -> ChunkId:
    """The id of one chunk: digest of the function and of its arguments."""
    return ChunkId(blake3(b"".join((_VERSION, work, content))).digest(ID_BYTES))


def positioned_ids(work: bytes, items: Sequence[Any], first: int) -> list[ChunkId]:
    """The ids of items of ``map`` that stand side by side: digest of the function, position, content of the item.

    A hash made for speed (XXH3, 128 bits) is enough here: two items can only be mistaken for one another at the same
    position of the same function, and large or nested items enter with their BLAKE3 digest.
    """
    simple = _SIMPLE.get
    kinds = set(map(type, items))
    if len(kinds) == 1:
        contents = list(map(simple(kinds.pop(), _nested), items))
    else:
        contents = [simple(type(item), _nested)(item) for item in items]
    positions = map(_POSITION.pack, range(first, first + len(items)))
    hashed = map(b"".join, zip(repeat(work), positions, contents))
    return list(map(xxh3_128_digest, hashed))  # type: ignore[arg-type]


def _nested(item: object) -> bytes:
    return b"#" + content_digest(item, "the item")


def function_digest(function: object) -> bytes:
    """The digest of a function, or of another callable."""
    return content_digest(function, "the function")


def content_digest(value: object, what: str = "the value") -> bytes:
    """The digest of a value's content. Raises ``Unpicklable`` with the path to what has no content of its own."""
    return _digest(value, what)


def _digest(value: object, what: str, held: list[memoryview] | None = None) -> bytes:
    encoder = _Encoder(what, held)
    encoder.put(value, what, 0)
    return encoder.hasher.digest()


def check_stable(value: object, what: str) -> None:
    """Raise if a copy of the value, as another process gets it, has another digest: a burst with such chunks could not
    be resumed."""
    import cloudpickle

    buffers: list[pickle.PickleBuffer] = []
    try:
        data = cloudpickle.dumps(value, 5, buffer_callback=buffers.append)
        copy = pickle.loads(data, buffers=buffers)  # noqa: S301 - made in the line above
    except Exception as error:
        from sublet.compute.functions import encoded  # a worker needs neither

        encoded(value)  # says what of it cannot
        raise Unpicklable(f"{what} cannot travel to another process ({type(error).__name__}: {error})") from error
    held: list[memoryview] = []
    if len({_digest(one, what, held) for one in (value, value, copy)}) == 1:  # large arrays count by place
        return
    mine = content_digest(value, what)
    if content_digest(value, what) != mine or content_digest(copy, what) != mine:
        raise InvalidRequest(
            f"another process could not compute the same id for {what}, so a burst with a name could not be resumed",
            do="See that what pickle saves of it depends on its content alone, or leave the name out.",
        )


class _Encoder:
    def __init__(self, what: str, held: list[memoryview] | None = None) -> None:
        """With ``held`` buffers count by where they lie, and not by their content: digests of one process are compared
        without a pass over each large array. They lie there as long as the list has them."""
        self.hasher = blake3(_VERSION)
        self._what = what
        self._held = held
        self._open: dict[int, int] = {}
        """Objects that are being encoded, by address, and how deep: a way back into one of them is a cycle."""

    def put(self, value: Any, path: str, depth: int) -> None:
        kind = type(value)
        if kind is bytes:  # without a copy
            self._bytes(b"y", value)
            return
        simple = _SIMPLE.get(kind)
        if simple is not None:
            tagged = simple(value)
            self._bytes(tagged[:1], memoryview(tagged)[1:])
            return
        if depth > DEPTH_MAX:
            raise InvalidRequest(f"{self._what} is nested deeper than {DEPTH_MAX} levels", do="Pass it as bytes.")
        above = self._open.get(id(value))
        if above is not None:
            self._bytes(b"^", str(depth - above).encode())
            return
        self._open[id(value)] = depth
        try:
            self._compound(value, kind, path, depth + 1)
        finally:
            del self._open[id(value)]

    def _bytes(self, tag: bytes, data: bytes | memoryview) -> None:
        self.hasher.update(tag + _LENGTH.pack(len(data)))
        self.hasher.update(data)

    def _many(self, tag: bytes, values: Iterable[Any], paths: Callable[[int], str], depth: int) -> None:
        found = list(values)
        self._bytes(tag, str(len(found)).encode())
        for n, value in enumerate(found):
            self.put(value, paths(n), depth)

    def _compound(self, value: Any, kind: type, path: str, depth: int) -> None:
        if kind is tuple or kind is list:
            self._many(b"(" if kind is tuple else b"[", value, lambda n: f"{path}[{n}]", depth)
        elif kind is dict:
            self._pairs(b"{", value, path, depth)
        elif kind is set or kind is frozenset:
            digests = sorted(content_digest(one, f"a member of {path}") for one in value)
            self._many(b"<" if kind is set else b"f", digests, lambda n: path, depth)
        elif kind is File:
            self._bytes(b"F", value.digest())
        elif isinstance(value, types.FunctionType):
            self._function(value, path, depth)
        elif isinstance(value, types.CodeType):
            self._code(value, path, depth)
        elif isinstance(value, types.MethodType):
            self._many(b"m", (value.__func__, value.__self__), lambda n: f"{path}.__self__", depth)
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, dict(sorted(value.keywords.items())))
            self._many(b"p", parts, lambda n: f"{path}.{('func', 'args', 'keywords')[n]}", depth)
        elif isinstance(value, (*_NO_CODE, type)):
            self._by_name(value, path, depth)
        elif isinstance(value, types.ModuleType):
            self._bytes(b"M", value.__name__.encode())
        elif kind is types.MappingProxyType:
            self._pairs(b"v", value, path, depth)
        elif (parts_of := _PARTS_OF.get(kind)) is not None:  # what classes are made of, and pickle has no form for
            self._many(b"w", (kind, *parts_of(value)), lambda n: path, depth)
        elif isinstance(value, Enum):
            self._many(b"E", (kind, value.name), lambda n: path, depth)
        else:
            self._reduced(value, kind, path, depth)

    def _pairs(self, tag: bytes, value: Mapping[Any, Any], path: str, depth: int) -> None:
        self._bytes(tag, str(len(value)).encode())
        for key, one in value.items():
            self.put(key, f"a key of {path}", depth)
            self.put(one, f"{path}[{shown(key)}]", depth)

    def _function(self, value: types.FunctionType, path: str, depth: int) -> None:
        self._bytes(b"D", b"")
        self.put(value.__code__, path, depth)
        self.put(value.__defaults__, f"{path}.__defaults__", depth)
        defaults = value.__kwdefaults__
        self.put(None if defaults is None else dict(sorted(defaults.items())), f"{path}.__kwdefaults__", depth)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                held = cell.cell_contents
            except ValueError:  # not bound yet
                self._bytes(b"0", b"")
            else:
                self.put(held, f"{path}'s variable {name!r}", depth)

    def _code(self, code: types.CodeType, path: str, depth: int) -> None:
        self._bytes(b"C", code.co_code)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self.put((sys.version_info[:2], counts, names, code.co_exceptiontable), path, depth)
        self._many(b"k", code.co_consts, lambda n: path, depth)

    def _by_name(self, value: Any, path: str, depth: int) -> None:
        """A class or a C function: by its name where it can be imported, else by what it is made of."""
        module, name = getattr(value, "__module__", None), value.__qualname__
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._many(b"b", (owner, name), lambda n: path, depth)
        elif module != "__main__" and "<locals>" not in name:
            objclass = getattr(value, "__objclass__", None)
            self._bytes(b"N", f"{module or getattr(objclass, '__module__', '')}:{name}".encode())
        elif isinstance(value, type):
            made_of = {key: one for key, one in sorted(vars(value).items()) if key not in _NOT_CONTENT}
            self._many(b"T", (name, value.__bases__), lambda n: path, depth)
            self._pairs(b"t", made_of, path, depth)
        else:
            raise self._cannot(value, path)

    def _reduced(self, value: Any, kind: type, path: str, depth: int) -> None:
        if kind is pickle.PickleBuffer:
            if self._held is None:
                with value.raw() as raw:
                    self._bytes(b"B", raw)
            else:
                self._held.append(value.raw())
                self._bytes(b"A", b"%d %d" % (address_of(self._held[-1]), self._held[-1].nbytes))
            return
        try:
            reducer = copyreg.dispatch_table.get(kind)
            found = reducer(value) if reducer is not None else value.__reduce_ex__(5)
        except Exception as error:
            raise self._cannot(value, path) from error
        if isinstance(found, str):
            self._bytes(b"S", f"{kind.__module__}:{found}".encode())
            return
        parts: list[Any] = [*found, None, None, None]
        made, args, state, items, pairs = parts[:5]
        self._bytes(b"R", b"")
        self.put(_name_of(made), path, depth)
        self.put(tuple(args), path, depth)
        if isinstance(state, dict):
            self._bytes(b"s", str(len(state)).encode())
            for key, one in state.items():
                self.put(key, path, depth)
                self.put(one, f"{path}.{key}", depth)
        else:
            self.put(state, path, depth)
        self._many(b"i", items or (), lambda n: f"{path}[{n}]", depth)
        self._many(b"j", pairs or (), lambda n: path, depth)

    def _cannot(self, value: object, path: str) -> Unpicklable:
        return Unpicklable(
            f"{path} is a {type(value).__name__}, which has no content that another process could have as well",
            path=path,
            what=type(value).__name__,
        )


def _name_of(made: Any) -> Any:
    """``copyreg`` hands its own helpers over: they are code of Python's, and only their name counts."""
    if isinstance(made, types.FunctionType) and "<locals>" not in made.__qualname__ and made.__module__ != "__main__":
        return f"{made.__module__}:{made.__qualname__}"
    return made


_NOT_CONTENT: Final = frozenset(
    {
        *("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__"),
        *("__qualname__", "__slotnames__", "_abc_impl"),
    }
)
"""Of a class: what Python keeps there for itself, some of it only once an instance was pickled."""
_PARTS_OF: Final[dict[type, Callable[[Any], tuple[Any, ...]]]] = {
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    property: lambda value: (value.fget, value.fset, value.fdel),
    functools.cached_property: lambda value: (value.func, value.attrname),
    types.MemberDescriptorType: lambda value: (value.__name__,),
    types.GetSetDescriptorType: lambda value: (value.__name__,),
}
_SIMPLE: Final[dict[type, Callable[[Any], bytes]]] = {
    type(None): lambda value: b"n",
    bool: lambda value: b"1!" if value else b"0!",
    int: b"d%d".__mod__,
    float: lambda value: b"g" + _FLOAT.pack(value),
    complex: lambda value: b"c" + _FLOAT.pack(value.real) + _FLOAT.pack(value.imag),
    str: lambda value: b"u" + value.encode("utf-8", "surrogatepass"),
    bytes: lambda value: b"y" + value,
    bytearray: lambda value: b"a" + value,
    type(Ellipsis): lambda value: b"e",
}
"""What the commonest values are hashed as; the first byte says what they are."""
