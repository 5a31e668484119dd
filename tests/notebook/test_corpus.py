"""The corpus: notebooks run plain and with ``%%gpu``, compared cell by cell, also while devices are taken and processes
are killed.

``make test`` runs a part that is chosen by ``SUBLET_CORPUS_SEED`` (15), so that each kind of notebook is met;
``SUBLET_CORPUS=all``, as ``make soak`` sets it, runs every notebook in every mode.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

import sublet
from tests.integration.office_stage import OfficeStage
from tests.notebook.corpus.compare import compare, normalised
from tests.notebook.corpus.notebooks import ALL, LIGHT, MATERIAL, OWN_NAMES, TWINS, Mode, Notebook, choose_cells, find
from tests.notebook.corpus.reasons import FAULTS, REASONS, Difference
from tests.notebook.corpus.run import Run, office_on, run_notebook
from tests.notebook.corpus.trouble import TROUBLES, Story, Trouble, run_in_trouble
from tests.notebook.shell_stage import stage_on
from tests.traces import until

WHOLE: Final = os.environ.get("SUBLET_CORPUS") == "all"
SEED: Final = int(os.environ.get("SUBLET_CORPUS_SEED", "15"))
LEASED: Final[tuple[Mode, ...]] = ("all", "half", "rest")
HEAVY: Final = (
    (
        *("frames", "figures", "trees", "scalar_autograd", "arrays_deep", "figures_over_cells"),
        *("frames_deep", "grid_world", "simulations", "shop_tables"),
    ),
    (
        *("torch_intro", "backprop", "bigrams", "seeds", "settings", "from_imports"),
        *("tiny_transformer", "training_loop"),
    ),
)
"""Notebooks that load large libraries, by kind: one of each in a short run."""
ALWAYS: Final = ("environment", "display")
"""What a cell does besides computing: one of the two in a short run."""
CHEAPEST: Final = "rasbt_bpe"
"""Of other people's."""


def chosen() -> list[tuple[str, Mode]]:
    """Which notebooks run in which mode."""
    if WHOLE:
        return [(name, mode) for name in ALL for mode in LEASED]
    chance = random.Random(SEED)
    names = [chance.choice(ALWAYS), chance.choice(LIGHT), *(chance.choice(kind) for kind in HEAVY), CHEAPEST]
    return [(name, LEASED[(at + SEED) % 3]) for at, name in enumerate(names)]


CHOSEN: Final = chosen()
MET: Final[set[str]] = set()
"""Names of reasons and faults."""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with office_on(tmp_path_factory.mktemp("home"), "1x4GiB") as made:
        yield made


@pytest.fixture(scope="module")
def plain_runs() -> dict[str, Run]:
    """Of the notebook that was run last."""
    return {}


def plain_of(notebook: Notebook, runs: dict[str, Run], folder: Path, env: dict[str, str]) -> Run:
    if notebook.name not in runs:
        runs.clear()
        runs[notebook.name] = run_notebook(notebook, "plain", folder / "plain", env)
    return runs[notebook.name]


def again_of(notebook: Notebook, runs: dict[str, Run], folder: Path, env: dict[str, str]) -> Run:
    """Run plainly a second time: what differs between two plain runs is the notebook's own chance."""
    name = f"{notebook.name} again"
    if name not in runs:
        runs[name] = run_notebook(notebook, "plain", folder / "again", env)
    return runs[name]


def told(found: list[Difference]) -> str:
    return "\n".join(map(str, found))


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.needs("material")] if name in MATERIAL else []


@pytest.mark.needs("torch")
@pytest.mark.slow
@pytest.mark.timeout(1800 if WHOLE else 300)
@pytest.mark.parametrize(
    ("name", "mode"), [pytest.param(*one, marks=marks_of(one[0]), id="-".join(one)) for one in CHOSEN]
)
def test_a_leased_notebook_shows_and_leaves_what_the_plain_one_does(
    name: str, mode: Mode, env: dict[str, str], plain_runs: dict[str, Run], tmp_path: Path
) -> None:
    notebook = find(name)
    assert notebook is not None
    plain = plain_of(notebook, plain_runs, tmp_path, env)
    again = again_of(notebook, plain_runs, tmp_path, env) if WHOLE else None
    leased = run_notebook(notebook, mode, tmp_path / "leased", env, seed=SEED, load=tuple(plain.loaded))
    found = compare(plain, again, leased)
    if name in MATERIAL and again is None and any(one.reason is None for one in found):
        found = compare(plain, again_of(notebook, plain_runs, tmp_path, env), leased)
    MET.update(one.reason.name for one in found if one.reason)
    assert not (unexplained := [one for one in found if one.reason is None]), told(unexplained)


if WHOLE:  # a short run need not meet all of them

    def test_known_faults_are_still_met() -> None:
        """Of those that are not, the rows go out of the table."""
        assert not {one.name for one in FAULTS} - MET


# ---- the device is taken, processes are killed


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[OfficeStage]:
    with stage_on(tmp_path / "office", "1x4GiB") as made:
        yield made


def striking(stage: OfficeStage, trouble: Trouble, chance: random.Random) -> None:
    assert stage.traces is not None
    match trouble:
        case "revoke":
            with sublet.connect(home=stage.office.home) as fabric:
                for lease in fabric.leases():
                    if any(part.kind == "gpu" for part in lease.parts):
                        with contextlib.suppress(sublet.SubletError):  # it has ended meanwhile
                            fabric.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)
        case "guest":
            if marked := stage.traces.marked():
                stage.procs.send(chance.choice(marked), signal.SIGKILL)
        case "office":
            stage.kill_office()
        case "supervisor":
            with contextlib.suppress(ProcessLookupError):
                if (pid := stage.find_supervisor()) is not None:
                    os.kill(pid, signal.SIGKILL)
        case "kernel":
            raise AssertionError("the runner does that")


def in_trouble(name: str, stage: OfficeStage, folder: Path, troubles: tuple[Trouble, ...], share: float) -> Story:
    """Run it so; compare what it leaves, and what each cell showed in the end, with the plain run."""
    notebook = find(name)
    assert notebook is not None
    env = {**stage.office.env(), "SUBLET_HOME": str(stage.office.home)}
    plain = run_notebook(notebook, "plain", folder / "plain", env)
    chance, story = random.Random(SEED), Story(seed=SEED)

    def come_back() -> None:
        until("an office", lambda: stage.find_office() is not None or stage.office.start())
        until("a supervisor", stage.find_supervisor)

    leased = run_in_trouble(
        notebook,
        plain,
        folder / "leased",
        env,
        story,
        troubles=troubles,
        strike=lambda trouble: striking(stage, trouble, chance),
        come_back=come_back,
        share=share,
        options="--ttl 10s",
    )
    for cell in plain.cells[:-1]:  # what each left is not what is compared here
        cell.names, cell.settings = {}, {}
    for run in (plain, leased):  # a cell that is run again has another number
        run.cells[-1].names = {key: one for key, one in run.cells[-1].names.items() if not key.startswith("Out[")}
    for cell in leased.cells:  # one whose lease is not renewed, since the office was killed, may be warned of its end
        said = {name: WARNED.sub("", text) for name, text in cell.streams.items()}
        cell.streams = {name: text for name, text in said.items() if text}
    found = [one for one in compare(plain, None, leased) if one.reason is None]
    assert not found, f"{told(found)}\n{story}"
    return story


WARNED: Final = re.compile(r"^lease \S+: jeopardy: \S+ left for sure\n", re.MULTILINE)
RERUN: Final = tuple(name for name in OWN_NAMES if (found := find(name)) is not None and not found.once)
STRUCK: Final = RERUN if WHOLE else (random.Random(SEED).choice([name for name in RERUN if name in LIGHT]),)


if WHOLE:  # a short run takes the device once, below

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize("name", RERUN)
    def test_the_device_is_taken_at_a_random_moment_of_every_cell(
        name: str, stage: OfficeStage, tmp_path: Path
    ) -> None:
        story = in_trouble(name, stage, tmp_path, ("revoke",), 1.0)
        assert story.met


@pytest.mark.slow
@pytest.mark.timeout(1800 if WHOLE else 300)
@pytest.mark.parametrize("name", STRUCK)
def test_kernel_guest_office_and_supervisor_are_killed(name: str, stage: OfficeStage, tmp_path: Path) -> None:
    story = in_trouble(name, stage, tmp_path, TROUBLES, 0.5 if WHOLE else 0.0)
    assert {trouble for trouble, _ in story.met} >= set(TROUBLES), story


# ---- the corpus itself


def test_every_notebook_of_other_people_has_a_twin_here() -> None:
    assert set(TWINS) == set(MATERIAL)
    assert set(TWINS.values()) <= set(OWN_NAMES)
    assert len(OWN_NAMES) >= 12


def test_a_short_run_meets_every_kind_whatever_its_seed() -> None:
    assert {name for kind in HEAVY for name in kind} | {*LIGHT, *ALWAYS} == set(OWN_NAMES)


def test_two_halves_are_the_whole() -> None:
    notebook = find("classes")
    assert notebook is not None
    half, rest = (choose_cells(notebook, mode, 5) for mode in ("half", "rest"))
    assert not half & rest
    assert half | rest == choose_cells(notebook, "all", 5)


def difference(**more: str) -> Difference:
    plain: dict[str, str] = {"facet": "setting", "key": "numpy: errstate", "plain": "a", "leased": "b", **more}
    return Difference(notebook="n", cell=0, mode="all", seed=1, **plain)  # type: ignore[arg-type]


def test_a_reason_explains_what_it_names_and_nothing_else() -> None:
    assert all(one.why and one.name for one in (*REASONS, *FAULTS))
    for one in (difference(), difference(facet="stream", key="stdout"), difference(facet="error", key="")):
        assert not any(reason.explains(one) for reason in REASONS), one
    assert any(reason.explains(difference(leased="-")) for reason in REASONS)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("<f at 0x7f0011223344>", "<f at 0x7f99aabbccdd>"),
        ("Wall time: 3.2 ms", "Wall time: 412 µs"),
        ("1.2 ms ± 3 µs per loop (mean ± std. dev. of 2 runs, 2 loops each)", "9 ns ± 1 ns per loop (mean)"),
        (
            (
                "The slowest run took 4.5 times longer than the fastest. This could mean a cache.\n"
                "Compiler time: 0.13 s\n9 ns ± 1 ns per loop (mean)\n"
            ),
            "1.2 ms ± 3 µs per loop (mean)\n",
        ),
        ("CPU times: total: 2 s\nCompiler : 780 ms\nParser   : 1 s\n", "CPU times: total: 1 s\n"),
        ("/tmp/ipykernel_12/345.py:3: UserWarning: x", "/tmp/ipykernel_99/1.py:4: UserWarning: x"),
        ("  0%|  | 0/2\r100%|##| 2/2 [00:00<00:00, 51.2it/s]", "100%|##| 2/2 [00:01<00:00, 3.10it/s]"),
        (f"\r  0%|  | 0/3 [00:00<?, ?it/s]\r{' ' * 29}\r", f"\r 33%|  | 1/3 [00:00<00:00, 9.8it/s]\r{' ' * 33}\r"),
    ],
)
def test_what_differs_from_run_to_run_has_a_rule(one: str, two: str) -> None:
    assert normalised(one) == normalised(two)


def test_a_difference_is_found() -> None:
    from tests.notebook.corpus.run import Cell

    def run(is_leased: bool = False, **what: object) -> Run:
        made = Run(notebook="n", mode="all" if is_leased else "plain", seed=1, folder=Path("/nowhere"))
        cell = Cell(
            source="x", streams={"stdout": "1 ms\n"}, names={"x": ["int", "d", "", "", ""]}, settings={"k": "v"}
        )
        for name, value in what.items():
            setattr(cell, name, value)
        made.cells.append(cell)
        return made

    plain = run()
    assert not compare(plain, None, run(True))
    differing: list[dict[str, object]] = [
        {"streams": {"stdout": "2 ms\n"}},
        {"error": ("ValueError", "x")},
        {"names": {"x": ["int", "e", "", "", ""]}},
        {"names": {}},
        {"settings": {"k": "w"}},
        {"shown": [{"kind": "execute_result", "data": {"text/plain": "1"}}]},
        {"payload": [{"source": "page"}]},
    ]
    for what in differing:
        [found] = compare(plain, None, run(True, **what))
        assert found.reason is None
        assert replace(found, seed=2) != found
        own = compare(plain, run(False, **what), run(True, **what))
        assert [one.reason.name for one in own if one.reason] == ["own randomness"]
