"""Warp: modules as Python source with ``@wp.kernel`` functions, compiled for the CPU or for a GPU.

The source is imported as a Python module whose name is the hash of its bytes, so the same source is one module however
often it is loaded, and Warp finds what it compiled before in its cache. That folder holds machine code which is
executed, so it must belong to this user alone.

The source runs in this process. It may do what any program of the holder may do in a guest, and nothing else runs here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.util
import os
import stat
import sys
import types
from collections.abc import Iterator
from typing import Any, Final

from sublet.devices.signature import Parameter, Signature, Takes
from sublet.errors import GpuError, InvalidRequest, Unsupported
from sublet.invocation import installing
from sublet.lazy_dataclass import dataclass

_NO_DRIVER: Final = b"Could not find or load the NVIDIA CUDA driver"
"""Warp writes that to the terminal by itself wherever there is none, which on a host device is no news."""
_DO_WRITE: Final = "Give Python source with at least one function under @wp.kernel."


@dataclass(slots=True, eq=False)
class WarpModule:
    """A module that is loaded, for all sessions of this process that loaded it."""

    name: str
    kernels: dict[str, tuple[Signature, Any]]
    modules: list[Any]
    """Warp's own, of which a source may make several."""
    users: int = 0


_loaded: dict[tuple[str, str], WarpModule] = {}
"""By Warp's device and by the hash of the source."""
_is_ready = False


def has_warp() -> bool:
    """Whether Warp is installed. Does not import it."""
    return importlib.util.find_spec("warp") is not None


def warp(cache: str) -> Any:
    """The library, imported at the first call and without a banner. ``cache`` is where it keeps compiled code, unless
    a program of this process began to use Warp before."""
    global _is_ready
    if _is_ready:
        return sys.modules["warp"]
    if not has_warp():
        raise Unsupported("there is no Warp in this Python", do=f"Install it: `{installing('sublet[kernels]')}`.")
    make_private(cache)
    with _without_the_driver_line():
        wp = importlib.import_module("warp")
        if wp.config.log_level == wp.LOG_INFO:  # the default: it was not set
            wp.config.log_level = wp.LOG_WARNING
        if wp.config.kernel_cache_dir is None:
            wp.config.kernel_cache_dir = cache
        # Warp would compile its headers first, for each thread anew, into a temporary folder that is removed when
        # Python exits. A guest is ended by a signal, so it would stay. The first module of a session is compiled in
        # half the time without, each further one takes a second longer.
        wp.config.use_precompiled_headers = False
        wp.init()
    _is_ready = True
    return wp


def make_private(folder: str) -> None:
    """A folder of this user alone; one that is there already must be so."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Unsupported(
            f"{folder} is not a folder that only this user can write to, and compiled kernels would be kept in it",
            do="Name another folder, or mend its owner and mode (0700).",
        )


# ------------------------------------------------------------------------------------------------ loading, dropping


def load_warp(wp: Any, source: bytes, device: str) -> WarpModule:
    """Import, compile and load a source for one of Warp's devices. What is wrong with it is said here, not at a
    launch."""
    name = f"sublet_kernels_{hashlib.blake2b(source, digest_size=16).hexdigest()}"
    found = _loaded.get((device, name))
    if found is None:
        module = sys.modules.get(name) or _import(name, source)
        try:
            found = _loaded[device, name] = _compile(wp, name, module, device)
        except BaseException:
            _forget(name)
            raise
    found.users += 1
    return found


def drop_warp(module: WarpModule) -> None:
    """One session less uses it; with the last the machine code goes."""
    module.users -= 1
    if module.users == 0:
        for key in [key for key, one in _loaded.items() if one is module]:
            del _loaded[key]
        if not any(name == module.name for _, name in _loaded):
            for one in module.modules:
                one.unload()
            _forget(module.name)


def _forget(name: str) -> None:
    if not any(loaded == name for _, loaded in _loaded):
        sys.modules.pop(name, None)


class _Source(importlib.abc.InspectLoader):
    """Source that lies in no file. Warp reads a kernel's lines, and ``linecache`` asks the module's loader for them."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self._text, _file_of(fullname))

    def is_package(self, fullname: str) -> bool:
        return False


def _file_of(name: str) -> str:
    """What lines are asked for under. Nothing in brackets: that would be taken for what has no source."""
    return f"{name}.py"


def _import(name: str, source: bytes) -> types.ModuleType:
    try:
        text = source.decode("utf-8")
        compile(text, "<module>", "exec", dont_inherit=True)
    except (ValueError, SyntaxError) as error:  # not UTF-8, a zero byte; not Python
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        words = error.msg if isinstance(error, SyntaxError) else "it is not text"
        raise InvalidRequest(f"module_load: this is not Python source: {words}{where}", do=_DO_WRITE) from None
    loader = _Source(text)
    spec = importlib.util.spec_from_loader(name, loader, origin=_file_of(name))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = _file_of(name)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the holder's source does while it is imported
        del sys.modules[name]
        raise InvalidRequest(
            f"module_load: the source failed while it was imported: {type(error).__name__}: {error}", do="Fix it."
        ) from error
    return module


def _compile(wp: Any, name: str, module: types.ModuleType, device: str) -> WarpModule:
    kernels = {
        attribute: (_signature(wp, attribute, value), value)
        for attribute, value in vars(module).items()
        if isinstance(value, wp.Kernel)
    }
    if not kernels:
        raise InvalidRequest("module_load: there is no kernel in this module", do=_DO_WRITE)
    modules = list({id(kernel.module): kernel.module for _, kernel in kernels.values()}.values())
    for one in modules:
        try:
            wp.load_module(one, device=device)
        except Exception as error:  # Warp has no class of its own for what its compilers refuse
            raise GpuError(
                f"module_load: Warp does not compile this module: {error}", call="module_load", do="Fix the kernel."
            ) from error
    return WarpModule(name, kernels, modules)


# ------------------------------------------------------------------------------------------------------- signatures


def _signature(wp: Any, name: str, kernel: Any) -> Signature:
    return Signature(kernel=name, parameters=tuple(_parameter(wp, one.label, one.type) for one in kernel.adj.args))


def _parameter(wp: Any, name: str, kind: Any) -> Parameter:
    for word, takes in _TAKES.items():
        if kind is getattr(wp, word):
            return Parameter(name=name, takes=takes, shown=word)
    if isinstance(kind, wp.array) and kind.ndim == 1:
        size = wp.types.type_size_in_bytes(kind.dtype)
        return Parameter(name=name, takes=Takes.BUFFER, shown=f"array({_name(kind.dtype)})", bytes=size)
    if isinstance(kind, wp.array):
        shown = f"array({_name(kind.dtype)}, ndim={kind.ndim})"
        return Parameter(name=name, takes=Takes.NOTHING, shown=shown)
    return Parameter(name=name, takes=Takes.NOTHING, shown=_name(kind))


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


_TAKES: Final = {
    "bool": Takes.BOOL,
    "int8": Takes.I8,
    "uint8": Takes.U8,
    "int16": Takes.I16,
    "uint16": Takes.U16,
    "int32": Takes.I32,
    "uint32": Takes.U32,
    "int64": Takes.I64,
    "uint64": Takes.U64,
    "float32": Takes.F32,
    "float64": Takes.F64,
}


@contextlib.contextmanager
def _without_the_driver_line() -> Iterator[None]:
    """Keep what is written to the terminal below Python meanwhile, and write it afterwards, without that one line."""
    try:
        terminal = os.dup(2)
    except OSError:  # closed: it has no reader
        yield
        return
    kept = os.memfd_create("sublet-stderr", os.MFD_CLOEXEC)
    try:
        os.dup2(kept, 2)
        try:
            yield
        finally:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(terminal, 2)
            lines = os.pread(kept, os.fstat(kept).st_size, 0).splitlines(keepends=True)
            for line in lines:
                if _NO_DRIVER not in line:
                    os.write(2, line)
    finally:
        os.close(kept)
        os.close(terminal)
