"""Serializes values for calls: a pickle, with large buffers beside it.

Pickle 5 does it, with large arrays out of band, so that they are copied once (into shared memory) or not at all. What
it has no form for goes through cloudpickle: functions and classes of ``__main__``, closures, lambdas. What nothing has
a form for is named, with the path to it: ``args[0]['model'].lock is a _thread.lock``.
"""

from __future__ import annotations

import copyreg
import functools
import io
import os
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

from sublet.errors import InvalidRequest, OutOfMemory, SubletError, Unpicklable, Unsupported
from sublet.state.transfer.memory import lending, raw_view
from sublet.wire.frames import close_all
from sublet.wire.persistent_memory import Lasting, map_lent
from sublet.wire.sealed_memory import map_shared, write_shared
from sublet.wire.work import INLINE_MAX, LARGE_BYTES, PIECES_MAX, Piece, ReceivedMessage, Where

FDS_OF_ONE: Final = 12
"""Buffers with a descriptor of their own; the rest of a message shares one. Lasting memory has its own besides."""
_MAIN: Final = b"__main__"
_ARGUMENT: Final = re.compile(r"\(args, kwargs\)\[(?:0\]\[(\d+)|1\]\[('[^']*'))\]")
_ITEM: Final = re.compile(r"the items\[0\]\[\d+\]|the arguments\._items\[\d+\]")


class Cargo(NamedTuple):
    """A value, taken apart."""

    head: bytes
    """The pickle."""
    buffers: tuple[memoryview, ...]
    """Its large buffers (format ``B``), in the order the pickle wants them back."""


class PlacedBuffers(NamedTuple):
    """A value, ready to be sent. The descriptors are the sender's to close."""

    pieces: tuple[Piece, ...]
    inline: tuple[bytes | memoryview, ...]
    fds: tuple[int, ...]


def encode(value: object, what: str, *, of: ModuleType | None = None) -> Cargo:
    """Take it apart. Raises ``Unpicklable``, which calls the value ``what``. What module ``of`` defines goes by value,
    though it could be imported."""
    buffers: list[memoryview] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = raw_view(buffer)
        except BufferError:  # not in one piece
            return True
        if raw.nbytes < LARGE_BYTES or len(buffers) >= PIECES_MAX // 2:
            return True
        buffers.append(raw)
        return False

    try:
        with lending():
            head = _plain(value, beside) if of is None else None
        if head is None:
            buffers.clear()
            with lending():
                head = _with_functions(value, beside, of)
    except SubletError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise _unpicklable(value, what, error) from error
    return Cargo(head, tuple(buffers))


class _Large:
    """Bytes that lie beside the pickle, as arrays do; pickle itself has them within it, whatever their size."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return bytes, (pickle.PickleBuffer(self._data),)


def out_of_band(value: Any, depth: int = 3) -> Any:
    """The same for ``encode``, with large bytes beside the pickle: a value that is bytes, or a tuple with some. What
    can be changed is left as it is, since it may be meant to be one thing in two places."""
    if type(value) is bytes:
        return _Large(value) if len(value) >= LARGE_BYTES else value
    if type(value) is not tuple or not depth:
        return value
    for one in value:
        if type(one) is bytes or type(one) is tuple:
            return tuple(out_of_band(each, depth - 1) for each in value)
    return value


def load(head: bytes | memoryview, buffers: Iterable[memoryview] = ()) -> Any:
    """The value again. Whatever it raises comes out."""
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - holder and worker are one program


class PeerBuffers(Protocol):
    """Knows what the other side still has."""

    def find(self, view: memoryview) -> int:
        """The number under which the other side has exactly these bytes; 0 if it does not."""

    def took(self, view: memoryview, fd: int) -> int:
        """They go to the other side in this shared memory: the number it shall keep them under, or 0 for not at all.
        ``fd`` stays the caller's."""


def place_buffers(
    cargo: Cargo, keeper: PeerBuffers | None = None, lend: Callable[[memoryview], int] | None = None
) -> PlacedBuffers:
    """Decide where each piece goes, and put the large ones into shared memory. ``lend`` may have memory for one that is
    filled again later: the descriptor, or -1."""
    stowing = _Stowing(keeper, lend)
    try:
        return stowing.place_buffers(cargo)
    except OSError as error:
        close_all(stowing.fds)
        raise OutOfMemory(f"there is no memory to hand the value over in ({error})", do="Send less.") from error
    except BaseException:
        close_all(stowing.fds)
        raise


def fetch_buffers(
    message: ReceivedMessage, fds: Sequence[int], kept: Callable[[int], int]
) -> tuple[memoryview, list[memoryview]]:
    """The first piece and the others of a message. ``kept`` gives the descriptor of a kept piece.

    What was writable is so again, and what is written stays here: neither the sender nor a later call sees it.
    """
    found: list[memoryview] = []
    at = 0
    for piece in message.pieces:
        if piece.where is Where.INLINE:
            found.append(message.data[at : at + piece.length])
            at += piece.length
            continue
        if piece.where is Where.SHARED and piece.fd >= len(fds):
            raise InvalidRequest("a message of a call came without its shared memory")
        fd = kept(piece.number) if piece.where is Where.KEPT else fds[piece.fd]
        try:
            if piece.is_lasting:
                found.append(memoryview(Lasting.of(fd, piece.length)))
                continue
            if piece.is_lent:
                found.append(map_lent(fd, piece.length, writable=not piece.is_readonly))
                continue
            found.append(map_shared(fd, piece.offset, piece.length, writable=not piece.is_readonly))
        except OSError as error:
            raise OutOfMemory(f"{piece.length} bytes that were sent found no room here ({error})") from error
    if not found:
        raise InvalidRequest("a message of a call came without content")
    return found[0], found[1:]


class _Stowing:
    """One value on its way into pieces."""

    def __init__(self, keeper: PeerBuffers | None, lend: Callable[[memoryview], int] | None) -> None:
        self.fds: list[int] = []
        self._keeper = keeper
        self._lend = lend
        self._pieces: list[Piece] = []
        self._inline: list[bytes | memoryview] = []
        self._together: list[tuple[int, memoryview]] = []

    def place_buffers(self, cargo: Cargo) -> PlacedBuffers:
        self._add_head(cargo.head)
        for buffer in cargo.buffers:
            self._add_buffer(buffer)
        self._share_the_rest()
        return PlacedBuffers(tuple(self._pieces), tuple(self._inline), tuple(self.fds))

    def _add_head(self, head: bytes) -> None:
        if len(head) <= INLINE_MAX:
            self._pieces.append(Piece(Where.INLINE, len(head)))
            self._inline.append(head)
        else:
            self._share(memoryview(head), 0, is_readonly=False)

    def _add_buffer(self, view: memoryview) -> None:
        if isinstance(view.obj, Lasting):
            self._pieces.append(Piece(Where.SHARED, view.nbytes, fd=len(self.fds), is_lasting=True))
            self.fds.append(os.dup(view.obj.file.fd))
            return
        if self._lend is not None and len(self.fds) < FDS_OF_ONE and (fd := self._lend(view)) >= 0:
            self._pieces.append(
                Piece(Where.SHARED, view.nbytes, fd=len(self.fds), is_readonly=view.readonly, is_lent=True)
            )
            self.fds.append(fd)
            return
        number = 0 if self._keeper is None else self._keeper.find(view)
        if number:
            self._pieces.append(Piece(Where.KEPT, view.nbytes, number, is_readonly=view.readonly))
        elif len(self.fds) < FDS_OF_ONE:
            fd = self._share(view, 0, is_readonly=view.readonly)
            if self._keeper is not None and (number := self._keeper.took(view, fd)):
                self._pieces[-1] = self._pieces[-1]._replace(number=number)
        else:
            self._together.append((len(self._pieces), view))
            self._pieces.append(Piece(Where.SHARED, view.nbytes, is_readonly=view.readonly))

    def _share(self, view: memoryview, number: int, *, is_readonly: bool) -> int:
        fd, _ = write_shared((view,))
        self._pieces.append(Piece(Where.SHARED, view.nbytes, number, len(self.fds), 0, is_readonly))
        self.fds.append(fd)
        return fd

    def _share_the_rest(self) -> None:
        if not self._together:
            return
        fd, starts = write_shared([view for _, view in self._together])
        self.fds.append(fd)
        for (index, _), start in zip(self._together, starts, strict=True):
            self._pieces[index] = self._pieces[index]._replace(fd=len(self.fds) - 1, offset=start)


# ------------------------------------------------------------------------------------------------- the two picklers


def _plain(value: object, beside: Callable[[pickle.PickleBuffer], bool]) -> bytes | None:
    """Pickle 5 alone; None where it has no form for something, or knows it by a name that only this process has."""
    try:
        if not _has_torch():
            head = pickle.dumps(value, 5, buffer_callback=beside)
        else:
            out = io.BytesIO()
            pickler = pickle.Pickler(out, 5, buffer_callback=beside)
            pickler.dispatch_table = tensor_reducers(copyreg.dispatch_table)
            pickler.dump(value)
            head = out.getvalue()
    except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError):
        return None
    return None if _MAIN in head else head


def _with_functions(
    value: object, beside: Callable[[pickle.PickleBuffer], bool], of: ModuleType | None = None
) -> bytes:
    """Functions and classes that are not to be found by name go along."""
    cloudpickle = import_cloudpickle()
    if of is not None:
        cloudpickle.register_pickle_by_value(of)
        try:
            return _with_functions(value, beside)
        finally:
            cloudpickle.unregister_pickle_by_value(of)
    out = io.BytesIO()
    pickler = cloudpickle.Pickler(out, 5, buffer_callback=beside)
    if _has_torch():
        pickler.dispatch_table = tensor_reducers(pickler.dispatch_table)
    pickler.dump(value)
    return out.getvalue()


def _has_torch() -> bool:
    """Whether there can be tensors: while another thread imports it, it has not got them yet."""
    torch = sys.modules.get("torch")
    return torch is not None and not getattr(getattr(torch, "__spec__", None), "_initializing", False)


def import_cloudpickle() -> Any:
    """Functions by value need it on both sides."""
    try:
        import cloudpickle
    except ImportError:
        raise Unsupported(
            f"cloudpickle is not installed for {sys.executable}, and nothing else carries functions by value",
            do="Install cloudpickle there, or put the function into a module that is there and importable.",
        ) from None
    return cloudpickle


def _unpicklable(value: object, what: str, error: BaseException) -> Unpicklable:
    path, culprit = find_culprit(value, what, _travels)
    path = _in_words(path)
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
    return Unpicklable(
        f"{path} cannot travel to another process: it is a {kind} ({type(error).__name__}: {error})",
        path=path,
        what=kind,
        do="Leave it out, or make it inside the function.",
    )


def _in_words(path: str) -> str:
    """What a caller knows by no such name."""
    path = _ARGUMENT.sub(lambda found: f"argument {found[2] or int(found[1]) + 1}", path)
    return _ITEM.sub("an item", path).replace("the items[1]", "what the generator returns")


def _travels(value: object) -> bool:
    try:
        with lending():
            _with_functions(value, lambda buffer: False)
    except (KeyboardInterrupt, SystemExit, Unsupported):
        raise
    except BaseException:  # noqa: BLE001 - a value may raise anything while it is taken apart
        return False
    return True


# -------------------------------------- Which part of a value cannot go to another process, and the way to it, in words

DEPTH_MAX: Final = 24
CHILDREN_MAX: Final = 10_000
"""Of one value; a list that long is searched no further."""


def find_culprit(value: object, path: str, travels: Callable[[object], bool]) -> tuple[str, object]:
    """The innermost part that does not travel; the value itself where each of its parts does."""
    seen: set[int] = set()
    for _ in range(DEPTH_MAX):
        seen.add(id(value))
        for inner, (child_path, child) in enumerate(_parts(value, path)):
            if inner >= CHILDREN_MAX:
                break
            if id(child) not in seen and not travels(child):
                path, value = child_path, child
                break
        else:
            break
    return path, value


def _parts(value: Any, path: str) -> Iterator[tuple[str, object]]:
    match value:
        case Mapping():
            for key, item in list(value.items()):
                yield f"a key of {path}", key
                yield f"{path}[{_short(key)}]", item
        case list() | tuple():
            for index, item in enumerate(value):
                yield f"{path}[{index}]", item
        case set() | frozenset():
            for item in value:
                yield f"an element of {path}", item
        case types.FunctionType():
            yield from _of_function(value, path)
        case types.MethodType():
            yield f"{path}.__self__", value.__self__
            yield f"{path}.__func__", value.__func__
        case functools.partial():
            yield f"{path}.func", value.func
            yield from _parts(value.args, f"{path}.args")
            yield from _parts(value.keywords, f"{path}.keywords")
        case type():
            for name, item in list(vars(value).items()):
                yield f"{path}.{name}", item
        case _:
            yield from _of_object(value, path)


def _of_function(value: types.FunctionType, path: str) -> Iterator[tuple[str, object]]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
        try:
            yield f"{path}'s captured variable {name!r}", cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in sorted(_names_used(value.__code__)):
        if name in value.__globals__:
            yield f"{path}'s global {name!r}", value.__globals__[name]
    for name, item in (value.__kwdefaults__ or {}).items():
        yield f"the default of {path}'s {name!r}", item
    for item in value.__defaults__ or ():
        yield f"a default of {path}", item
    for name, item in value.__dict__.items():
        yield f"{path}.{name}", item


def _names_used(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_used(constant)
    return found


def _of_object(value: Any, path: str) -> Iterator[tuple[str, object]]:
    state = getattr(value, "__dict__", None)
    if isinstance(state, dict):
        for name, item in list(state.items()):
            yield f"{path}.{name}", item
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 40 else f"{text[:37]}..."


# ---- How tensors of PyTorch travel: their storages as large buffers, so that they are not copied into the pickle
# Tensors that share a storage share it again on the other side. One on a GPU does not travel: taking it apart would
# touch CUDA in a process that must not, or bring it up in the holder when it is put together. Loaded only where torch
# is.


def tensor_reducers(table: Mapping[type, Callable[[Any], Any]]) -> dict[type, Callable[[Any], Any]]:
    """The table of a pickler, with tensors. One for each pickle: it remembers the storages it has met."""
    torch = sys.modules["torch"]
    storages: dict[int, Any] = {}

    def reduce(tensor: Any) -> Any:
        if tensor.is_cuda:
            raise InvalidRequest(
                f"a tensor on {tensor.device} cannot travel to another process",
                do="Move it with .cpu(); on the GPU it lives inside the functions that run there.",
            )
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.__reduce_ex__(5)
        if not tensor.is_leaf:
            raise InvalidRequest(
                "a tensor with a gradient history cannot travel to another process", do="Send tensor.detach()."
            )
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in storages or not key:
            storages[key] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        view = (tensor.storage_offset(), tuple(tensor.size()), tensor.stride())
        extra = dict(tensor.__dict__)
        return _rebuild, (storages[key], tensor.dtype, view, tensor.requires_grad, type(tensor), extra)

    return {**table, torch.Tensor: reduce, torch.nn.Parameter: reduce}


def _rebuild(storage: Any, dtype: Any, view: Any, requires_grad: bool, kind: Any, extra: dict[str, Any]) -> Any:
    import torch

    base = torch.from_numpy(storage)
    made: Any = torch.empty(0, dtype=dtype).set_(base.untyped_storage(), *view)
    if kind is torch.nn.Parameter:
        made = torch.nn.Parameter(made, requires_grad)
    elif requires_grad:
        made.requires_grad_()
    made.__dict__.update(extra)
    return made
