"""Serves one holder's requests in a worker: its functions, calls and open generators."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import sys
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import asyncio

from sublet.errors import InvalidRequest, LeaseInterrupt, NotFound, SubletError
from sublet.guest.answers import WorkerAnswer, encode_error, fault, raised
from sublet.guest.cargo import encode, fetch_buffers, load, out_of_band
from sublet.guest.main_thread import CANCELLED, MainThreadQueue
from sublet.wire.frames import close_all
from sublet.wire.work import (
    BEGUN,
    RESULT_MAX,
    WITHHELD,
    Board,
    Flag,
    HolderMessage,
    ReceivedMessage,
    ResultBuffer,
    Where,
    WorkerMessage,
    pack,
)

_PLAIN: Final = frozenset((type(None), bool, int, float, complex, str, bytes))
"""Types whose values have nothing to them but their pickle."""
ITEMS_FOR_S: Final = 0.005
"""Items of a generator are gathered for so long before they are sent."""
ITEMS_BYTES_MAX: Final = 256 * 1024
"""And up to about so many bytes."""


class _Function(contextlib.AbstractContextManager[None]):
    """One the holder has defined, loaded at its first call."""

    def __init__(self, message: ReceivedMessage, fds: tuple[int, ...]) -> None:
        self.message = message
        self.fds = fds
        self.loaded: Callable[..., object] | None = None

    def __exit__(self, *_: object) -> None:
        close_all(self.fds)
        self.fds = ()


class _Unsent:
    """The results in the buffer once more, as they are sent where nothing happens to this process: in one pickle."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self.pickles: dict[int, bytes] = {}
        """Of those that are no plain values, which have None in their place."""


class _Later(NamedTuple):
    """The function's result comes with this."""

    future: asyncio.Future[object]


class _Series:
    """A generator that is open, and the exception that came after items that were still to be sent."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.raised: BaseException | None = None
        self.is_async = isinstance(iterator, types.AsyncGeneratorType)


class CallRunner:
    """Used on the main thread."""

    def __init__(self, main_queue: MainThreadQueue) -> None:
        self._main_queue = main_queue
        self.results: ResultBuffer | None = None
        """Where results of calls of many lie until they are sent."""
        self.send: Callable[[bytes, tuple[int, ...]], object] = lambda body, fds: close_all(fds)
        """Says something to the holder in the middle of a call."""
        self._unsent = _Unsent()
        self._functions: dict[int, _Function] = {}
        self._kept: dict[int, int] = {}
        """The descriptor of each kept piece."""
        self._series: dict[int, _Series] = {}
        self._last_series = 0
        self._runner: asyncio.Runner | None = None

    # ---- what is kept

    def store_buffers(self, message: ReceivedMessage, fds: tuple[int, ...]) -> None:
        """Keep what is to be kept of a message, whatever becomes of it. ``fds`` stay the caller's."""
        for piece in message.pieces:
            if piece.where is Where.SHARED and piece.number and piece.fd < len(fds):
                self._kept[piece.number] = os.dup(fds[piece.fd])

    def define(self, message: ReceivedMessage, fds: tuple[int, ...]) -> None:
        """A function, to be loaded when it is called."""
        self.store_buffers(message, fds)
        self._functions[message.subject] = _Function(message, fds)

    def forget(self, numbers: list[int], functions: bool) -> None:
        """The holder will not speak of these any more."""
        for number in numbers:
            if functions:
                with self._functions.pop(number, contextlib.nullcontext()):
                    pass
            elif number in self._kept:
                os.close(self._kept.pop(number))

    def close(self) -> None:
        """The holder is gone: generators are closed, and everything is let go of."""
        for number in list(self._series):
            with contextlib.suppress(BaseException):
                self._main_queue.execute(lambda number=number: self._close_series(number))  # type: ignore[misc]
        self.forget(list(self._functions), functions=True)
        self.forget(list(self._kept), functions=False)
        self._end_loop()

    # ---- calls

    def answer(self, call: int, message: ReceivedMessage, fds: tuple[int, ...], board: Board | None) -> WorkerAnswer:
        """What came of one call. Raises ``SubletError`` where it could not be made."""
        return self._answer(lambda: self._dispatch(call, message, fds, board))

    def answer_later(self, later: asyncio.Future[object]) -> WorkerAnswer:
        """What came of a call whose function left this to be waited for, and which is done."""

        def came() -> WorkerAnswer:
            error = later.exception()
            if error is not None:
                raise error if isinstance(error, LeaseInterrupt) else _Wrapped(error)
            return self._result(later.result())

        return self._answer(came)

    def _answer(self, came: Callable[[], WorkerAnswer]) -> WorkerAnswer:
        try:
            return came()
        except _Wrapped as wrapped:
            return self._interrupted(wrapped.error) if _is_cancel(wrapped.error) else raised(wrapped.error)
        except _Unlike as unlike:
            return WorkerAnswer(WorkerMessage.UNLIKE, blob={"why": str(unlike)})
        except KeyboardInterrupt as error:
            return self._interrupted(error)

    def _dispatch(self, call: int, message: ReceivedMessage, fds: tuple[int, ...], board: Board | None) -> WorkerAnswer:
        match message.kind:
            case HolderMessage.RUN if Flag.MANY in message.flags:
                return self._run_many(call, message, fds, board)
            case HolderMessage.RUN:
                return self._result(self._main_queue.execute(lambda: self._run(message, fds)))
            case HolderMessage.NEXT:
                return self._next(message.subject, message.amount)
            case HolderMessage.CLOSE:
                self._main_queue.execute(lambda: self._close_series(message.subject))
                return WorkerAnswer(WorkerMessage.VALUE, encode(None, "nothing"))
            case _:
                return fault(InvalidRequest(f"a worker was asked for {message.kind}, which it does not know"))

    def _run(self, message: ReceivedMessage, fds: tuple[int, ...]) -> object:
        function = self._function(message.subject)
        head, buffers = fetch_buffers(message, fds, self._fd)
        args, kwargs = _loaded(head, buffers, "its arguments")
        return self._called(function, args, kwargs)

    def _called(self, function: Callable[..., object], args: Any, kwargs: Any) -> object:
        try:
            found = function(*args, **kwargs)
            if not isinstance(found, types.CoroutineType):
                return found
            later = self._main_queue.awaited(found)
            return self._awaited(found) if later is None else _Later(later)
        except BaseException as error:  # noqa: BLE001 - whatever the holder's code raises goes to the holder
            raise _Wrapped(error) from None

    def _run_many(self, call: int, message: ReceivedMessage, fds: tuple[int, ...], board: Board | None) -> WorkerAnswer:
        """Each result is kept where the end of this process cannot take it, before the next item begins."""
        kept = self.results
        if kept is None or board is None:
            return fault(InvalidRequest("a call of many came on a connection that has no result buffer"))
        ended: BaseException | None = None
        kept.begin(call)
        self._unsent = _Unsent()

        def work() -> None:
            function = self._function(message.subject)
            head, buffers = fetch_buffers(message, fds, self._fd)
            items = _loaded(head, buffers, "its arguments")
            keep, note, dumps, plain = kept.put, self._unsent.values.append, pickle.dumps, _PLAIN
            words = board.words
            try:
                for begun, args in enumerate(items, 1):
                    words[BEGUN] = begun  # first: a holder who withholds what follows looks here then
                    if words[WITHHELD] >= call:
                        break
                    found = function(*args)
                    kind = type(found)
                    if kind in plain and (kind is not bytes or len(found) < RESULT_MAX):  # type: ignore[arg-type]
                        pickled = dumps(found, 5)
                        note(found)  # first: what is kept and not noted would not be sent
                        if keep(pickled):
                            continue
                        self._unsent.values.pop()
                    self._keep_result(call, found)
            except _Wrapped:
                raise
            except BaseException as error:  # noqa: BLE001 - whatever the holder's code raises goes to the holder
                raise _Wrapped(error) from None

        try:
            self._main_queue.execute(work)
        except _Wrapped as wrapped:
            ended = wrapped.error
        except KeyboardInterrupt as error:
            ended = error
        if ended is not None and _is_cancel(ended):
            return self._interrupted(ended)
        cargo = encode(None if ended is None else encode_error(ended), "the exception")
        return WorkerAnswer(WorkerMessage.MANY, cargo, flags=Flag.NONE if ended is None else Flag.RAISED)

    def _keep_result(self, call: int, found: object) -> None:
        """A result that is not a small plain value, or for which there is no room."""
        kept = self.results
        assert kept is not None
        if isinstance(found, types.CoroutineType):
            found = self._awaited(found)
        if isinstance(found, types.GeneratorType | types.AsyncGeneratorType):
            raise _Wrapped(
                InvalidRequest("a generator function cannot be mapped", do="Use run, which gives an iterator.")
            )
        cargo = encode(out_of_band(found), "the result")
        with self._main_queue.undisturbed():
            if not cargo.buffers and len(cargo.head) <= RESULT_MAX and self._keep_pickle(kept, cargo.head):
                return
            if (before := self.unsent_results(call)) is not None:
                self.send(before, ())
                self._resume_at(kept, kept.first + len(kept))
                if not cargo.buffers and len(cargo.head) <= RESULT_MAX and self._keep_pickle(kept, cargo.head):
                    return
            item = kept.first + len(kept)
            body, fds = WorkerAnswer(WorkerMessage.RESULT, cargo, subject=call, took_ns=item).packed()
            self.send(body, fds)
            self._resume_at(kept, item + 1)

    def _keep_pickle(self, kept: ResultBuffer, pickled: bytes) -> bool:
        self._unsent.pickles[len(kept)] = pickled
        self._unsent.values.append(None)
        if kept.put(pickled):
            return True
        del self._unsent.pickles[len(kept)]
        self._unsent.values.pop()
        return False

    def _resume_at(self, kept: ResultBuffer, item: int) -> None:
        kept.restart_at(item)
        self._unsent.values.clear()
        self._unsent.pickles.clear()

    def unsent_results(self, call: int) -> bytes | None:
        """The message with what is in the buffer of this call; None if nothing is."""
        kept = self.results
        if kept is None or not kept or kept.call != call:
            return None
        values = pickle.dumps(self._unsent.values[: len(kept)], 5)
        pickles = pickle.dumps(self._unsent.pickles, 5) if self._unsent.pickles else b""
        return pack(WorkerMessage.RESULTS, subject=call, amount=kept.first, inline=(values, pickles))

    def _result(self, found: object) -> WorkerAnswer:
        if isinstance(found, _Later):
            return WorkerAnswer(WorkerMessage.VALUE, later=found.future)
        if isinstance(found, types.GeneratorType | types.AsyncGeneratorType):
            series = _Series(found)
            self._last_series += 1
            self._series[self._last_series] = series
            flags = Flag.ASYNC if series.is_async else Flag.NONE
            return WorkerAnswer(WorkerMessage.GENERATOR, flags=flags, subject=self._last_series)
        return WorkerAnswer(WorkerMessage.VALUE, encode(out_of_band(found), "the result"))

    def _interrupted(self, error: BaseException) -> WorkerAnswer:
        """Cancelled, or something raised it."""
        self._end_loop()
        return WorkerAnswer(WorkerMessage.CANCELLED, flags=Flag.BEGAN) if _is_cancel(error) else raised(error)

    def _function(self, number: int) -> Callable[..., object]:
        found = self._functions.get(number)
        if found is None:
            raise NotFound(f"there is no function {number} here")
        if found.loaded is None:
            if Flag.NAMED in found.message.flags:
                found.loaded = _by_name(found.message)
            else:
                head, buffers = fetch_buffers(found.message, found.fds, self._fd)
                found.loaded = _loaded(head, buffers, "the function")
        return found.loaded

    def _fd(self, number: int) -> int:
        if number not in self._kept:
            raise NotFound(f"buffer {number} is not kept here")
        return self._kept[number]

    # ---- generators

    def _next(self, number: int, most: int) -> WorkerAnswer:
        series = self._series.get(number)
        if series is None:
            raise NotFound("this generator is closed")
        items: list[object] = []
        value: object = None
        if series.raised is None:
            try:
                self._main_queue.execute(lambda: self._gather(series, items, most))
            except (StopIteration, StopAsyncIteration) as stop:
                value = getattr(stop, "value", None)
                del self._series[number]
                return WorkerAnswer(
                    WorkerMessage.ITEMS,
                    encode((list(map(out_of_band, items)), out_of_band(value)), "the items"),
                    flags=Flag.DONE,
                )
            except _Wrapped as wrapped:
                series.raised = wrapped.error
            except KeyboardInterrupt as error:
                series.raised = error
        if series.raised is not None and not items:
            if _is_cancel(series.raised):  # maybe beside the generator, which is open then until the holder closes it
                return self._interrupted(series.raised)
            del self._series[number]
            return raised(series.raised)
        return WorkerAnswer(WorkerMessage.ITEMS, encode((list(map(out_of_band, items)), None), "the items"))

    def _gather(self, series: _Series, items: list[object], most: int) -> None:
        began = time.monotonic()
        size = 0
        while len(items) < most and size < ITEMS_BYTES_MAX and (not items or time.monotonic() < began + ITEMS_FOR_S):
            try:
                item = self._awaited(series.iterator.__anext__()) if series.is_async else next(series.iterator)
            except (StopIteration, StopAsyncIteration):
                raise
            except BaseException as error:  # noqa: BLE001 - whatever the holder's code raises goes to the holder
                raise _Wrapped(error) from None
            size += int(getattr(item, "nbytes", 0)) or sys.getsizeof(item)
            items.append(item)

    def _close_series(self, number: int) -> None:
        series = self._series.pop(number, None)
        if series is None:
            return
        try:
            if series.is_async:
                self._awaited(series.iterator.aclose())
            else:
                series.iterator.close()
        except BaseException as error:  # noqa: BLE001 - whatever the holder's code raises goes to the holder
            raise _Wrapped(error) from None

    # ---- coroutines

    def _awaited(self, coroutine: Any) -> object:
        """Run it on the worker's own loop, which lives as long as nothing was interrupted in it."""
        if self._runner is None:
            import asyncio  # a tenth of a second, often in vain

            self._runner = asyncio.Runner()
        return self._runner.get_loop().run_until_complete(coroutine)

    def _end_loop(self) -> None:
        """Tasks that are left are cancelled, so that their ``finally`` runs."""
        runner, self._runner = self._runner, None
        if runner is not None:
            with contextlib.suppress(BaseException):
                runner.close()


class _Wrapped(BaseException):
    """What the holder's function raised; so it is not taken for anything of ours."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def _is_cancel(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) and error.args == (CANCELLED,)


def _loaded(head: memoryview, buffers: list[memoryview], what: str) -> Any:
    try:
        return load(head, buffers)
    except ModuleNotFoundError as error:
        raise NotFound(
            f"the worker's Python ({sys.executable}) has no module {error.name!r}, which {what} need",
            do="Install it there, or choose another interpreter with lease.options(python=...).",
        ) from error
    except SubletError:
        raise
    except (KeyboardInterrupt, LeaseInterrupt):
        raise
    except BaseException as error:
        raise InvalidRequest(
            f"{what} could not be put together in the worker ({type(error).__name__}: {error})",
            do="It travels as a pickle: see that its class can be loaded where it is imported.",
        ) from error


# ------------------------------------------------------------------------------------------- who is on the other side


def introduce(message: ReceivedMessage) -> WorkerAnswer:
    """Find modules where the holder finds them; and say which Python this is."""
    wish = json.loads(message.blob)
    known = set(sys.path)
    sys.path += [path for path in wish["path"] if path not in known]
    return WorkerAnswer(
        WorkerMessage.OPENED,
        blob={
            "python": list(sys.version_info[:3]),
            "executable": sys.executable,
            "cloudpickle": importlib.util.find_spec("cloudpickle") is not None,
            "pid": os.getpid(),
        },
    )


def _by_name(message: ReceivedMessage) -> Any:
    """The function of this name, if its module is the file that the holder has, as it was when first asked for."""
    wish = json.loads(message.blob)
    name, file = wish["module"], wish["file"]
    try:
        module: Any = importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever its import does, the function then goes by value
        raise _Unlike(f"{name} cannot be imported: {type(error).__name__}: {error}") from None
    ours = getattr(module, "__file__", None)
    if ours is not None and not (_is_library(ours) and wish["library"]):
        stamp = _stamps.setdefault(name, _stamp(ours))
        if file is None or (os.path.realpath(ours), *stamp) != (file, *wish["stamp"]):
            raise _Unlike(f"{name} is {ours}, or was another when it was imported")
    try:
        for part in wish["name"].split("."):
            module = getattr(module, part)
    except AttributeError as error:
        raise _Unlike(str(error)) from None
    return module


class _Unlike(BaseException):
    """What the holder means by a name is not what it is here."""


def _stamp(file: str) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size


def _is_library(file: str) -> bool:
    """A package that was installed, or Python's own: there the interpreter's own one is meant, wherever it lies."""
    return "site-packages" in file or "dist-packages" in file or file.startswith(os.path.dirname(os.__file__))


_stamps: dict[str, tuple[int, int]] = {}
