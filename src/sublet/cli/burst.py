"""``sublet burst``: a function over many inputs, on every core that is free, and then no lease left."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exit_status import DONE, FAILED, INTERRUPTED
from sublet.cli.parsing import AsJson, count, duration, size
from sublet.cli.parsing import name as valid
from sublet.cli.show import plural, seconds, table, visible
from sublet.values import GIB, Tier, format_cost, format_size

if TYPE_CHECKING:
    import sublet
    from sublet.cli.progress_line import LiveLine
    from sublet.jobs.core import ChunkFailed, JobEvent
    from sublet.jobs.metrics import Metrics
    from sublet.jobs.session import JobResult

STORE: Final = GIB
FUEL: Final = 1_000_000_000
WASM: Final = (".wasm", ".wat")
WANT: Final = 64
VOLUME: Final = "burst-"
"""Before the name of a burst, the name of the volume with its results."""
STEM_MAX: Final = 40
FAILURES_SHOWN: Final = 5
METRICS_EVERY_S: Final = 5.0
IN_USE_S: Final = 5.0
"""A volume that is in use is asked for again so long: the same command may have been killed just now."""
_RANGE: Final = re.compile(r"range\(\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*)?)?\)")


def burst(
    *,
    over: Annotated[
        str | None,
        Opt(
            "--over",
            metavar="INPUTS",
            help="Inputs: a file with one JSON value per line, 'range(1000)', or a folder (each file is one input).",
        ),
    ] = None,
    want: Annotated[
        int, Opt("--want", metavar="N", parse=count, help="Largest number of leases held at once (default: 64).")
    ] = WANT,
    cores: Annotated[int, Opt("--cores", metavar="N", parse=count, help="Cores of each lease (default: 1).")] = 1,
    memory: Annotated[
        int | None, Opt("--memory", metavar="SIZE", parse=size, help="Memory of each lease (default: not limited).")
    ] = None,
    tier: Annotated[
        str, Opt("--tier", choices=[t.value for t in Tier], help="Scheduling tier (default: batch).")
    ] = Tier.BATCH.value,
    timeout: Annotated[
        float | None,
        Opt("--timeout", metavar="DURATION", parse=duration, help="Longest run of one chunk (default: no limit)."),
    ] = None,
    deadline: Annotated[
        float | None,
        Opt("--deadline", metavar="DURATION", parse=duration, help="Longest run of the burst (default: no limit)."),
    ] = None,
    entry: Annotated[str, Opt("--entry", metavar="NAME", help="Entry of a WebAssembly module (default: run).")] = "run",
    fuel: Annotated[
        int,
        Opt(
            "--fuel", metavar="N", parse=count, help="Fuel of one chunk of a WebAssembly module (default: 1000000000)."
        ),
    ] = FUEL,
    out: Annotated[
        str | None,
        Opt(
            "--out",
            metavar="FOLDER",
            help="Folder for results.jsonl and failures.jsonl (default: results go to stdout).",
        ),
    ] = None,
    name: Annotated[
        str | None,
        Opt("--name", metavar="NAME", help="Name of the burst and its volume (default: made from the command)."),
    ] = None,
    store: Annotated[
        int,
        Opt(
            "--store",
            metavar="SIZE",
            parse=size,
            help="Size of the volume for results, set when it is made (default: 1GiB).",
        ),
    ] = STORE,
    picture: Annotated[
        str | None, Opt("--picture", metavar="FILE", help="SVG of leases and finished chunks over time.")
    ] = None,
    metrics: Annotated[
        str | None, Opt("--metrics", metavar="FILE", help="Prometheus text, rewritten while the burst runs.")
    ] = None,
    as_json: AsJson = False,
    words: Annotated[
        list[str],
        Arg("TARGET", help="script.py::function, module:function or module.wasm; or `ls`, or `show` and a name."),
    ],
) -> int:
    """Run a function over many inputs on every free core.

    TARGET is called once for each input of --over, on up to --want leases; a WebAssembly module gets the content of the
    file, or the JSON text, as its input. The burst starts with the leases that it gets at once, asks for more while it
    runs, and releases each when no chunk is left for it; at the end it checks with the office that none is left.
    Results are stored in a volume, so the same command, also after this one was killed, runs only what is missing. The
    first Ctrl-C starts no new chunk, releases the leases and keeps what is stored.

    `sublet burst ls` lists bursts and what they cost; `sublet burst show NAME` shows one.

    Exit status: 0 when every chunk has a result; 1 if some failed; 75 if no machine has what a chunk needs; 130 after
    Ctrl-C.
    """
    if words[0] in ("ls", "show"):
        return _inspect(words, as_json=as_json)
    if len(words) > 1:
        raise UsageError(f"{visible(words[1])} is one word too many", do="Inputs are given with --over.")
    if over is None:
        raise UsageError(
            "--over is missing", do="Say the inputs: --over items.jsonl, --over 'range(1000)', --over DIR."
        )
    if as_json:
        raise UsageError("--json is for `ls` and `show`", do="The results of a burst are lines of JSON in any case.")
    function = tasklet_of(words[0], entry, fuel) if words[0].endswith(WASM) else target_of(words[0])
    inputs, total = inputs_of(over)
    called = valid(name) if name is not None else burst_name([words[0], over], os.getcwd())
    _check_places(out, picture, metrics)
    import sublet
    from sublet import jobs
    from sublet.cli.progress_line import LiveLine

    with sublet.connect() as fabric, LiveLine() as line:
        watch = _Watch(line, total, want, called, metrics)
        with _store(fabric, called, store) as kept:
            results: jobs.MapIterator[Any] = jobs.map(
                function,
                inputs,
                store=kept,
                name=called,
                want=want,
                cores=cores,
                memory=memory,
                tier=tier,
                deadline=deadline,
                errors="collect",
                fabric=fabric,
                on_event=watch.on_event,
                options={} if timeout is None else {"timeout": timeout},
            )
            status = DONE
            try:
                failures = _written(results, out, line)
            except OSError as error:
                if out is None or error.filename is not None:  # a reader is gone, or an input
                    raise
                results.close()
                raise sublet.SubletError(
                    f"--out: the results could not be written: {error.strerror}",
                    do="Make room; the same command writes those that are stored, and runs what is missing.",
                ) from error
            except KeyboardInterrupt:
                results.close()
                status, failures = INTERRUPTED, []
            result = results.result
    if result is None:
        if status == DONE:
            sys.stderr.write("sublet: there are no inputs, so there was nothing to do\n")
        else:
            sys.stderr.write(f"sublet: interrupted; the same command runs only what is missing (--name {called})\n")
        return status
    watch.finish(result)
    _print_result(result, failures, status)
    unwritten = {"--metrics": watch.unwritten}
    if picture is not None:
        from sublet.jobs.svg import picture as drawn

        try:
            Path(picture).write_text(drawn(result), encoding="utf-8")
        except OSError as error:
            unwritten["--picture"] = error
    for option, trouble in unwritten.items():
        if trouble is not None:
            sys.stderr.write(f"sublet: {option}: the file could not be written: {trouble.strerror}\n")
            status = status or FAILED
    return status or (FAILED if result.chunks_failed else DONE)


def _check_places(out: str | None, picture: str | None, metrics: str | None) -> None:
    """Before anything runs: whether what is to be written has a place."""
    results = None if out is None else os.path.join(out, "results.jsonl")
    if out is not None:
        try:
            os.makedirs(out, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--out: the folder {visible(out)} cannot be made: {error.strerror}", do="Name another folder."
            ) from None
    for option, path in (("--out", results), ("--picture", picture), ("--metrics", metrics)):
        if path is not None:
            folder = os.path.dirname(os.path.abspath(path))
            if os.path.isdir(path) or not os.access(folder, os.W_OK):
                raise UsageError(f"{option}: {visible(path)} cannot be written", do="Name a file in a folder of yours.")


# ---- what is run


def target_of(text: str) -> Callable[[Any], Any]:
    """``script.py::function`` or ``package.module:function``."""
    where, separator, name = text.partition("::") if "::" in text else text.partition(":")
    if not separator or not name.isidentifier() or not where:
        raise UsageError(
            f"{visible(text)} names no function",
            do="Write script.py::function or package.module:function, or name a .wasm file.",
        )
    module = _script(where) if where.endswith(".py") else _module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{visible(where)} has no function {name}", do="Name a function of one argument.")
    found: Callable[[Any], Any] = function
    return found


def tasklet_of(where: str, entry: str, fuel: int) -> Callable[[Any], Any]:
    """A WebAssembly module, looked at before anything is acquired."""
    from sublet.jobs.inside import OverInputs
    from sublet.jobs.wasm import WasmTasklet

    try:
        data = Path(where).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{visible(where)} cannot be read: {error.strerror}", do="Name a .wasm or .wat file."
        ) from None
    tasklet = WasmTasklet(data.decode() if where.endswith(".wat") else data, entry=entry, fuel=fuel)
    tasklet.check()
    return OverInputs(tasklet)


def _script(where: str) -> Any:
    path = os.path.abspath(where)
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {visible(where)}", do="Name the Python script with the function.")
    folder, stem = os.path.split(path.removesuffix(".py"))
    if folder not in sys.path:  # as for a script that is run: its own modules lie beside it
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    return module


def _module(where: str) -> Any:
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and not where.startswith(error.name):
            raise
        raise UsageError(f"there is no module {visible(where)}", do="Name one that can be imported here.") from None


def inputs_of(over: str) -> tuple[Iterator[Any] | range | list[Any], int | None]:
    """The inputs, and how many there are. Lines of a file are read when they are needed, but each is checked first."""
    if (match := _RANGE.fullmatch(over.strip())) is not None:
        numbers = [int(part) for part in match.groups() if part is not None]
        if len(numbers) == 3 and numbers[2] == 0:
            raise UsageError(f"--over: {over} has step 0", do="Give another step.")
        found = range(*numbers)
        return found, len(found)
    if os.path.isdir(over):
        from sublet.jobs.identity import File

        paths = sorted(path for path in Path(over).iterdir() if path.is_file())
        return [File(path) for path in paths], len(paths)
    if not os.path.isfile(over):
        raise UsageError(
            f"--over: there is no {visible(over)}",
            do="Name a file with one JSON value per line, a folder, or write 'range(1000)'.",
        )
    return _lines(over), _checked_lines(over)


def _checked_lines(path: str) -> int:
    number = total = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):  # noqa: B007 - for the message
                if line.strip():
                    json.loads(line)
                    total += 1
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--over: line {number} of {visible(path)} is not JSON ({error})", do="Write one JSON value on each line."
        ) from None
    return total


def _lines(path: str) -> Iterator[Any]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def burst_name(command: Sequence[str], folder: str) -> str:
    """The same for the same command in the same folder: stored results are found again by it."""
    stem = re.sub(r"[^a-z0-9]+", "-", os.path.basename(command[0]).lower()).strip("-")[:STEM_MAX].rstrip("-")
    digest = hashlib.sha256("\0".join([folder, *command]).encode()).hexdigest()[:8]
    return f"{stem}-{digest}" if stem else digest


@contextlib.contextmanager
def _store(fabric: sublet.Fabric, name: str, room: int) -> Iterator[Any]:
    from sublet.errors import CapacityExceeded, NotFound
    from sublet.jobs.volume_store import VolumeOutputStore

    volume = f"{VOLUME}{name}"[:63].rstrip("-.")
    until_s, block = time.monotonic() + IN_USE_S, None
    while block is None:
        try:
            block = fabric.block(name=volume, renew="always")
        except NotFound:
            block = fabric.block(room, name=volume, renew="always")
        except CapacityExceeded:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
    with block:
        store = VolumeOutputStore(block)
        try:
            yield store
        finally:
            store.close()


# ---- what a person sees


class _Watch:
    """One live line on a terminal; elsewhere only the summary."""

    def __init__(self, line: LiveLine, total: int | None, want: int, name: str, path: str | None) -> None:
        from sublet.jobs.metrics import Metrics

        self._line = line
        self._total = total
        self._want = want
        self._name = name
        self._path = path
        self._written_s = 0.0
        self._metrics = Metrics()
        self._began_ns = 0
        self._now_ns = 0
        self._capacity = ""
        self.unwritten: OSError | None = None
        """Why the metrics could not be written last. The burst goes on."""

    def on_event(self, event: JobEvent) -> None:
        """Called on a thread of the job."""
        self._began_ns = self._began_ns or event.at_ns
        self._now_ns = event.at_ns
        self._metrics.on_event(event)
        if event.what == "capacity":
            self._capacity = event.detail
        elif event.what == "leases" and event.count:
            self._capacity = ""
        if self._line.live:
            text = self.text()
            self._line.set(lambda _: text)
        if self._path is not None and (event.at_ns / 1e9 - self._written_s) >= METRICS_EVERY_S:
            self._written_s = event.at_ns / 1e9
            self._write(self._metrics, self._total or self._metrics.chunks_done)

    def text(self) -> str:
        metrics = self._metrics
        of = "" if self._total is None else f"/{self._total}"
        parts = [f"{metrics.chunks_done}{of} chunks"]
        parts += [f"{metrics.chunks_retry_total} retried"] * bool(metrics.chunks_retry_total)
        parts += [f"{metrics.chunks_failed} failed"] * bool(metrics.chunks_failed)
        parts.append(f"{metrics.cpu_leases_active} of {plural(self._want, 'lease')}")
        fresh = metrics.chunks_succeeded
        if self._total is not None and fresh and self._now_ns > self._began_ns:
            left_s = round((self._total - metrics.chunks_done) * (self._now_ns - self._began_ns) / 1e9 / fresh)
            parts += [f"{seconds(left_s)} left"] * bool(left_s)
        if not metrics.cpu_leases_active and self._capacity:
            parts.append("waiting for a free core")
        return " · ".join(parts)

    def finish(self, result: JobResult) -> None:
        read = result.chunks_succeeded + result.chunks_failed + result.chunks_skipped
        self._write(result.metrics, self._total or read)

    def _write(self, metrics: Metrics, total: int) -> None:
        if self._path is None:
            return
        from sublet.jobs.metrics import write_metrics

        self.unwritten = None
        try:
            write_metrics(self._path, metrics.prometheus(self._name, total))
        except OSError as error:
            self.unwritten = error


def _written(results: Any, out: str | None, line: LiveLine) -> list[ChunkFailed]:
    """Write results as they come, in order. The failures."""
    from sublet.jobs.core import ChunkFailed

    failures: list[ChunkFailed] = []
    with contextlib.ExitStack() as stack:
        if out is None:
            stream: TextIO = sys.stdout
            bad: TextIO | None = None
        else:
            stream = stack.enter_context(open(os.path.join(out, "results.jsonl"), "w", encoding="utf-8"))
            bad = stack.enter_context(open(os.path.join(out, "failures.jsonl"), "w", encoding="utf-8"))
        for place, value in enumerate(results):
            if isinstance(value, ChunkFailed):
                failures.append(value)
                if bad is not None:
                    failure = {"index": place, "reason": value.reason.value, "detail": value.detail}
                    bad.write(json.dumps(failure) + "\n")
                continue
            text = json.dumps({"index": place, "result": _plain(value)}, default=_as_text)
            if out is None and line.live:
                line.beside(lambda text=text: stream.write(text + "\n"))  # type: ignore[misc]
            else:
                stream.write(text + "\n")
    return failures


def _plain(value: Any) -> Any:
    """What a tasklet gave: its output as text where it is text, else in base64, and the fuel it used."""
    if type(value).__name__ != "TaskletResult":
        return value
    try:
        return {"output": value.output.decode(), "fuel": value.fuel}
    except UnicodeDecodeError:
        return {"output_base64": base64.b64encode(value.output).decode(), "fuel": value.fuel}


def _as_text(value: object) -> object:
    """What JSON has no form for: arrays as lists, everything else as its text."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


def _print_result(result: JobResult, failures: list[ChunkFailed], status: int) -> None:
    done = result.chunks_succeeded + result.chunks_skipped
    parts = [f"{plural(done, 'chunk')} done"]
    parts += [f"{result.chunks_skipped} of them by an earlier run"] * bool(result.chunks_skipped)
    parts += [f"{result.chunks_failed} failed"] * bool(result.chunks_failed and not status)
    parts += [f"{result.retries} retried"] * bool(result.retries)
    parts.append(f"up to {plural(result.leases_most, 'lease')} in {seconds(round(result.duration_s, 1))}")
    if result.bill is not None:
        parts.append(f"{format_cost(result.bill.cost, result.bill.currency)} for all runs of {result.name}")
    left = plural(result.leases_after, "lease") if result.leases_after else "no lease"
    sys.stderr.write(f"sublet: {'; '.join(parts)}; {left} left\n")
    for failure in failures[:FAILURES_SHOWN]:
        sys.stderr.write(f"  {visible(str(failure))}\n")
    if len(failures) > FAILURES_SHOWN:
        sys.stderr.write(f"  and {len(failures) - FAILURES_SHOWN} more; --out FOLDER writes all of them\n")
    if status == INTERRUPTED or result.chunks_failed:
        sys.stderr.write(
            f"  what is stored stays: the same command runs only what is missing (--name {result.name}).\n"
        )


# ---- looking at bursts


def _inspect(words: Sequence[str], *, as_json: bool) -> int:
    import sublet

    if words[0] == "ls" and len(words) > 1:
        raise UsageError(f"{visible(words[1])} is one word too many", do="Write `sublet burst ls`.")
    if words[0] == "show" and len(words) != 2:
        raise UsageError("`sublet burst show` needs one name", do="`sublet burst ls` lists them.")
    with sublet.connect() as fabric:
        found = _bursts(fabric)
        if words[0] == "ls":
            _list(found, as_json=as_json)
            return DONE
        one = next((burst for burst in found if burst["name"] == words[1]), None)
        if one is None:
            raise sublet.errors.NotFound(f"there is no burst {visible(words[1])}", do="`sublet burst ls` lists them.")
        one["results"] = _count(fabric, words[1])
    if not as_json:
        one["core_time"] = seconds(round(one.pop("core_seconds"), 1))
        one["cost"] = format_cost(one["cost"], one.pop("currency"))
        one["volume"] = _size(one["volume"])
    if as_json:
        sys.stdout.write(json.dumps(one) + "\n")
    else:
        for key, value in one.items():
            sys.stdout.write(f"{key.replace('_', ' '):<12} {'-' if value is None else visible(str(value))}\n")
    return DONE


def _bursts(fabric: sublet.Fabric) -> list[dict[str, Any]]:
    """Each burst of ours that the bill, a volume or a live lease knows, by name."""
    from sublet.jobs.leases import LABEL, PROGRAM

    found: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        empty = {"name": name, "leases": 0, "core_seconds": 0.0, "cost": 0.0, "currency": "", "volume": None}
        return found.setdefault(name, {**empty, "keep_until": None})

    for volume in fabric.volumes(own=True):
        if volume.name.startswith(VOLUME):
            one = of(volume.name.removeprefix(VOLUME))
            one["volume"], one["keep_until"] = volume.size, volume.keep_until
    for view in fabric.leases(own=True):
        if PROGRAM.items() <= view.labels.items():
            of(view.labels.get(LABEL, ""))["leases"] += 1
    for line in fabric.bill(by=f"label:{','.join((*PROGRAM, LABEL))}", own=True):
        program, _, name = line.key.partition(",")
        if program in PROGRAM.values() and name:
            one = of(name)
            one["core_seconds"], one["cost"], one["currency"] = line.core_seconds, line.cost, line.currency
    return sorted(found.values(), key=lambda one: str(one["name"]))


def _size(volume: int | None) -> str | None:
    return None if volume is None else format_size(volume)


def _count(fabric: sublet.Fabric, name: str) -> int | None:
    """Stored results; None where a burst of that name runs, or its volume is gone."""
    from sublet.errors import CapacityExceeded, NotFound
    from sublet.jobs.volume_store import VolumeOutputStore

    try:
        with fabric.block(name=f"{VOLUME}{name}"[:63].rstrip("-."), wait=0) as block:
            store = VolumeOutputStore(block)
            try:
                return len(store)
            finally:
                store.close()
    except (CapacityExceeded, NotFound):
        return None


def _list(found: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    if not found:
        sys.stdout.write("There are no bursts.\n")
        return
    rows = [
        [
            str(one["name"]),
            str(one["leases"]),
            seconds(round(one["core_seconds"], 1)),
            format_cost(one["cost"], one["currency"]),
            _size(one["volume"]) or "-",
        ]
        for one in found
    ]
    heads = ["NAME", "LEASES", "CORE TIME", "COST", "VOLUME"]
    sys.stdout.write(table(heads, rows, right=["LEASES", "CORE TIME", "COST"]) + "\n")
