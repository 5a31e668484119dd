"""Admission goes by how long something will probably be used, never by its time to live; charged is what was held."""

from __future__ import annotations

import pytest

from sublet.errors import InvalidRequest
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Granted, Place, RefusalCode
from sublet.office.ledger.explain import ReasonKind
from sublet.office.ledger.records import Quota
from tests.unit.office.ledger.bench import ANN, Bench, gpu, seconds


@pytest.fixture
def bench() -> Bench:
    """ANN has ten GPU-seconds, of which six are used."""
    bench = Bench(gpus=2)
    lease = bench.granted(gpu(), tenant=ANN)
    bench.wait(6)
    bench.release(lease)
    bench.do(cmd.SetTenant(tenant=ANN, quota=Quota(gpu_seconds=10)))
    return bench


def test_a_short_use_is_never_refused_for_a_long_time_to_live(bench: Bench) -> None:
    granted = bench.granted(gpu(), tenant=ANN, ttl_s=600, expect_s=3)
    assert granted.expect_ns == seconds(3)


def test_what_would_need_more_than_is_left_is_told_so(bench: Bench) -> None:
    refused = bench.refused(gpu(), tenant=ANN, wait_s=0, expect_s=5)
    assert refused.code is RefusalCode.QUOTA
    assert "6 of 10 GPU-seconds are used" in refused.reason
    assert "expected to need 5" in refused.reason


def test_a_request_that_waits_for_its_device_time_is_told_when_that_limit_resets(bench: Bench) -> None:
    """The same sentence in the queue, in a refusal and in the explanation. It was in the refusal's advice alone."""
    resets = "the limit resets at 1970-01-12 15:03:21 UTC"  # an hour after the first of the six seconds of use
    placed = bench.ask(gpu(), tenant=ANN, expect_s=5)
    assert isinstance(placed, Place)
    assert placed.reason.startswith("6 of 10 GPU-seconds are used in the last 1h, and this is expected to need 5; ")
    assert placed.reason.endswith(resets)
    assert bench.refused(gpu(), tenant=ANN, wait_s=0, expect_s=5).reason == placed.reason
    explained = bench.ledger.explain(placed.lease, bench.now)
    assert [one.text for one in explained.reasons if one.kind is ReasonKind.LIMIT] == [placed.reason]


def test_no_reset_is_told_where_waiting_does_not_help(bench: Bench) -> None:
    placed = bench.ask(gpu(), tenant=ANN, expect_s=50)
    assert isinstance(placed, Place)
    assert "is expected to need 50" in placed.reason
    assert "resets" not in placed.reason


def test_two_devices_need_twice_as_much(bench: Bench) -> None:
    bench.granted(gpu(count=2), tenant=ANN, expect_s=2)
    bench.refused(gpu(count=2), tenant=ANN, wait_s=0, expect_s=3)


def test_without_an_expectation_only_what_was_used_counts(bench: Bench) -> None:
    bench.granted(gpu(), tenant=ANN, ttl_s=600)


def test_once_it_is_held_it_is_renewed_for_as_long_as_there_is_quota(bench: Bench) -> None:
    lease = bench.granted(gpu(), tenant=ANN, ttl_s=10, expect_s=4)
    bench.wait(3)
    assert not isinstance(bench.renew(lease), Exception)
    bench.wait(3)
    assert isinstance(bench.renew(lease), Exception)


def test_an_expectation_that_makes_no_sense_is_refused(bench: Bench) -> None:
    for wrong in (0, -1, 1e10):
        assert isinstance(bench.ask(gpu(), tenant=ANN, expect_s=wrong), InvalidRequest)


def test_it_belongs_to_the_request(bench: Bench) -> None:
    """The same request id with another expectation is another request."""
    bench.ask(gpu(), tenant=ANN, request="r-1", expect_s=1)
    assert isinstance(bench.ask(gpu(), tenant=ANN, request="r-1", expect_s=1), Granted)
    assert isinstance(bench.ask(gpu(), tenant=ANN, request="r-1", expect_s=2), Exception)
