"""Functions that saved heads call by name to rebuild views. Names are part of the format: never rename one.

Runs where ``loading`` runs. A library is imported here only because the value that is being loaded needs it.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import enum
import functools
import importlib
import io
import re
import sys
import threading
import types
import typing
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from sublet.errors import Unsupported

_on_host = contextvars.ContextVar("_on_host", default=False)


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """What is loaded within stays in the host's memory, whatever device it was saved from, and no device is asked for:
    for a program that has none, and must not touch one that is there."""
    before = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(before)


def array(window: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int) -> Any:
    """A numpy array over a window; without strides it is in C order."""
    import numpy as np

    return np.ndarray(shape, dtype, window, offset, strides)


def array_on(owner: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
    """A numpy array over the memory of a byte array, or of one of the array module."""
    import numpy as np

    return np.ndarray(shape, dtype, memoryview(owner).cast("B"), offset, strides)


def object_view(base: Any, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """An array of objects that looks at another, from its element ``at``."""
    import numpy as np

    return np.lib.stride_tricks.as_strided(base.reshape(-1)[at:], shape, strides)


def array_of_kind(kind: Any, plain: Any) -> Any:
    """An array of a class of one's own, over the memory of a plain one."""
    return plain.view(kind)


def set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Of an object that has ideas of its own about its state."""
    value.__dict__.update(attributes)


def set_random(value: Any, parts: tuple[Any, dict[str, Any]]) -> None:
    """A generator of numbers: where it stands, and its attributes."""
    state, attributes = parts
    value.setstate(state)
    value.__dict__.update(attributes)


def memory_view_on(owner: Any, at: int, nbytes: int, code: str, shape: tuple[int, ...]) -> memoryview:
    """A memoryview of a byte array, or of one of the array module."""
    return memory_view(memoryview(owner).cast("B")[at : at + nbytes], code, shape)


def memory_view(window: Any, code: str, shape: tuple[int, ...]) -> memoryview:
    """A contiguous memoryview over a window."""
    flat = memoryview(window)
    if code == "B" and len(shape) == 1:
        return flat
    return flat.cast(code, list(shape))  # type: ignore[call-overload,no-any-return]


def torch_storage(window: Any, device: str) -> Any:
    """A storage of PyTorch over a window; copied where the window is read-only (tensors know no such thing) or where
    the storage was on a device."""
    import torch

    view = memoryview(window)
    if not view.nbytes:
        storage = torch.UntypedStorage(0)
    else:
        storage = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8).untyped_storage()
    if device == "cpu" or _on_host.get():
        return storage
    return _on_device(storage, device)


def _on_device(storage: Any, device: str) -> Any:
    """Back on its device. Another device of the same kind will do; the host's memory for a GPU's will not, unasked."""
    torch = sys.modules["torch"]
    kind, _, index = device.partition(":")
    backend = getattr(torch, kind, None)
    if backend is None or not backend.is_available():
        raise Unsupported(
            f"a tensor was saved on {device}, and there is no such device here",
            do="Restore it where there is one, or move the state to the CPU before it is saved.",
        )
    if index and int(index) >= backend.device_count():
        device = kind
    return torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()


def torch_typed_storage(storage: Any, dtype: Any) -> Any:
    """A storage that knows the type of its numbers."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def set_grad(tensor: Any, grad: Any) -> None:
    """Give a tensor its gradient back."""
    tensor.grad = grad


HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where a leaf tensor keeps what ``register_hook`` and ``register_post_accumulate_grad_hook`` gave it."""


def hooks_of(tensor: Any) -> tuple[Any, ...]:
    """The dicts of a tensor's own hooks, each None where there is none. Those of a tensor that was computed belong to
    its autograd graph, which stays where it is."""
    return tuple(getattr(tensor, name, None) or None for name in HOOKS) if tensor.is_leaf else ()


def set_hooks(tensor: Any, state: tuple[Any, ...]) -> None:
    """Give a tensor its gradient and its hooks back."""
    grad, *hooks = state
    if grad is not None:
        tensor.grad = grad
    for name, held in zip(HOOKS, hooks, strict=True):
        if held is not None:
            setattr(tensor, name, held)


def set_tensor_parts(tensor: Any, state: tuple[Any, ...]) -> None:
    """Give a tensor back the attributes that the program gave it, its gradient and its hooks."""
    attributes, *others = state
    tensor.__dict__.update(attributes)
    set_hooks(tensor, tuple(others))


DRAWS_ON: Final = ("im", "draw")
"""What an ``ImageDraw`` of Pillow has of the image that it draws on, in C."""


def image_draw(image: Any, mode: str) -> Any:
    """What draws on an image of Pillow."""
    return importlib.import_module("PIL.ImageDraw").ImageDraw(image, mode)


SAVED_WITH: Final = ("encoderinfo", "encoderconfig", "_default_encoderinfo")
"""What an image of Pillow keeps of how it was saved last. Nothing reads it, and it may hold other images."""


def set_image(image: Any, state: tuple[list[Any], dict[str, Any]]) -> None:
    """Give an image of Pillow its pixels, and of its other attributes those that its own state has not set."""
    own, left = state
    image.__setstate__(own)
    vars(image).update({name: held for name, held in left.items() if name not in vars(image)})


def image_frame(file: str, frame: int) -> Any:
    """An image of several frames, at one of them."""
    with open(file, "rb") as opened:  # no file stays open for an image that nothing closes
        image = importlib.import_module("PIL.Image").open(io.BytesIO(opened.read()))
    image.filename = file
    image.n_frames  # noqa: B018 - counted now: it reads all frames, and what is drawn on one later would be lost
    image.seek(frame)
    image.load()
    return image


def set_frame(image: Any, state: list[Any]) -> None:
    """The frame may have been drawn on since it was read."""
    if image.__getstate__()[1:5] != state[1:5]:
        importlib.import_module("PIL.Image").Image.__setstate__(image, state)


def of_module(module: str, name: str) -> Any:
    """What a library has under a name."""
    return getattr(importlib.import_module(module), name)


def inference_tensor(make: Any, arguments: tuple[Any, ...]) -> Any:
    """One that was made in inference mode."""
    with importlib.import_module("torch").inference_mode():
        return make(*arguments)


def quantized_tensor(make: Any, arguments: tuple[Any, ...]) -> Any:
    """PyTorch warns of what its own function calls here, which is nothing that the program did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*arguments)


def new_optimizer(kind: Any) -> Any:
    """Without its state. From here on the ``step`` of its class calls hooks, and functions may hold that very one."""
    made = kind.__new__(kind)
    importlib.import_module("torch.optim").Optimizer.__setstate__(made, {"defaults": {}})
    return made


def parametrized_module(base: Any, tensors: tuple[str, ...]) -> Any:
    """Without its state: of a class of its own, in which these tensors are computed, as PyTorch makes it."""
    parametrize: Any = importlib.import_module("torch.nn.utils.parametrize")
    made = base.__new__(base)
    parametrize._inject_new_class(made)
    for name in tensors:
        parametrize._inject_property(made, name)
    return made


class HeldReference(weakref.ref[Any]):
    """A weak reference that keeps its object, which nothing else here may hold."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def set_hook_handle(handle: Any, state: tuple[Any, int, tuple[Any, ...]]) -> None:
    """The handle of a hook of PyTorch: the dicts that have the hook belong to a model that may not be here."""
    handle.__setstate__(state)
    hooks, _, extra = state
    if hooks is not None:
        handle.hooks_dict_ref = HeldReference(hooks)
    handle.extra_dict_ref = tuple(map(HeldReference, extra))


def operation_of(tensor: Any) -> str:
    """The name that PyTorch shows for what computed a tensor."""
    name = type(tensor.grad_fn).__name__
    return str(tensor.grad_fn.name()) if name == "CppFunction" else name


def computed_tensor(value: Any, operation: str, retains_grad: bool) -> Any:
    """A tensor on the memory of ``value`` that was computed in another process, which has the graph."""
    import torch

    kind = _operations.get(operation) or _operation(operation)
    with torch.enable_grad(), torch.inference_mode(mode=False):
        made = kind.apply(value, torch.empty(0, requires_grad=True))
    if retains_grad:
        made.retain_grad()
    return made


def is_computed_elsewhere(tensor: Any) -> bool:
    """Whether the graph of a tensor is in another process."""
    return type(tensor.grad_fn) in {kind._backward_cls for kind in _operations.values()}


NOT_IN_THE_GRAPH: Final = "appears to not have been used in the graph"
"""Of the error of ``torch.autograd.grad``, which looks for the inputs before it runs anything."""
GRAPH_HINT: Final = (
    "Part of this autograd graph is in the other process: a tensor that crosses brings its values, not its graph. "
    "Compute the result and call torch.autograd.grad() or backward() on the same side: both in %%gpu cells, or both "
    "without %%gpu."
)


def graph_hint(error: BaseException) -> str:
    """For an error of PyTorch's that does not say so: that the graph of a tensor that came here is elsewhere."""
    is_of_graphs = isinstance(error, RuntimeError) and NOT_IN_THE_GRAPH in str(error)
    return GRAPH_HINT if is_of_graphs and _operations else ""


_operations: Final[dict[str, Any]] = {}
"""Stand-ins for operations that ran in another process, by name."""


def _operation(name: str) -> Any:
    torch = sys.modules["torch"]

    def forward(context: Any, value: Any, anchor: Any) -> Any:
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        return made.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    def backward(context: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            f"backward() reached a tensor that was computed in the other process (by {name}), where its autograd graph "
            "is. Compute it and call backward() on the same side: both in %%gpu cells, or both without %%gpu."
        )

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    kind = type(name, (torch.autograd.Function,), methods)
    kind._backward_cls.__name__ = name  # type: ignore[attr-defined]  # what PyTorch prints
    _operations[name] = kind
    return kind


def cell() -> types.CellType:
    """A variable around a function, as yet without a value."""
    return types.CellType()


def fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    """Give it its value, if it has one."""
    if contents:
        cell.cell_contents = contents[0]


def function(
    code: types.CodeType, names: dict[str, Any], name: str | None, defaults: Any, closure: Any
) -> types.FunctionType:
    """A function, as yet without its attributes. Its namespace gets no ``__builtins__``: Python finds them without, and
    what stands there would belong to all programs of the process."""
    return types.FunctionType(code, names, name, defaults, closure)


def fill_function(function: types.FunctionType, state: tuple[Any, tuple[tuple[Any, ...], ...]]) -> None:
    """Everything of a function that could not be there when it was made, and the variables around it.

    Nothing is written into the namespace of a module: of a function that lives in one, no global names are sent.
    """
    (attributes, parts), contents = state
    function.__dict__.update(attributes)
    names = {name: value for name, value in parts["__globals__"].items() if name != "__builtins__"}
    if names:
        function.__globals__.update(names)
    for cell, held in zip(function.__closure__ or (), parts["__closure__"] or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty one
            cell.cell_contents = held.cell_contents
    for name, value in parts.items():
        if name not in _NO_PARTS:
            setattr(function, name, value)
    for one, held in zip(function.__closure__ or (), contents, strict=False):
        fill_cell(one, held)


_NO_PARTS = frozenset({"__globals__", "__closure__", "_cloudpickle_submodules"})


def remembering(function: Any, maxsize: int | None, typed: bool) -> Any:
    """What ``functools.lru_cache`` makes, with nothing remembered."""
    return functools.lru_cache(maxsize, typed)(function)


def set_remembering(function: Any, attributes: dict[str, Any]) -> None:
    """The attributes of what ``functools.lru_cache`` made, instead of those that it took from its function."""
    for name in vars(function).keys() - attributes.keys() - {"__wrapped__", "cache_parameters"}:
        del vars(function)[name]
    vars(function).update(attributes)


def new_type(name: str, of: Any, module: str) -> Any:
    """What ``typing.NewType`` makes."""
    made = typing.NewType(name, of)  # type: ignore[misc]
    made.__module__ = module
    return made


def make_class(
    kind: type, name: str, bases: tuple[Any, ...], attributes: dict[str, Any], tracker: str | None, extra: Any
) -> type:
    """A class, as yet without its attributes; the one that is here where it came before.

    No code of the program runs that made it: neither its metaclass's, if that is the program's own, nor what a class
    does when it gets a subclass. They did what they had to when the class statement ran.
    """
    from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as TRACKED
    from cloudpickle.cloudpickle import _lookup_class_or_track

    if tracker is not None and (known_class := TRACKED.get(tracker)) is not None:
        known = _classes_here.get()
        if known is not None and known_class.__bases__ != bases and all(isinstance(one, type) for one in bases):
            known.bases[known_class] = bases
        return known_class  # type: ignore[no-any-return]
    names = {sys.intern(key): value for key, value in attributes.items()}
    with _without_init_subclass(types.resolve_bases(bases)):
        if kind.__module__ in _MAINS:
            library: Any = next(one for one in kind.__mro__ if one.__module__ not in _MAINS)
            resolved = types.resolve_bases(bases)
            if resolved != bases:
                names["__orig_bases__"] = bases
            made = library.__new__(kind, name, resolved, names)
        else:
            made = types.new_class(name, bases, {"metaclass": kind}, lambda space: space.update(names))
    return _lookup_class_or_track(tracker, made)  # type: ignore[no-any-return]


def make_enum(bases: Any, name: str, qualname: str, members: Any, module: str, tracker: str | None, extra: Any) -> type:
    """An enumeration; the one that is here where it came before. ``extra``: of each member what its type of Python's
    makes it of, if the program has a ``__new__`` for it. Neither that nor an ``__init__`` is called: attributes of the
    members come with those of the class."""
    from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as TRACKED
    from cloudpickle.cloudpickle import _lookup_class_or_track, _make_skeleton_enum

    if tracker is not None and (known_class := TRACKED.get(tracker)) is not None:
        return known_class  # type: ignore[no-any-return]
    if extra is None:  # of a checkpoint that was saved before attributes of members were
        return _make_skeleton_enum(bases, name, qualname, members, module, tracker, extra)  # type: ignore[no-any-return]
    metaclass: Any = type(bases[-1])
    space = metaclass.__prepare__(name, bases)
    for member, value in members.items():
        space[member] = value
    space["__init__"] = _nothing
    if extra:
        space["__new__"] = _making_members(list(members.values()), list(extra.values()))
    made = metaclass.__new__(metaclass, name, bases, space)
    for own in ("__init__", "__new_member__"):
        if own in vars(made):
            type.__delattr__(made, own)
    made.__module__, made.__qualname__ = module, qualname
    return _lookup_class_or_track(tracker, made)  # type: ignore[no-any-return]


def _making_members(values: list[Any], contents: list[tuple[Any, ...]]) -> Any:
    """A ``__new__`` that is called for each member in turn."""
    line = zip(values, contents, strict=True)

    def new(kind: Any, *_: Any) -> Any:
        value, given = next(line)
        core = next(one for one in kind.__mro__ if not one.__flags__ & _HEAP_TYPE)
        made = core.__new__(kind, *given)
        made._value_ = value
        return made

    return new


_HEAP_TYPE: Final = 1 << 9
"""The flag of classes that were made while the program ran."""
MEMBERS: Final = "\0members"
"""Stands among the attributes of an enumeration: those that its members have."""


def attributes_of_member(member: Any) -> dict[str, Any]:
    """What a program has set on a member of an enumeration."""
    return {name: held for name, held in vars(member).items() if name not in _OF_ENUM}


_OF_ENUM: Final = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})


@contextlib.contextmanager
def _without_init_subclass(bases: tuple[Any, ...]) -> Iterator[None]:
    """Classes of the program do nothing when they get a subclass."""
    kinds = {one for base in bases if isinstance(base, type) for one in base.__mro__ if one.__module__ in _MAINS}
    held = {one: vars(one)["__init_subclass__"] for one in kinds if "__init_subclass__" in vars(one)}
    for one in held:
        type.__setattr__(one, "__init_subclass__", classmethod(_nothing))
    try:
        yield
    finally:
        for one, method in held.items():
            type.__setattr__(one, "__init_subclass__", method)


def _nothing(*_: Any, **named: Any) -> None:
    """In place of ``__init_subclass__``, and of the ``__init__`` of an enumeration."""


_MAINS = ("__main__", "__mp_main__")


def type_var(make: Any, arguments: tuple[Any, ...], module: str) -> Any:
    """A type variable, of the module that it was made in."""
    made = make(*arguments)
    made.__module__ = module
    return made


def match(pattern: re.Pattern[Any], string: Any, how: str, start: int, end: int) -> re.Match[Any] | None:
    """A match of a regular expression, found once more."""
    found: re.Match[Any] | None = getattr(pattern, how)(string, start, end)
    return found


def mock_call(parts: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    """A call that a mock has noted."""
    from unittest import mock

    made: Any = tuple.__new__(mock._Call, parts)
    object.__getattribute__(made, "__dict__").update(attributes)
    return made


def single_dispatch(default: Any) -> Any:
    """What ``functools.singledispatch`` makes of a function."""
    return functools.singledispatch(default)


def fill_dispatch(function: Any, registry: dict[type, Any]) -> None:
    """The functions for other types."""
    for kind, one in registry.items():
        function.register(kind, one)


class Flat:
    """A value, with the attributes of the objects in it one after the other."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __setitem__(self, made: Any, state: Any) -> None:
        """Give an object its attributes, as pickle does."""
        attributes, slots = state if type(state) is tuple else (state, None)
        if attributes:
            own = made.__dict__
            for name, value in attributes.items():
                own[sys.intern(name) if type(name) is str else name] = value
        for name, value in (slots or {}).items():
            object.__setattr__(made, name, value)


class ClassState(NamedTuple):
    """What came for a class that was here before."""

    attributes: dict[str, Any]
    subclasses: list[type]
    """Those that it knows by registration, if it is an abstract class."""
    members: dict[str, dict[str, Any]]
    """Attributes of its members, if it is an enumeration."""
    bases: tuple[type, ...] | None
    """None: those that it has here."""


class _ClassesHere(NamedTuple):
    ids: frozenset[int]
    states: dict[type, ClassState]
    bases: dict[type, tuple[type, ...]]
    aside: dict[str, Any]
    """By name what the namespace had, nothing or an older class, where a class that is being loaded stands for now."""

    def name(self, kind: type) -> None:
        """Let methods of a new class find it, as its ``__new__`` may look into it for an object made before."""
        name, names = kind.__name__, home()
        if kind.__qualname__ == name and isinstance(names.get(name, kind), type):
            self.aside.setdefault(name, names.get(name, _MISSING))
            names[name] = kind

    def put_back(self) -> None:
        for name, before in self.aside.items():
            if before is _MISSING:
                home().pop(name, None)
            else:
                home()[name] = before


_MISSING: Final = object()


_classes_here: contextvars.ContextVar[_ClassesHere | None] = contextvars.ContextVar("_classes_here", default=None)


@contextlib.contextmanager
def leaving_classes() -> Iterator[dict[type, ClassState]]:
    """What is loaded within writes to no class that is here already: what came for these is in the answer."""
    from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS as TRACKED

    found = _ClassesHere(frozenset(map(id, list(TRACKED.keys()))), {}, {}, {})
    before = _classes_here.set(found)
    try:
        yield found.states
    finally:
        found.put_back()
        _classes_here.reset(before)


def fill_mapping(made: Any, contents: tuple[Any, list[tuple[Any, Any]]]) -> None:
    """Attributes and items of a dict of a class of the program's, whose ``__setitem__`` may want the attributes, and
    may do more than to set an item."""
    state, items = contents
    _set_state(made, state)
    kind: Any = collections.OrderedDict if isinstance(made, collections.OrderedDict) else dict
    for key, value in items:
        kind.__setitem__(made, key, value)


def fill_container(made: Any, contents: tuple[Any, list[Any]]) -> None:
    """Attributes and items of a list or a set of a class of the program's, none of whose methods is called."""
    state, items = contents
    _set_state(made, state)
    if isinstance(made, list):
        list.extend(made, items)
    else:
        set.update(made, items)


def fill_collection(made: Any, contents: tuple[Any, Any, list[Any]]) -> None:
    """Attributes and items of a deque, a counter or a dict with default values; ``extra``: what such a deque or dict
    has beside."""
    state, extra, items = contents
    _set_state(made, state)
    if isinstance(made, collections.deque):
        collections.deque.__init__(made, items, extra)
        return
    if isinstance(made, collections.defaultdict):
        vars(collections.defaultdict)["default_factory"].__set__(made, extra)
    for key, value in items:
        dict.__setitem__(made, key, value)


def _set_state(made: Any, state: Any) -> None:
    """As pickle does it."""
    if state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state is not None:
        attributes, slots = state if type(state) is tuple else (state, None)
        made.__dict__.update(attributes or {})
        for name, value in (slots or {}).items():
            object.__setattr__(made, name, value)


METHODS_FIRST: Final = "\0methods"
"""Stands before the attributes of a class."""


def methods_first(kind: type, methods: dict[str, Any]) -> tuple[str, ...]:
    """Give a new class its methods: the attributes that follow may hold objects of this very class, and to unpickle
    one, or to put it into a set, takes its methods."""
    known = _classes_here.get()
    if known is not None and id(kind) in known.ids:
        return ()
    early = tuple(name for name in methods if name not in vars(kind))
    for name in early:
        type.__setattr__(kind, name, methods[name])
    if known is not None and kind.__module__ in _MAINS:
        known.name(kind)
    return early


def set_class(kind: type, state: tuple[dict[str, Any], Any]) -> None:
    """What stands in a class; one that was here before loses what it has no more."""
    from cloudpickle.cloudpickle import _class_setstate

    attributes = state[0]
    early = attributes.pop(METHODS_FIRST, ())
    known = _classes_here.get()
    if known is not None and id(kind) in known.ids:
        own = {name: value for name, value in attributes.items() if name not in ("_abc_impl", MEMBERS)}
        known.states[kind] = ClassState(
            own, list(attributes.get("_abc_impl") or ()), attributes.get(MEMBERS, {}), known.bases.get(kind)
        )
        return
    if not isinstance(kind, enum.EnumMeta):
        for name in gone_from(kind, ClassState(attributes, [], {}, None)):
            delattr(kind, name)
    for name in early:  # they are set again, each at its place
        type.__delattr__(kind, name)
    members = attributes.pop(MEMBERS, {})
    _class_setstate(kind, state)
    for name, held in members.items():
        vars(kind._member_map_[name]).update(held)  # type: ignore[attr-defined]


def gone_from(kind: type, state: ClassState) -> list[str]:
    """Attributes that a class has and that did not come."""
    slots = {name for name, part in vars(kind).items() if isinstance(part, types.MemberDescriptorType)}
    own = [one for one in vars(kind) if not one.startswith(("__", "_abc_"))]
    return [name for name in own if name not in state.attributes and name not in slots]


OF_NEW_THREAD: Final = ("_stderr", "_invoke_excepthook")
"""What a thread is given where it is made: how an error in it is shown."""


def idle_thread(kind: Any) -> Any:
    """A thread that was not started, or has ended."""
    made = kind.__new__(kind)
    new = vars(threading.Thread())
    made.__dict__.update({name: new[name] for name in OF_NEW_THREAD if name in new})
    return made


def set_chain(error: BaseException, state: tuple[Any, Any, Any, bool]) -> None:
    """What an exception was raised from."""
    own, error.__cause__, error.__context__, error.__suppress_context__ = state
    if own is not None:
        error.__setstate__(own)


def itself(value: Any) -> Any:
    """The same object again."""
    return value


def module_globals(name: str) -> dict[str, Any]:
    """The namespace of a module."""
    return vars(importlib.import_module(name))


def file_map(file: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], order: Any) -> Any:
    """A file that is mapped as an array."""
    import numpy as np

    return np.memmap(file, dtype, mode, offset, shape, order)


def map_view(root: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], at: int) -> Any:
    """A part of one."""
    import numpy as np

    return np.ndarray.__new__(np.memmap, shape, dtype, root, at, strides)


def shell() -> Any:
    """IPython's of this process."""
    return importlib.import_module("IPython").get_ipython()


def home() -> dict[str, Any]:
    """The namespace of the program itself: functions that were defined in a notebook see it as their globals, in the
    guest that of the guest."""
    return vars(sys.modules["__main__"])
