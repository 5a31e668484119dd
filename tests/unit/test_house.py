"""How the source is cut: no circle of imports, and no small module that belongs into its only importer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.unit.package_source import LOOKS_AT_SOURCE, source_files
from tools import house

pytestmark = LOOKS_AT_SOURCE

ROOT: Final = Path(__file__).parents[2]

STAY: Final[dict[str, str]] = {
    "aio": "a public path; it hands on what `sublet.aio` names",
    "cli.demo.notebook_step": "a step of the demo, as the others have a module each",
    "cli.terminal_filter": "loads regular expressions, which frequent commands do without",
    "client.aio_volume": "loads what saves, which only asyncio programs with a lease of blocks need",
    "devices.host": "one kind of device behind the interface that CUDA implements as well",
    "guest.zygote_checks": "the checks of a zygote, apart from what forks",
    "jobs.joblib_backend": "needs joblib, which is optional",
    "lease.expiring": "one pure rule of a node, with tables of its own",
    "node.agent.foreign": "pure, while its importer asks the driver from a thread of its own",
    "node.supervisor.guarded_hardware": "a barrier between rules and failing hardware, tested over hardware that fails",
    "notebook.batch.detached": "a program (`python -m`) of jobs that run across an upgrade",
    "notebook.queued_cells": "all that is known of ipykernel's queues, which are its private matter",
    "notebook.warming": "loaded alone, before anything else of the notebook",
    "office.api.openapi": "makes a document of the route table; no request needs it",
    "office.ledger.queue_liveness": "pure, while its importer drives",
    "simulate.past": "reads an office's journal; the rest of the planner reads none",
    "state.replicated.memory": "a public replica, for tests of programs",
    "studio.lease_ends": "a loop of its own over the office's news, tested with a stream that a test writes",
    "testing.rehearsal": "public: takes a lease away on purpose",
    "training.script": "a program that guests begin, by its name",
}
"""Modules under 150 lines with one importer that stay modules, and why."""


@cache
def modules() -> dict[str, house.Module]:
    return house.linked(ROOT / "src", [house.Module(file.path, file.text, file.tree) for file in source_files()])


@pytest.mark.parametrize(
    "kinds",
    [("load",), ("load", "late"), ("load", "late", "type")],
    ids=["on load", "within functions too", "in annotations too"],
)
def test_no_modules_import_each_other(kinds: tuple[str, ...]) -> None:
    assert not house.circles(modules(), frozenset(kinds)), (
        "move what both need above both, or describe what the lower one needs by a protocol"
    )


def test_a_small_module_with_one_importer_has_a_reason_to_be_one() -> None:
    found = {name.removeprefix("sublet.") for name, _, _ in house.small(modules())}
    assert found == STAY.keys(), "join it to its importer, or say in STAY why it stays apart; drop what is no longer so"


def test_few_stay() -> None:
    assert len(STAY) <= 20
    assert all(STAY.values())
