"""``PreemptibleTrainer``: a PyTorch training loop that may end between any two steps, and continues bit for bit.

    trainer = sublet.training.PreemptibleTrainer(model, optimizer, scheduler=scheduler, save_every="1m")
    with trainer:
        for epoch in trainer.epochs(10):
            for images, labels in trainer.batches(loader):
                trainer.step(loss_of(model(images), labels))     # backward, optimizer, zero_grad
            scheduler.step()

The loop is the program's own; the trainer only has to know where in it everything is whole. That is between two
batches, behind one whose body called ``step``. There it counts, saves when it is time, and leaves when it was told to
(``Preempted``). A body that did not call ``step`` (a batch that was skipped, a gradient that is still being added up)
belongs to the next that does.

Everything that decides how training goes on is saved as one state: the parts that were named, the random numbers, and
the position in the data. What is computed from them in a loop's own variables is not; it goes into ``state=``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, Self

from sublet.clock import Clock, SystemClock
from sublet.errors import CheckpointFailed, InvalidRequest, NotFound, SubletError
from sublet.state.checkpoints.durable import Durable
from sublet.state.checkpoints.writer import SaveReport
from sublet.training.data_position import BatchSource, source_of
from sublet.training.leaving import SIGTERM, TERMINATED, LeaveReason, Preempted, PreemptionWatch
from sublet.training.progress_events import Account, ProgressWriter
from sublet.training.rng_state import chance_now, set_chance, set_generators
from sublet.training.together import group_here, own_state
from sublet.values import NS_PER_S, parse_duration_ns

SAVE: Final = "save"
_GO_ON, _SAVE, _LEAVE = range(3)
"""What each of several processes says between two steps; the greatest is done by all."""
_NOTHING: Final = object()
STEPLESS_MAX: Final = 10_000
"""Batches without a step after which the program has probably forgotten to call it."""


class PreemptibleTrainer:
    """Keeps a training program's state, and says when it is safe to stop. See the module for the loop it goes with.

    ``state`` is whatever else must survive, by name: anything with ``state_dict`` (another model, a moving average, a
    metric), a generator of random numbers, a dict or a list. ``place`` is a block lease, a volume, a folder or a
    checkpoint store; by default what the program was given by `sublet train`. ``save_every`` is a duration ("30s") or a
    number of steps, by default a minute or what `sublet train --save-every` says; saving happens in the background, and
    before leaving. The newest ``keep`` checkpoints stay.
    ``schema`` says what is trained, in your words; a checkpoint of another one is refused.

    If there is a checkpoint at the place, the parts are as they were in it when this returns.

    Of several processes (``torch.distributed``, which is initialized before) each makes one, and goes through the same
    steps. They save and leave behind the same one, and are saved as one.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        place: Any = None,
        save_every: int | str | None = None,
        keep: int = 3,
        schema: str = "",
        lease: Any = None,
        clock: Clock | None = None,
    ) -> None:
        self._group = group_here()
        self._optimizer, self._scaler = optimizer, scaler
        self.metrics: dict[str, Any] = {}
        """Yours: what you put here is saved and restored with the rest. ``step(loss, accuracy=...)`` puts in those."""
        self._parts = parts_of(model, optimizer, scheduler, scaler, state, self.metrics)
        self._clock: Clock = SystemClock() if clock is None else clock
        self._preemption = PreemptionWatch(lease)
        self._teller = ProgressWriter() if self._group.rank == 0 else ProgressWriter({})
        self._sources: dict[int, tuple[Any, BatchSource]] = {}
        self._epoch = 0
        self._epochs: int | None = None
        self._epoch_chance: Any = None
        self._pass: BatchSource | None = None
        """The pass that is under way, or was in this epoch."""
        self._pass_chance: Any = None
        self._pass_over = False
        self._passes = 0
        """In this epoch, or in the whole program where there are none."""
        self._whole = True
        """Nothing was begun since the last step."""
        self._stepless = 0
        self._resume: dict[str, Any] | None = None
        """The position to go on from, until it is reached."""
        self._generators: list[Any] = []
        """Of the loader, where it stands between two passes."""
        self._stopped_wall_ns: int | None = None
        self._loss: Any = None
        self._closed = False
        where = place_here() if place is None else place
        every = interval_of(save_every)
        is_first = self._group.rank == 0
        self._saves = Saves(where, schema=schema, keep=keep, every=every, clock=self._clock, writes=is_first)
        self._restore()
        self._write_progress(began=True)

    # ---- what it knows ----

    @property
    def steps(self) -> int:
        """Done so far, in all lives of the program."""
        return self.account.steps

    @property
    def epoch(self) -> int:
        """The one that is under way, from 0."""
        return self._epoch

    @property
    def resumed(self) -> bool:
        """Whether it goes on from a checkpoint."""
        return self.account.resumed > 0

    @property
    def account(self) -> Account:
        """What it has come to: steps, saves, bytes, seconds."""
        return self._saves.account

    # ---- the loop ----

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are still to be done; the first may be one that was begun."""
        if self._epochs is not None:
            raise InvalidRequest("the epochs of a trainer are gone through once", do="Make one loop over epochs(...).")
        self._epochs = count
        self._preemption.begin()
        return self._each_epoch(count)

    def _each_epoch(self, count: int) -> Iterator[int]:
        while self._epoch < count:
            resume, self._passes = self._resume, 0
            if resume is None:
                self._pass, self._pass_over = None, False
                self._epoch_chance = chance_now()
            else:
                self._epoch_chance = resume["epoch_chance"]
                if self._epoch_chance is None:
                    raise other_loop()
                set_chance(self._epoch_chance)
                if not resume["in_pass"]:
                    self._resume = None
            self._going_on()
            yield self._epoch
            if self._resume is not None:
                raise InvalidRequest(
                    f"epoch {self._epoch} was left in the middle of its batches, and now it has none",
                    do="Keep the loop over trainer.batches(...) as it was.",
                )
            self._epoch += 1
            self._pass, self._pass_over, self._epoch_chance = None, False, None
            self._saves.is_dirty = True
            due = self._due()
            if due is not None:
                self._act(due, self._position())
        if self._resume is not None:  # all was done before; what comes behind the loop finds what it would have found
            set_chance(self._resume["chance"][0])
        self._finish()

    def batches(self, loader: Any, *, deterministic: bool = False) -> Iterator[Any]:
        """The batches of one pass over the loader that were not taken yet.

        Once in each epoch, or once in a program without epochs. For data that is only looked at (validation, say) use
        the loader itself. ``deterministic`` promises that the data set draws no random numbers, so that those of a
        loader's workers need not be repeated to get to the place where it stopped.
        """
        self._check_open()
        if self._passes:
            raise InvalidRequest(
                "batches() was called twice " + ("in one epoch" if self._epochs is not None else "without epochs"),
                do="Write `for epoch in trainer.epochs(n):` around one loop over trainer.batches(loader).",
            )
        if self._resume is not None and (self._resume["epoch_chance"] is None) != (self._epochs is None):
            raise other_loop()
        self._passes = 1
        self._preemption.begin()
        if id(loader) not in self._sources:
            self._sources[id(loader)] = (loader, source_of(loader, deterministic=deterministic))
        source = self._sources[id(loader)][1]
        return self._pass_over_it(source)

    def _pass_over_it(self, source: BatchSource) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        self._pass, self._pass_over, self._stepless = source, False, 0
        batches = self._begun(source, resume if resume is not None and resume["in_pass"] else None)
        before = self.steps
        try:
            batch = next(batches, _NOTHING)
            while batch is not _NOTHING:
                self._whole = False
                self._going_on()
                yield batch
                batch = self._next_but_for(batches)
        finally:  # also where the program broke the loop off: it wanted no more of this pass
            self._pass_over = True
            self._generators = [one.get_state() for one in source.generators()]
            getattr(batches, "close", list)()  # the workers of a loader end now, and not at a garbage collection
        if before == self.steps and self._stepless:
            raise no_steps()
        if self._epochs is None:
            self._finish()

    def _next_but_for(self, batches: Iterator[Any]) -> Any:
        """The next batch, unless it is time to leave. Behind the last one no program leaves, and it is saved only in
        need: a program that goes on there would find its loop empty, and what the loop's body names undefined."""
        due = self._due()
        if due is None:
            return next(batches, _NOTHING)
        position = self._position()
        batch = next(batches, _NOTHING)
        if batch is not _NOTHING:
            self._act(due, position)
        elif isinstance(due, LeaveReason):
            self._make_durable(position)
        return batch

    def _begun(self, source: BatchSource, resume: Mapping[str, Any] | None) -> Iterator[Any]:
        if resume is None:
            set_generators(source.generators(), self._generators)
            self._pass_chance = [chance_now(), [one.get_state() for one in source.generators()]]
            return source.begin(self._epoch, None, lambda: None)
        if resume["kind"] != source.kind:
            raise InvalidRequest(
                f"the place in the data was noted {resume['kind']}, and this loader goes {source.kind}",
                do="Give it the loader it had, or begin under another name.",
            )
        self._pass_chance = resume["pass_chance"]
        self._put_chance(source, self._pass_chance)
        if resume["pass_over"]:
            self._put_chance(source, resume["chance"])
            self._pass_over = True
            return iter(())
        return source.begin(self._epoch, resume["position"], lambda: self._put_chance(source, resume["chance"]))

    @staticmethod
    def _put_chance(source: BatchSource, states: Any) -> None:
        set_chance(states[0])
        set_generators(source.generators(), states[1])

    def step(self, loss: Any = None, /, **metrics: Any) -> None:
        """A step is done, and everything is whole.

        With a ``loss`` it is done here: backward, the optimizer (through the gradient scaler, if there is one), and the
        gradients are cleared. Without, the program has done all that. Schedulers are the program's to step, before or
        after this, in the same body. What is given by name is noted in ``metrics``: ``step(loss, loss=loss.item())``.
        """
        self._check_open()
        if loss is None and getattr(metrics.get("loss"), "requires_grad", False):
            loss = metrics.pop("loss")  # no metric is to be descended
        if loss is not None:
            self._descend(loss)
        self.metrics.update(metrics)
        self.account.steps += 1
        self._whole = self._saves.is_dirty = True
        self._stepless = 0
        if self._teller.is_due():
            self._write_progress()

    def _descend(self, loss: Any) -> None:
        if self._optimizer is None:
            raise InvalidRequest("there is no optimizer to make a step with", do="Give the trainer one.")
        self._loss = loss.detach()
        if self._scaler is None:
            loss.backward()
            self._optimizer.step()
        else:
            self._scaler.scale(loss).backward()
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)

    def save(self) -> None:
        """Save behind this step, whether it is time or not."""
        self._check_open()
        self._saves.ask()

    # ---- between two steps ----

    def _due(self) -> LeaveReason | str | None:
        """Behind a body: whether to leave, or to save."""
        due = self._saves.is_due()
        if not self._whole:
            self._stepless += 1
            if self._stepless > STEPLESS_MAX:
                raise no_steps()
            return None
        reason = self._preemption.reason_to_leave()
        agreed = self._group.most(_LEAVE if reason is not None else _SAVE if due else _GO_ON)
        if agreed == _LEAVE:
            return self._group.first(reason)
        return SAVE if agreed == _SAVE else None

    def _act(self, due: LeaveReason | str, position: dict[str, Any]) -> None:
        if isinstance(due, LeaveReason):
            self._leave(due, position)
        self._saves.write(self._group.joined(self._snapshot(position)), wait=False)

    def _going_on(self) -> None:
        """Before the first thing that is done after a resume: up to here it was lost."""
        if self._stopped_wall_ns is not None:
            lost_ns = self._clock.wall_ns() - self._stopped_wall_ns
            self.account.lost_seconds += max(0.0, lost_ns / NS_PER_S)
            self._stopped_wall_ns = None

    def _make_durable(self, position: dict[str, Any] | None = None) -> None:
        """Everything that was done is durable when this returns, or it raises why not."""
        self._saves.wait()
        if self._saves.is_dirty:
            state = self._snapshot(self._position() if position is None else position)
            self._saves.write(self._group.joined(state), wait=True)
        self._group.wait()  # else one that leaves early would be the end of the one that saves

    def _leave(self, reason: LeaveReason, position: dict[str, Any]) -> NoReturn:
        """Everything is whole: save it, and end the program."""
        self._make_durable(position)
        self._write_progress(left=SIGTERM if reason.by_signal else str(reason.reason))
        self.close()
        status = {"status": TERMINATED} if reason.by_signal else {}
        raise Preempted(reason.end(), self.steps, **status)

    def _finish(self) -> None:
        self._make_durable()
        self._write_progress(done=True)
        self._preemption.end()

    def _write_progress(self, **more: Any) -> None:
        if self._teller.listens:
            shown = {} if self._loss is None else {"loss": float(self._loss)}
            of = {} if self._epochs is None else {"epoch": self._epoch, "epochs": self._epochs}
            self._teller.write(self.account, saved_steps=self._saves.durable_steps, **of, **shown, **more)

    # ---- the state ----

    def _position(self) -> dict[str, Any]:
        """Where it stands, in the data and among the random numbers; before anything is drawn for what comes next."""
        source, generators = self._pass, self._generators
        if source is not None:
            generators = [one.get_state() for one in source.generators()]
        return {
            "epoch": self._epoch,
            "epoch_chance": self._epoch_chance,
            "in_pass": source is not None,
            "pass_over": self._pass_over,
            "pass_chance": self._pass_chance,
            "kind": None if source is None else source.kind,
            "position": None if source is None else source.state(),
            "chance": [chance_now(), generators],
        }

    def _snapshot(self, position: dict[str, Any]) -> dict[str, Any]:
        saves = self.account.saves + 1  # the reader of it knows of this one
        return {
            "parts": {name: part.get() for name, part in self._parts.items()},
            "position": position,
            "account": asdict(self.account) | {"saves": saves},
            "wall_ns": self._clock.wall_ns(),
        }

    def _restore(self) -> None:
        """Go on from what was found, if something was."""
        saved, self._saves.found = self._saves.found, None
        if self._group.most(self.steps) != -self._group.most(-self.steps):
            raise InvalidRequest(
                f"the {self._group.count} processes found different checkpoints, this one of step {self.steps}",
                do="Give all of them the same place, which each can read.",
            )
        if saved is None:
            return
        saved = own_state(saved, self._group.rank, self._group.count)
        put_back(self._parts, saved["parts"])
        resume = self._resume = saved["position"]
        self._epoch, self._generators = resume["epoch"], resume["chance"][1]
        self._stopped_wall_ns = saved["wall_ns"]
        if not resume["in_pass"]:
            resume["epoch_chance"] = resume["chance"][0]

    # ---- the end ----

    def close(self) -> None:
        """Stop. What was begun in the background is finished, and what went wrong there is raised. Harmless twice."""
        if self._closed:
            return
        self._closed = True
        self._preemption.end()
        self._saves.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Save what is not saved, and stop; after an error only stop, since what is whole then is not known."""
        if error is None:
            if not self._closed:
                self._make_durable()
                self._write_progress(done=True)
                self.close()
            return
        try:
            self.close()
        except CheckpointFailed as failed:
            error.add_note(f"Besides, {failed}")

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this trainer is closed", do="Make another one; it goes on from what is saved.")


PAGE: Final = "SUBLET_PAGE"


def place_here() -> Any:
    """A place as `sublet.Durable` takes one. Raises ``InvalidRequest`` where there is none."""
    if os.environ.get(PAGE):
        from sublet.compute.behind import current

        try:
            return current().volume
        except NotFound:
            pass
    raise InvalidRequest(
        "no place to save was named",
        do="Give PreemptibleTrainer a folder or a block lease (place=...), or run the program with `sublet train`.",
    )


SAVE_EVERY: Final = "SUBLET_SAVE_EVERY"
"""Set by `sublet train --save-every`."""


def parts_of(
    model: Any, optimizer: Any, scheduler: Any, scaler: Any, state: Mapping[str, Any] | None, metrics: dict[str, Any]
) -> dict[str, TrainedPart]:
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    found = {name: part_of(f"the {name}", thing) for name, thing in named.items() if thing is not None}
    found["metrics"] = part_of("metrics", metrics)
    for name, thing in (state or {}).items():
        found[f"state[{name!r}]"] = part_of(f"state[{name!r}]", thing)
    return found


def interval_of(save_every: int | str | None) -> tuple[int | None, int]:
    """Every so many steps, or every so many nanoseconds."""
    if save_every is None:
        value = os.environ.get(SAVE_EVERY, "")
        save_every = int(value) if value.isascii() and value.isdigit() else value or "1m"
    if isinstance(save_every, bool) or not isinstance(save_every, int | str):
        raise InvalidRequest(
            f"save_every cannot be {save_every!r}", do='Give a number of steps, or a duration such as "30s".'
        )
    if isinstance(save_every, str):
        return None, parse_duration_ns(save_every, "save_every")
    if save_every < 1:
        raise InvalidRequest("save_every needs at least one step", do="Give 1 or more, or a duration.")
    return save_every, 0


def no_steps() -> InvalidRequest:
    return InvalidRequest(
        "batches were taken and trainer.step() was never called, so nothing could be saved",
        do="Call trainer.step(loss) for each batch, or trainer.step() behind a step of your own.",
    )


def other_loop() -> InvalidRequest:
    return InvalidRequest(
        "the checkpoint was made by a program with another loop around its batches",
        do="Keep `for epoch in trainer.epochs(n)` as it was, or begin under another name.",
    )


# ---- The parts of a training program's state: anything that can say where it stands, and be put back there


class TrainedPart(NamedTuple):
    """How one object is saved, and restored in place."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def part_of(name: str, thing: Any) -> TrainedPart:
    """By what it can: ``state_dict``, the state of a generator, or, of a dict or a list, what it holds."""
    thing = getattr(thing, "_orig_mod", thing)  # torch.compile's wrapper has other names than the plain module
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return TrainedPart(thing.state_dict, thing.load_state_dict)
    if isinstance(thing, random.Random):
        return TrainedPart(thing.getstate, thing.setstate)
    if hasattr(thing, "get_state") and hasattr(thing, "set_state"):  # of torch, and the old ones of numpy
        return TrainedPart(thing.get_state, thing.set_state)
    if hasattr(thing, "bit_generator"):
        bits = thing.bit_generator
        return TrainedPart(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(thing, dict):
        return TrainedPart(lambda: dict(thing), lambda state: _fill(thing, state))
    if isinstance(thing, list):
        return TrainedPart(lambda: list(thing), lambda state: thing.__setitem__(slice(None), state))
    raise InvalidRequest(
        f"{name} is a {type(thing).__name__}, which cannot say where it stands",
        do="Give it state_dict() and load_state_dict(), or hand over a dict or a list with what matters.",
    )


def put_back(parts: Mapping[str, TrainedPart], saved: Mapping[str, Any]) -> None:
    """All of them, or the first that does not fit is raised by name. Training must not begin after that."""
    if parts.keys() != saved.keys():
        missing, strange = sorted(parts.keys() - saved.keys()), sorted(saved.keys() - parts.keys())
        problems = [f"lacks {', '.join(missing)}"] if missing else []
        problems += [f"has {', '.join(strange)}, which this program has not"] if strange else []
        raise InvalidRequest(
            f"the checkpoint {' and '.join(problems)}",
            do="Give the trainer what it was saved with, or begin under another name.",
        )
    for name, part in parts.items():
        try:
            part.set(saved[name])
        except SubletError:
            raise
        except Exception as error:
            raise InvalidRequest(
                f"the checkpoint does not fit this program's {name}: {error}",
                do="Build it as it was when it was saved, or begin under another name.",
            ) from error


def _fill(thing: dict[Any, Any], state: Mapping[Any, Any]) -> None:
    thing.clear()
    thing.update(state)


# ---------------------------------------------------------------------------------------------------------------- saves
#
# Saves while training continues: when to save, one at a time in the background, raising every failure.


FORMAT: Final = "sublet.training/1"


class Saves:
    """The checkpoints of one trainer, at one place."""

    def __init__(
        self,
        place: Any,
        *,
        schema: str,
        keep: int,
        every: tuple[int | None, int],
        clock: Clock,
        writes: bool = True,
    ) -> None:
        """``every``: so many steps, or else so many nanoseconds. ``writes=False``: another process does that."""
        self._every, self._every_ns = every
        self._clock = clock
        self.account = Account()
        self.found: dict[str, Any] | None = None
        """What is saved there; its taker resets it to None."""
        self.is_dirty = False
        """There is something that is not saved."""
        self.durable_steps = -1
        """So many are known to be durable; -1 if none are."""
        self._is_requested = False
        self._in_flight = False
        self._steps = 0
        """Of the last save that was begun."""
        self._began_ns = clock.now_ns()
        self._seen: SaveReport | None = None
        whole = f"{FORMAT} {schema}".strip()
        self._durable: Durable[Any] | None = None
        try:
            restored: Durable[Any] = Durable.restore(place, schema=whole, keep=keep)
        except NotFound:
            if writes:
                self._durable = Durable(None, place, schema=whole, keep=keep)
            return
        found: dict[str, Any] = restored.value
        restored.value = None  # the parts get copies of their own
        if writes:
            self._durable = restored
        else:
            restored.close(save=False)
        self.found, self.account = found, Account(**found["account"])
        self.account.resumed += 1
        self._steps = self.durable_steps = self.account.steps

    def ask(self) -> None:
        """At the next occasion, whether it is time or not."""
        self._is_requested = self.is_dirty = True

    def is_due(self) -> bool:
        """Whether to save now. Not while the last one is still being written: training does not wait for it."""
        if self.is_running() or not self.is_dirty:
            return False
        if self._durable is None:
            return self._is_requested
        if self._is_requested:
            return True
        if self._every is not None:
            return self.account.steps - self._steps >= self._every
        return self._clock.now_ns() - self._began_ns >= self._every_ns

    def is_running(self) -> bool:
        """Whether the last save is still being written. Raises if it failed: nothing is trained that cannot be kept."""
        if self._in_flight and self._durable is not None:
            self._durable.value  # noqa: B018 - this is where the error of a save in the background is raised
            if self._durable.last is not self._seen:
                self._note()
        return self._in_flight

    def write(self, state: dict[str, Any], *, wait: bool) -> None:
        """Save this. Without ``wait`` it is only copied now. Raises what went wrong, also with the one before."""
        began_ns = self._clock.now_ns()
        self.wait()
        self._steps, self._began_ns = self.account.steps, began_ns
        if self._durable is not None:
            self._durable.value = state
            self._in_flight = True
            self._durable.checkpoint(wait=wait, note=f"step {self._steps}")
        self.is_dirty = self._is_requested = False
        self.account.save_seconds += (self._clock.now_ns() - began_ns) / NS_PER_S
        if wait and self._durable is not None:
            self._note()

    def wait(self) -> None:
        """Until what was begun is durable. Raises why it is not."""
        if self._in_flight and self._durable is not None:
            self._durable.flush()
            self.is_running()

    def close(self) -> None:
        """Finish what was begun. Raises what went wrong with it."""
        if self._durable is not None:
            self._durable.close(save=False)

    def _note(self) -> None:
        report = None if self._durable is None else self._durable.last
        assert report is not None
        self._in_flight, self._seen, self.durable_steps = False, report, self._steps
        self.account.saves += 1
        self.account.bytes_saved += report.written_bytes
