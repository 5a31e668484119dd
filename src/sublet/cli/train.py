"""``sublet train``: runs a training script under successive leases until it is done, and shows its bill."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, TextIO

from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exit_status import INTERRUPTED, raised_by_signals
from sublet.cli.guest_command import Env, Grace
from sublet.cli.parsing import FOREVER, PayPriority, count, duration, size, vram, wait
from sublet.cli.parsing import name as valid
from sublet.cli.show import plural, seconds, visible
from sublet.values import GIB, Tier, format_cost, format_size, parse_duration_ns

if TYPE_CHECKING:
    from sublet.cli.progress_line import LiveLine
    from sublet.client.lease import Lease
    from sublet.client.model import Place
    from sublet.training.progress import TrainingProgress
    from sublet.training.running import TrainingRun

VRAM: Final = GIB
STATE: Final = 4 * GIB
NAME_MAX: Final = 40
SAVE_EVERY: Final = "SUBLET_SAVE_EVERY"


def _interval(text: str) -> str:
    """As the script will find it: a number of steps, or a duration."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        parse_duration_ns(text, "--save-every")
    return text


def train(
    *,
    gpu: Annotated[int, Opt("--gpu", "--vram", metavar="SIZE", parse=vram, help="GPU memory (default: 1GiB).")] = VRAM,
    gpus: Annotated[
        int,
        Opt(
            "--gpus",
            metavar="N",
            parse=count,
            help="Number of GPUs, all on one machine; SCRIPT runs once for each, as under torchrun (default: 1).",
        ),
    ] = 1,
    spot: Annotated[
        bool, Opt("--spot", help="Short for --tier spot: lowest priority, preempted at short notice.")
    ] = False,
    tier: Annotated[
        str | None, Opt("--tier", choices=[t.value for t in Tier], help="Scheduling tier (default: batch).")
    ] = None,
    pay_priority: PayPriority = False,
    ttl: Annotated[
        float | None,
        Opt(
            "--ttl",
            metavar="DURATION",
            parse=duration,
            help="Time to live of each lease between renewals (default: 5m).",
        ),
    ] = None,
    waiting: Annotated[
        float | None,
        Opt("--wait", metavar="DURATION", parse=wait, help="Longest wait for each lease (default: no limit)."),
    ] = None,
    save_every: Annotated[
        str | None,
        Opt(
            "--save-every",
            metavar="STEPS|DURATION",
            parse=_interval,
            help="Interval between checkpoints, such as 100 or 30s (default: the script's own, else 1m).",
        ),
    ] = None,
    state: Annotated[
        int,
        Opt(
            "--state",
            metavar="SIZE",
            parse=size,
            help="Size of the volume for checkpoints, set when it is made (default: 4GiB).",
        ),
    ] = STATE,
    name: Annotated[
        str | None,
        Opt(
            "--name",
            metavar="NAME",
            help="Name of the job and its volume (default: made from the script and its arguments).",
        ),
    ] = None,
    python: Annotated[
        str | None, Opt("--python", metavar="PATH", help="Python interpreter (default: the one that runs `sublet`).")
    ] = None,
    env: Env = [],  # noqa: B006 - never changed; both parsers make their own
    grace: Grace = None,
    command: Annotated[
        list[str], Arg("SCRIPT", is_mixed=True, help="Python script and its arguments; see above for `--`.")
    ],
) -> int:
    """Run a training script to its end, on one lease after the other.

    SCRIPT keeps its state with `sublet.training.PreemptibleTrainer`. It runs on a leased GPU; when the lease is taken,
    it finishes its step, saves and exits, and the next lease is waited for. The same command, also after this one was
    killed, continues from the last checkpoint.

    Options of `train` may stand before or after SCRIPT. Other options after SCRIPT, and all words after `--`, are the
    script's.

    On a terminal one line shows the progress; the bill follows at the end. Ctrl-C lets the script save and stops; twice
    ends it at once.

    Exit status: 0 when the script is done; its own if it failed, which another lease would not help; 75 if no lease was
    granted within --wait; 130 after Ctrl-C.
    """
    if spot and tier not in (None, Tier.SPOT):
        raise UsageError(f"--spot and --tier {tier} contradict each other", do="Give one of them.")
    if re.fullmatch(r"python[\d.]*", os.path.basename(command[0])):
        raise UsageError(
            f"{visible(command[0])} is an interpreter, and `train` takes the script itself",
            do="Write `sublet train train.py`; --python says which interpreter runs it.",
        )
    if not command[0].startswith("-") and not os.path.exists(command[0]):  # before a volume is made for it
        raise UsageError(f"there is no file {command[0]}", do="Name the Python script that trains.")
    interpreter = sys.executable
    if python is not None:
        from sublet.cli.exit_status import print_error
        from sublet.cli.guest_command import CommandNotStarted
        from sublet.cli.python import interpreter as found

        try:
            interpreter = found(python)
        except CommandNotStarted as failed:
            print_error(failed, as_json=False)
            return failed.exit_code
    from sublet.training.running import Stopped, TrainingPlan, TrainingRun

    more = dict(env)
    if save_every is not None:
        more[SAVE_EVERY] = save_every
    plan = TrainingPlan(
        argv=[interpreter, *command],
        name=job_name(command, os.getcwd()) if name is None else valid(name),
        vram=gpu,
        count=gpus,
        ttl=ttl,
        tier=Tier.SPOT.value if spot else tier or Tier.BATCH.value,
        pay_priority=pay_priority,
        wait=None if waiting in (None, FOREVER) else waiting,
        state=state,
        env=more,
        grace=grace,
    )
    import sublet
    from sublet.cli.progress_line import LiveLine

    with sublet.connect() as fabric, LiveLine() as line, raised_by_signals(Stopped):
        watch = _Watch(line)
        run = TrainingRun(fabric, plan, watch)
        stopped: Stopped | None = None
        try:
            status = run.run()
        except (Stopped, KeyboardInterrupt) as how:
            stopped = how if isinstance(how, Stopped) else Stopped()
            status = INTERRUPTED if stopped.number == signal.SIGINT else 128 + stopped.number
        finally:
            watch.finish()
        _print_bill(run, status, "" if stopped is None else str(stopped))
    return status


class _Watch:
    """What a person sees: the script's own words as they come, one live line on a terminal, and what happens."""

    def __init__(self, line: LiveLine) -> None:
        self._line = line
        self._parts = {"stdout": b"", "stderr": b""}
        self._waits_for = ""

    def wrote(self, stream: str, data: bytes) -> None:
        out: TextIO = sys.stdout if stream == "stdout" else sys.stderr
        if self._line.live:  # whole lines, so that ours is never painted into the middle of one
            whole, newline, self._parts[stream] = (self._parts[stream] + data).rpartition(b"\n")
            data = whole + newline
        if data:
            self._line.beside(lambda: _put(out, data))

    def news(self, text: str) -> None:
        self._line.beside(lambda: _put(sys.stderr, f"sublet: {visible(text)}\n".encode()))

    def moved(self, progress: TrainingProgress, lease: Lease) -> None:
        if self._line.live:
            text = progress_text(progress)
            self._line.set(lambda _: f"{text} · {lease.id}, {seconds(round(lease.remaining))} left")

    def waits(self, place: Place) -> None:
        text = f"queued at {place}"
        if self._line.live:
            self._line.set(lambda waited: f"{text} ({seconds(round(waited))})")
        elif place.lease != self._waits_for:
            self._waits_for = place.lease  # once, where there is no line to keep up to date
            self.news(text)

    def finish(self) -> None:
        for stream, rest in self._parts.items():
            out: TextIO = sys.stdout if stream == "stdout" else sys.stderr
            if rest:
                self._line.beside(lambda out=out, rest=rest: _put(out, rest + b"\n"))  # type: ignore[misc]
        self._parts = {"stdout": b"", "stderr": b""}


def progress_text(progress: TrainingProgress) -> str:
    """How far it is, in a few words."""
    words = [f"step {progress.steps}"]
    if progress.epoch is not None and progress.epochs:
        words.append(f"epoch {min(progress.epoch + 1, progress.epochs)} of {progress.epochs}")
    if progress.loss is not None:
        words.append(f"loss {progress.loss:.4g}")
    if progress.saved_steps >= 0:
        words.append(f"saved {progress.saved_steps}")
    return " · ".join(words)


def job_name(command: Sequence[str], folder: str) -> str:
    """The same for the same command in the same folder: what goes on is found again by it."""
    script = os.path.basename(command[0]).removesuffix(".py")
    if command[0] == "-m" and len(command) > 1:
        script = command[1]
    stem = re.sub(r"[^a-z0-9]+", "-", script.lower()).strip("-")[:NAME_MAX].rstrip("-")
    digest = hashlib.sha256("\0".join([folder, *command]).encode()).hexdigest()[:8]
    return f"{stem}-{digest}" if stem else digest


def _print_bill(run: TrainingRun, status: int, stopped: str) -> None:
    """What was done and what it cost; after an end by hand that first, and how to go on."""
    progress = run.progress
    if progress.first_step is None:
        if stopped:
            before = "in its beginning" if run.began else "before the program began"
            sys.stderr.write(f"sublet: {stopped} {before}; {_how_to_resume(run)}\n")
        return
    steps_now = f", {progress.steps_here} of them now" if progress.first_step else ""
    parts = [
        *([stopped] if stopped else []),
        f"{plural(progress.steps, 'step')} done{steps_now}",
        _preempted(run),
        f"{plural(progress.saves, 'save')} of {format_size(progress.bytes_saved)} in all",
    ]
    line = run.bill()
    if line is not None:
        paid = f"{seconds(line.gpu_seconds)} of GPU time and {format_cost(line.cost, line.currency)}"
        parts.append(f"{paid} for all runs of {run.plan.name}")
    sys.stderr.write(f"sublet: {'; '.join(parts)}\n")
    if status:
        kept = f"step {progress.saved_steps} is saved" if progress.saved_steps >= 0 else "nothing new is saved"
        sys.stderr.write(f"  {kept}; {_how_to_resume(run)}\n")


def _how_to_resume(run: TrainingRun) -> str:
    """What it always comes to: where the checkpoints are, and that the command finds them."""
    return f"the same command goes on from the last checkpoint in volume {run.plan.volume} (--name {run.plan.name})."


def _preempted(run: TrainingRun) -> str:
    progress = run.progress
    if not run.preemptions:
        return "never preempted"
    lost = max(0.0, progress.lost_seconds - run.waited_seconds) / run.preemptions
    text = f"preempted {plural(run.preemptions, 'time')}, {lost:.1f} s lost each"
    if run.waited_seconds >= 1:
        text += f" besides {seconds(round(run.waited_seconds))} of waiting"
    if progress.steps_again:
        text += f", {plural(progress.steps_again, 'step')} done again"
    return text


def _put(stream: TextIO, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        stream.flush()
        stream.buffer.write(data)
        stream.flush()
