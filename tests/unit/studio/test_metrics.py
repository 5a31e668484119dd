"""The studio's numbers for Prometheus, as its own reader finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sublet.studio.metrics import Counted, StudioMetrics
from sublet.studio.service import Condition
from sublet.studio.states import SessionState


class Held:
    """A studio in one condition."""

    def __init__(self, **wrong: str) -> None:
        self.wrong: Mapping[str, str] = wrong

    def condition(self) -> Condition:
        return Condition(
            wrong=self.wrong,
            people=7,
            sessions={SessionState.ACTIVE: 2, SessionState.ENDED: 5},
            unreadable=1,
            waiting=3,
            waiting_max=9,
        )


def read(metrics: StudioMetrics) -> dict[str, float]:
    """Each sample, by name and values of labels."""
    families = text_string_to_metric_families(metrics.page().decode())
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_page_has_the_condition() -> None:
    found = read(StudioMetrics(Held()))
    assert found["sublet_studio_ready"] == 1
    assert {name.rpartition(" ")[2]: value for name, value in found.items() if "_sessions " in name} == {
        state.value: {SessionState.ACTIVE: 2, SessionState.ENDED: 5}.get(state, 0) for state in SessionState
    }
    names = ("people", "unreadable", "waiting", "waiting_max", "open_pages")
    assert [found[f"sublet_studio_{name}"] for name in names] == [7, 1, 3, 9, 0]
    assert read(StudioMetrics(Held(office="it is away")))["sublet_studio_ready"] == 0


def test_answers_are_counted_by_part_and_status_and_an_open_page_is_open_until_it_ends() -> None:
    metrics = StudioMetrics(Held())
    during: list[float] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        during.append(read(metrics)["sublet_studio_open_pages"])
        if scope["path"] == "/v1/fails":
            raise RuntimeError("not foreseen")
        await send({"type": "http.response.start", "status": scope["status"], "headers": []})
        await send({"type": "http.response.body", "body": b""})

    counted = Counted(app, metrics, {})

    async def ask(path: str, status: int) -> None:
        async def send(message: Any) -> None:
            pass

        await counted({"type": "http", "path": path, "status": status}, None, send)  # type: ignore[arg-type]

    async def all_of_them() -> None:
        for path, status in (
            ("/v1/sessions", 200),
            ("/v1/sessions", 404),
            ("/", 200),
            ("/live", 200),
            ("/office/live", 200),
            ("/readyz", 503),
        ):
            await ask(path, status)
        with pytest.raises(RuntimeError):
            await ask("/v1/fails", 0)

    asyncio.run(all_of_them())
    found = read(metrics)
    assert {name: value for name, value in found.items() if "requests_total" in name} == {
        "sublet_studio_requests_total api 2xx": 1,
        "sublet_studio_requests_total api 4xx": 1,
        "sublet_studio_requests_total api 5xx": 1,
        "sublet_studio_requests_total page 2xx": 1,
        "sublet_studio_requests_total live 2xx": 2,
        "sublet_studio_requests_total probe 5xx": 1,
    }
    assert found["sublet_studio_answer_seconds_count"] == 4, "neither open pages nor probes"
    assert during == [0, 0, 0, 1, 1, 0, 0]
    assert found["sublet_studio_open_pages"] == 0
