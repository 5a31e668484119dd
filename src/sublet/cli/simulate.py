"""``sublet simulate``: replays a workload on the office's ledger with a held clock, beside models of other systems."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from sublet.cli.declare import Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson, count, name, size
from sublet.cli.show import document, plural, table, visible
from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.values import GIB, shown

if TYPE_CHECKING:
    from sublet.office.ledger.bills import Rates
    from sublet.simulate.find import Answer
    from sublet.simulate.replay import Costs, ModelGpus, ReplayHardware, Rules
    from sublet.simulate.results import Result
    from sublet.simulate.workload import WorkloadSession

SEEDS: Final = 5
_TEXT_MAX: Final = 64 * 1024


def _share(text: str) -> float:
    """``10%`` or ``0.1``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InvalidRequest(f"{shown(text)} is not a share", do="Give 0% to 100%.")
    return share


def _gpus(text: str) -> int | tuple[ModelGpus, ...]:
    """``8``, or ``4xA100-40GiB,2xT4-16GiB``."""
    if text.isascii() and text.isdigit():
        return count(text)
    from sublet.simulate.replay import ModelGpus

    found = []
    for part in text.split(","):
        number, x, rest = part.strip().partition("x")
        model, dash, memory = rest.rpartition("-")
        if not (number and x and model and dash and model.isprintable()) or "|" in model:
            raise InvalidRequest(
                f"{shown(text)} is neither a number of GPUs nor a list of models",
                do="Write 8, or 4xA100-40GiB,2xT4-16GiB.",
            )
        found.append(ModelGpus(gpus=count(number), model=model, vram_gib=size(memory) / GIB))
    if len({one.model for one in found}) < len(found):
        raise InvalidRequest(f"{shown(text)} has a model twice", do="Add their numbers up.")
    return tuple(found)


def _searched(text: str) -> str:
    """``gpus``, or ``gpus:A100``: the model whose number is searched for; empty: the first."""
    word, _, model = text.partition(":")
    if word != "gpus" or text.endswith(":"):
        raise InvalidRequest(f"{shown(text)} cannot be found", do="Write --find gpus, or --find gpus:A100.")
    return model


def simulate(
    *,
    trace: Annotated[
        str | None, Opt("--trace", metavar="FILE", help="Sessions and cells as CSV (default: generated ones).")
    ] = None,
    journal: Annotated[
        str | None, Opt("--journal", metavar="FILE", help="An office's past: its journal.db, or a backup of one.")
    ] = None,
    course: Annotated[
        int | None, Opt("--course", metavar="N", parse=count, help="Students of a course, one week of it.")
    ] = None,
    lab: Annotated[
        list[str], Opt("--lab", metavar="WHEN", help="When the course meets, such as 'Tue 10:00-12:00'. Repeatable.")
    ] = [],  # noqa: B006 - never changed, as for every command
    sessions: Annotated[
        int | None, Opt("--sessions", metavar="N", parse=count, help="Sessions that are generated (default: 64).")
    ] = None,
    days: Annotated[
        int | None, Opt("--days", metavar="N", parse=count, help="Days that are generated (default: 14).")
    ] = None,
    jobs: Annotated[
        str | None, Opt("--jobs", metavar="FILE", help="Batch jobs as CSV, in the background of the rest.")
    ] = None,
    job_columns: Annotated[
        str | None,
        Opt(
            "--job-columns",
            metavar="LIST",
            help="Names of their columns: start=COLUMN,duration=COLUMN,gpus=COLUMN, and where need be user=COLUMN, "
            "unit=s|min|h, tier=batch|spot.",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        Opt(
            "--gpus",
            metavar="N",
            help="Number of GPUs, or of several models: 4xA100-40GiB,2xT4-16GiB. With --find, the most to try.",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        Opt("--gpus-per-node", metavar="N", parse=count, help="GPUs of one machine (default: 8, or the journal's)."),
    ] = None,
    vram: Annotated[
        int | None,
        Opt("--vram", metavar="SIZE", parse=size, help="Memory of one GPU (default: 80GiB, or the journal's)."),
    ] = None,
    seed: Annotated[
        int, Opt("--seed", metavar="N", parse=count, help="First seed of what is generated (default: 1).")
    ] = 1,
    seeds: Annotated[
        int | None,
        Opt("--seeds", metavar="N", parse=count, help=f"With --find, seeds for each count (default: {SEEDS})."),
    ] = None,
    find: Annotated[
        str | None,
        Opt(
            "--find",
            metavar="gpus[:MODEL]",
            parse=_searched,
            help="Find the number that reaches the goal, of the first model or of MODEL.",
        ),
    ] = None,
    such_that: Annotated[
        str | None, Opt("--such-that", metavar="GOAL", help="The goal, such as 'start_within(10s) >= 0.95'.")
    ] = None,
    policy: Annotated[
        str | None,
        Opt(
            "--policy",
            metavar="FILE",
            help="A policy.toml whose limits, groups and reservations hold (default: no limits).",
        ),
    ] = None,
    second_policy: Annotated[
        str | None, Opt("--second-policy", metavar="FILE", help="Another policy.toml, in a column of its own.")
    ] = None,
    no_yield: Annotated[
        bool, Opt("--no-yield", help="Add a column in which idle holders keep their GPUs: what yielding is worth.")
    ] = False,
    group: Annotated[
        str | None,
        Opt("--group", metavar="NAME", parse=name, help="Group of --policy that the sessions are in."),
    ] = None,
    pay_priority: Annotated[
        float,
        Opt(
            "--pay-priority",
            metavar="SHARE",
            parse=_share,
            help="Share of the tenants that pay for priority, such as 10% (default: 0).",
        ),
    ] = 0.0,
    costs: Annotated[
        str | None,
        Opt("--costs", metavar="FILE", help="What `python3 -m benchmarks notebook_taken` measured (default: assumed)."),
    ] = None,
    rates: Annotated[
        str | None, Opt("--rates", metavar="FILE", help="A rates.toml, for the cost of what is held.")
    ] = None,
    svg: Annotated[str | None, Opt("--svg", metavar="FOLDER", help="Folder for plots as SVG files.")] = None,
    save: Annotated[
        str | None,
        Opt(
            "--save",
            metavar="GROUP",
            parse=name,
            help="Group of this machine's office whose teachers see it, with the queue of one GPU less.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run a workload on simulated GPUs, with the office's own ledger.

    It answers how many GPUs are needed, and what leases save beside sessions that hold theirs, idle cullers and batch
    queues. No office is asked or changed. What is assumed is printed. With `--save` the page of the studio shows it to
    the teachers of a group.
    """
    from sublet.simulate import replay, workload

    if (find is None) != (such_that is None):
        raise UsageError("--find and --such-that belong together", do="Give both, or none of them.")
    if find is None and gpus is None and journal is None:
        raise UsageError("the number of GPUs is missing", do="Give --gpus N, or --find gpus --such-that GOAL.")
    if sum(one is not None for one in (trace, journal, course)) > 1:
        raise UsageError("--trace, --journal and --course contradict each other", do="Give one of them.")
    if (course is None) != (not lab):
        raise UsageError("--course and --lab belong together", do="Write --course 500 --lab 'Tue 10:00-12:00'.")
    wanted_gpus = None if gpus is None else _gpus(gpus)
    recorded = trace is not None or journal is not None
    if (recorded or course is not None) and (sessions is not None or days is not None):
        raise UsageError("--sessions and --days are for generated sessions", do="Leave them out.")
    if (jobs is None) != (job_columns is None):
        raise UsageError("--jobs and --job-columns belong together", do="Say what the columns of the file are called.")
    prices = _rates(rates)
    if pay_priority and prices is not None and prices.priority is None:
        raise InvalidRequest(
            "priority is not for sale by these rates", do="Write `priority` into the file, or leave --pay-priority out."
        )
    background = workload.read_jobs(Path(jobs), _pairs(job_columns)) if jobs and job_columns else []
    labs = [workload.parse_lab(text) for text in lab]
    week_min = workload.course_start_min(labs) if labs else 0.0
    rules = [
        (called, _rules(path, week_min, prices)) for called, path in (("leases", policy), ("policy 2", second_policy))
    ]
    _check_group(group, policy, rules, with_second=second_policy is not None)
    known = replay.ReplayHardware(gpus=1)
    read: list[WorkloadSession] = []
    if trace is not None:
        read = workload.read_trace(Path(trace))
    elif journal is not None:
        from sublet.simulate.past import read_journal

        read, known = read_journal(Path(journal))

    def sessions_of(number: int) -> list[WorkloadSession]:
        if course is not None:
            found = workload.course(number, students=course, labs=labs)
        elif recorded:
            found = workload.resample(read, number)
        else:
            found = workload.generate(number, sessions=sessions or 64, days=days or 14)
        if pay_priority:
            found = workload.paying(found, pay_priority, number)
        return workload.merged([replace(session, group=group or "") for session in found], background)

    hardware = _hardware(known, wanted_gpus, vram, gpus_per_node, find)
    plan = _Plan(
        sessions_of=sessions_of,
        base=hardware,
        policies=rules,
        has_second=second_policy is not None,
        without_yielding=no_yield,
        costs=replay.read_costs(Path(costs)) if costs is not None else replay.Costs(),
    )
    answer, number = None, hardware.gpus
    if such_that is not None:
        answer = plan.find(such_that, None if gpus is None else number, range(seed, seed + (seeds or SEEDS)))
        number = answer.gpus
    results = plan.compare(number, seed)
    assumed = plan.assumptions(number, results[0], course=course is not None, resampled=recorded and answer is not None)
    if journal is not None:
        assumed.append("requests come when they came, each on its own, whatever became of those before them")
    if pay_priority:
        assumed.append(f"{pay_priority:.0%} of the tenants pay for priority, for all of their cells, drawn by the seed")
    if save is not None:
        _save(save, results[0], plan.with_one_less(number, seed))
    if svg is not None:
        _draw(Path(svg), results, answer)
    if as_json:
        figures = [result.figures(prices) for result in results]
        searched = answer and answer.figures() | ({"model": hardware.model} if hardware.beside else {})
        document({"find": searched, "results": figures, "assumptions": assumed})
    else:
        print(_for_people(results, answer, hardware, assumed, prices))
    return DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is the same for every number of GPUs."""

    sessions_of: Callable[[int], list[WorkloadSession]]
    base: ReplayHardware
    """With any number of GPUs of its first model."""
    policies: Sequence[tuple[str, Rules]]
    has_second: bool
    without_yielding: bool
    costs: Costs

    def hardware(self, gpus: int) -> ReplayHardware:
        return replace(self.base, gpus=gpus)

    def compare(self, gpus: int, seed: int) -> list[Result]:
        from sublet.simulate.peers import PEERS, run_peer

        sessions, hardware = self.sessions_of(seed), self.hardware(gpus)
        found = [self._run(sessions, hardware, self.policies[0], f"{gpus} GPUs")]
        if self.has_second:
            found.append(self._run(sessions, hardware, self.policies[1], f"{gpus} GPUs, second policy"))
        if self.without_yielding:
            found.append(self._run(sessions, hardware, _not_yielding(self.policies[0][1]), f"{gpus} GPUs, no yielding"))
        return [*found, *(run_peer(peer, sessions, hardware) for peer in PEERS)]

    def with_one_less(self, gpus: int, seed: int) -> Result | None:
        """The first policy with a GPU taken away; None where that leaves none, or too few for its floors."""
        if self.hardware(gpus).total <= self.policies[0][1].least:
            return None
        return self._run(self.sessions_of(seed), self.hardware(gpus - 1), self.policies[0], f"{gpus - 1} GPUs")

    def find(self, text: str, most: int | None, seeds: Sequence[int]) -> Answer:
        from sublet.simulate.find import SeedProcesses, find, late, parse_goal, processes_of
        from sublet.simulate.results import Result
        from sublet.simulate.workload import peak_gpus

        goal = parse_goal(text)
        workloads = {seed: self.sessions_of(seed) for seed in seeds}
        if most is None:
            most = max(peak_gpus(sessions, self.base.vram_gib) for sessions in workloads.values())
            per_node = self.base.per_node
            most = -(-most * 3 // 2 // per_node) * per_node + per_node  # parts of nodes stay free

        def run(gpus: int, seed: int, progress: Callable[[float], None]) -> Result:
            cells = sum(cell.gpus > 0 for session in workloads[seed] for cell in session.cells)
            if self.hardware(gpus).total < self.policies[0][1].least:
                return Result(gpus=gpus, impossible=max(1, cells))
            far = late(goal, cells)
            return self._replay(workloads[seed], self.hardware(gpus), self.policies[0], progress, far)

        line, processes = _Progress(), processes_of(seeds)
        tried: list[int] = []

        def show(gpus: int, done: int, share: float) -> None:
            line.show(f"{gpus} GPUs: {done} of {len(seeds)} seeds, {share:.0%}; {plural(len(tried), 'number')} tried")

        at_once = SeedProcesses(run, seeds, show, processes=processes)
        try:
            if processes > 1:
                return find(goal, most, seeds, at_once.result, lambda point: tried.append(point.gpus))
            return find(
                goal,
                most,
                seeds,
                lambda gpus, seed: run(gpus, seed, lambda share: line.show(f"{gpus} GPUs, seed {seed}: {share:.0%}")),
            )
        finally:
            at_once.close()
            line.clear()

    def _run(
        self, sessions: Sequence[WorkloadSession], hardware: ReplayHardware, rules: tuple[str, Rules], label: str
    ) -> Result:
        line = _Progress()
        try:
            return self._replay(sessions, hardware, rules, lambda share: line.show(f"{label}: {share:.0%}"))
        finally:
            line.clear()

    def _replay(
        self,
        sessions: Sequence[WorkloadSession],
        hardware: ReplayHardware,
        rules: tuple[str, Rules],
        progress: Callable[[float], None],
        late: tuple[int, int] | None = None,
    ) -> Result:
        from sublet.simulate.replay import Replay

        name, by = rules
        return Replay(sessions, hardware, rules=by, costs=self.costs, name=name, late=late).run(progress)

    def assumptions(self, gpus: int, ours: Result, *, course: bool, resampled: bool) -> list[str]:
        from sublet.simulate.replay import assumptions

        found = assumptions(self.hardware(gpus), self.costs, self.policies[0][1], shared=ours.shared)
        if course:
            found.append(
                "students come within 10 minutes of the beginning of a lab and run cells of seconds to minutes, a "
                "third of them without GPU, with pauses as published; half of them work on Sunday evening as well"
            )
        if resampled:
            found.append("seeds other than 1 draw whole sessions anew, with replacement")
        found.append(
            "models beside the ledger: GPUs change hands and servers start in no time; backfill knows run times"
        )
        return found


class _Progress:
    """A line on the terminal that says how far it is; nothing where there is no terminal."""

    def __init__(self) -> None:
        self._shown_s = 0.0
        self._shown = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self._shown and time.monotonic() - self._shown_s > 0.2:
            self._shown_s = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shown_s:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _hardware(
    known: ReplayHardware,
    gpus: int | tuple[ModelGpus, ...] | None,
    vram: int | None,
    per_node: int | None,
    searched: str | None,
) -> ReplayHardware:
    """What is asked for, over what is known of the office; the model that is searched for stands first."""
    models = gpus if isinstance(gpus, tuple) else known.models
    several = isinstance(gpus, tuple) or bool(known.beside)
    if several and vram is not None:
        raise UsageError("--vram is for GPUs of one model", do="Write the memory of each: --gpus 4xA100-40GiB.")
    if known.beside and isinstance(gpus, int):
        models_known = ",".join(map(str, known.models))
        raise UsageError(
            f"{gpus} GPUs of which model? The journal's office had {models_known}",
            do=f"Write the models: --gpus {models_known}.",
        )
    if isinstance(gpus, int):
        models = (replace(models[0], gpus=gpus),)
    if vram is not None:
        models = (replace(models[0], vram_gib=vram / GIB),)
    first = next((one for one in models if one.model == searched), None) if searched else models[0]
    if first is None:
        named = ", ".join(one.model for one in models)
        raise InvalidRequest(f"there is no {shown(searched)} among the GPUs", do=f"Name one of {named}.")
    return replace(
        known,
        gpus=first.gpus,
        model=first.model,
        vram_gib=first.vram_gib,
        per_node=per_node or known.per_node,
        beside=tuple(one for one in models if one is not first),
    )


def _for_people(
    results: Sequence[Result],
    answer: Answer | None,
    hardware: ReplayHardware,
    assumed: Sequence[str],
    prices: Rates | None,
) -> str:
    from sublet.simulate.results import HOUR_NS, compare

    ours = results[0]
    hours, days = (ours.used_ns - ours.moving_ns) / HOUR_NS, ours.planned_ns / HOUR_NS / 24
    of_all = f"{ours.load:.0%} of {plural(ours.gpus, 'GPU')} for {days:.1f} days"
    what = f"{plural(ours.sessions, 'session')}, {plural(ours.cells, 'GPU cell')}"
    lines = [f"{what}. The cells alone need {hours:,.0f} GPU-hours, {of_all}."]
    if ours.load > 0.9:
        lines.append(
            f"That is {ours.load * days:.1f} days of full use: under any policy cells stretch; see the fluid bound."
        )
    if ours.impossible:
        lines.append(
            f"{plural(ours.impossible, 'cell')} left out: no node has as many GPUs of the model, or as much memory."
        )
    if ours.refused:
        lines.append(f"{plural(ours.refused, 'cell')} left out: a limit of the policy never lets them in.")
    if answer is not None:
        lines += ["", *_curve(answer, hardware)]
    heads, rows = compare(results, prices)
    lines += ["", table(heads, rows, right=heads[1:]), "", "Assumed:", *(f"- {line}" for line in assumed)]
    rate = ours.commands / max(1e-9, ours.wall_s)
    lines += ["", f"{ours.commands:,} commands to the ledger in {ours.wall_s:.1f} s ({rate:,.0f} per second)."]
    return "\n".join(lines)


def _curve(answer: Answer, hardware: ReplayHardware) -> list[str]:
    heads = [hardware.model if hardware.beside else "GPUS", "START IN TIME", "95 % INTERVAL", "GOAL"]
    rows = []
    for point in answer.points:
        low, high = point.interval
        met = "met" if point.meets(answer.goal) else "missed"
        between = f"{low:.2%} to {high:.2%}" if len(point.shares) > 1 else "-"
        share = f"under {point.mean:.0%}" if point.stopped else f"{point.mean:.2%}"
        rows.append([str(point.gpus), share, between, met])
    seeds = max(len(point.shares) for point in answer.points)
    gpus = plural(answer.gpus, "GPU")
    if hardware.beside:
        gpus += f" of model {hardware.model}, beside {', '.join(map(str, hardware.beside))},"
    text = f"{gpus} for {answer.goal}, over {plural(seeds, 'seed')}."
    low, high = next(point.one_run for point in answer.points if point.gpus == answer.gpus)
    if seeds > 1:
        text += f" One such workload has a share between {low:.1%} and {high:.1%} (95 %)."
    if answer.exceptions:
        text += f" So would {', '.join(map(str, answer.exceptions))} be, but not all counts between."
    return [table(heads, rows, right=heads[:3]), "", text]


def _save(group: str, ours: Result, less: Result | None) -> None:
    """For the page of the group's teachers."""
    from sublet.lease.value import rfc3339
    from sublet.studio.office import sessions_folder
    from sublet.studio.plan import CoursePlan, Queue, save_plan

    def queue(result: Result) -> Queue:
        longest = max((most for _, _, most in result.queue()), default=0)
        return Queue(
            gpus=result.gpus,
            at_once=result.at_once,
            median_s=result.wait_s(0.5),
            p95_s=result.wait_s(0.95),
            longest=longest,
        )

    plan = CoursePlan(made_at=rfc3339(time.time_ns()), now=queue(ours), less=None if less is None else queue(less))
    path = save_plan(sessions_folder(), group, plan)
    sys.stderr.write(f"Saved to {visible(str(path))}.\n")


def _draw(folder: Path, results: Sequence[Result], answer: Answer | None) -> None:
    from sublet.simulate import plots

    drawn = {"waits": plots.waits(results), "queue": plots.queue(results), "gpu-hours": plots.gpu_hours(results)}
    if answer is not None:
        drawn["find"] = plots.curve(answer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in drawn.items():
            (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(
            f"the plots cannot be written to {folder} ({error.strerror})", do="Give a folder that you may write to."
        ) from error


def _pairs(text: str) -> dict[str, str]:
    found = dict(pair.partition("=")[::2] for pair in text.split(","))
    if not all(found.values()):
        raise UsageError(
            "--job-columns needs NAME=COLUMN for each", do="Write start=COLUMN,duration=COLUMN,gpus=COLUMN."
        )
    return found


def _not_yielding(rules: Rules) -> tuple[str, Rules]:
    """The same rules, by which a lease is not taken because it is idle."""
    from msgspec.structs import replace as with_fields

    from sublet.values import DURATION_MAX_NS

    never = with_fields(rules.policy, idle_least_ns=DURATION_MAX_NS, idle_most_ns=DURATION_MAX_NS)
    return "no yield", rules._replace(policy=never)


def _rules(path: str | None, week_min: float, rates: Rates | None) -> Rules:
    from sublet.office.ledger.budgets import prices_record
    from sublet.office.policy_file import parse_policy
    from sublet.simulate.replay import POLICY, Rules

    prices = None if rates is None else prices_record(rates)
    if path is None:
        return Rules(week_min=week_min, prices=prices)
    limits = parse_policy(_text(path), path)
    return Rules(policy=limits.policy(POLICY), declared=limits.declared, week_min=week_min, prices=prices)


def _check_group(
    group: str | None, policy: str | None, rules: Sequence[tuple[str, Rules]], *, with_second: bool
) -> None:
    if group is None:
        return
    if policy is None:
        raise UsageError("--group needs a policy in which the group is", do="Give --policy FILE.")
    for (_, by), which in zip(rules, ("--policy", "--second-policy"), strict=True):
        if group not in by.declared.groups and (which == "--policy" or with_second):
            raise InvalidRequest(
                f"there is no group {visible(group)} in the file of {which}", do=f"Write [group.{group}] into it."
            )


def _rates(path: str | None) -> Rates | None:
    from sublet.office.ledger.bills import parse_rates

    return None if path is None else parse_rates(_text(path))


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(_TEXT_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror})", do="Give the path of a file.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not in UTF-8", do="Save it in UTF-8.") from error
