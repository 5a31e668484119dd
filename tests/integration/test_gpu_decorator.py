"""``@sublet.gpu`` with a real office on host devices."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.compute import decorator
from sublet.errors import InvalidRequest
from tests.integration import decorated

PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def home(one_device: Path) -> Path:
    return one_device


@pytest.fixture(autouse=True)
def fabric(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sublet.Fabric]:
    """The office that the functions find; every test begins without a lease."""
    monkeypatch.setenv("SUBLET_HOME", str(home))
    yield decorator._default_fabric()
    decorator._fabrics.pop("").close()
    decorator._pool.clear()


def live(fabric: sublet.Fabric) -> list[str]:
    """Without those of earlier tests that are being taken down."""
    return [view.id for view in fabric.leases() if view.end is None]


def test_a_loop_acquires_once_and_the_lease_stays_idle(fabric: sublet.Fabric) -> None:
    where, square = decorated.where.options(ttl="10m"), decorated.square.options(ttl="10m")  # no renewal is due
    found = [where(n) for n in range(5)]
    assert {pid for pid, _, _ in found} != {os.getpid()}
    assert [count for _, _, count in found] == [1, 2, 3, 4, 5]
    assert found[0][1] == "cpu"
    [lease] = live(fabric)
    assert square(7) == 49
    assert live(fabric) == [lease], "another function with the same terms shares it"
    assert not fabric.lease(lease).renewals


def test_all_kinds_of_functions() -> None:
    assert decorated.nested(3) == 10
    assert list(decorated.numbers(4)) == [0, 1, 2, 3]
    assert decorated.Model(3).times(4) == 12
    assert list(decorated.square.map(range(20))) == [n * n for n in range(20)]
    assert list(decorated.Model(2).times.map([1, 2, 3])) == [2, 4, 6]
    assert decorated.square.submit(5).result(PATIENCE_S) == 25
    assert decorated.awaited.submit(5).result(PATIENCE_S) == 10

    async def program() -> tuple[int, list[str]]:
        return await decorated.awaited(4), [letter async for letter in decorated.letters()]

    assert asyncio.run(program()) == (8, ["a", "b", "c"])


def test_it_looks_like_what_it_decorates() -> None:
    assert decorated.where.__name__ == "where"
    assert "how often" in (decorated.where.__doc__ or "")
    assert list(inspect.signature(decorated.where).parameters) == ["x"]


def test_functions_of_the_caller_go_by_value() -> None:
    factor = 3

    @sublet.gpu(min_vram="64MiB", ttl="20s")
    def times(x: int) -> int:
        return factor * x

    assert times(4) == 12
    factor = 5
    assert times(4) == 20
    assert decorated.Model(2).times.options(ttl="30s")(4) == 8


def test_the_time_to_live_may_depend_on_the_arguments(fabric: sublet.Fabric) -> None:
    asked: list[Any] = []

    def needs(x: int, *, more: int = 0) -> float:
        asked.append((x, more))
        return 100.0 + x

    @sublet.gpu(min_vram="64MiB", ttl=needs)
    def work(x: int, *, more: int = 0) -> int:
        return x + more

    assert work(1, more=2) == 3
    [lease] = live(fabric)
    assert fabric.lease(lease).ttl == 101.0
    assert work(500) == 500
    assert live(fabric) == [lease], "the same one, renewed for longer"
    assert fabric.lease(lease).ttl == 600.0
    assert asked == [(1, 2), (500, 0)]


def test_the_next_call_goes_on_with_the_worker_that_was_parked(
    fabric: sublet.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request takes the idle lease; the process and the state of its modules come back."""
    monkeypatch.setattr(decorator, "END_REPORTED_S", PATIENCE_S)  # on a busy machine the word of it may come late
    where = decorated.where.options(ttl="5m")  # while the other waits for it, it must not run out
    pid, _, count = where()
    with fabric.gpu(min_vram="64MiB", ttl="20s", wait=PATIENCE_S):
        assert [view.id for view in fabric.leases() if view.parks is not None]
    assert where()[::2] == (pid, count + 1)
    assert where()[::2] == (pid, count + 2)


def test_a_parked_worker_that_is_gone_is_replaced(fabric: sublet.Fabric) -> None:
    pid, _, _ = decorated.where.options(ttl="5m")()
    with fabric.gpu(min_vram="64MiB", ttl="20s", wait=PATIENCE_S):
        [parking] = [view.id for view in fabric.leases() if view.parks is not None and view.end is None]
        fabric.request("POST", f"/v1/leases/{parking}/release", {"request_id": "give-up"}, shape=dict)
    assert decorated.where()[0] != pid


def test_an_idle_lease_is_given_back_rather_than_waited_for(fabric: sublet.Fabric) -> None:
    """There is one device, and the second function wants more of it than the first one's lease has."""
    decorated.where.options(ttl="10m")()
    [first] = live(fabric)
    assert decorated.square.options(min_vram="900MiB").submit(3).result(4 * PATIENCE_S) == 9
    assert first not in live(fabric)


@pytest.mark.parametrize("how", ["run", "submit", "generator"])
def test_a_lease_that_ended_is_replaced(fabric: sublet.Fabric, how: str) -> None:
    """Also if word of its end is not here yet: of a lease so young nobody listens to the news."""
    pid, _, _ = decorated.where()
    [lease] = live(fabric)
    fabric.request("POST", f"/v1/leases/{lease}/revoke", {"detail": "for the test"}, shape=dict)
    end_s = time.monotonic() + PATIENCE_S
    while lease in [view.id for view in fabric.leases()]:  # until it is torn down its worker may still begin a call
        assert time.monotonic() < end_s
        time.sleep(0.02)
    if how == "generator":
        assert list(decorated.numbers(4)) == [0, 1, 2, 3]
    else:
        again, _, _ = decorated.where() if how == "run" else decorated.where.submit().result(PATIENCE_S)
        assert again != pid
    assert lease not in live(fabric)


def test_an_idle_lease_runs_out_without_a_word(fabric: sublet.Fabric, caplog: pytest.LogCaptureFixture) -> None:
    """It is meant to; and the next call gets another."""
    work = decorated.square
    for ttl in ("2s", "12s"):  # on a busy machine a short one is over before the call is
        work = decorated.square.options(ttl=ttl)
        with contextlib.suppress(sublet.LeaseEnded):
            assert work(2) == 4
            break
    caplog.clear()
    end_s = time.monotonic() + PATIENCE_S
    while live(fabric):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    assert work.options(ttl="30s")(3) == 9
    assert not caplog.records


def test_what_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InvalidRequest, match="how much memory"):
        sublet.gpu(lambda: None)
    with pytest.raises(TypeError, match="no argument 'tll'; it has count"):
        sublet.gpu(min_vram="1MiB", tll="5s")(len)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="no argument 'tll'"):
        decorated.square.options(tll="5s")
    with pytest.raises(ZeroDivisionError):
        decorated.square.options(ttl="20s").submit("x").exception(PATIENCE_S) and 1 // 0  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        decorated.square("x")  # type: ignore[arg-type]
