"""Another model, offered where the one that was asked for is not free."""

from __future__ import annotations

import msgspec
import pytest

from sublet.errors import InvalidRequest
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Granted, Offer, Place
from sublet.office.ledger.bills import Rates
from sublet.office.ledger.budgets import prices_record
from sublet.office.ledger.records import LeaseRecord, Want
from sublet.values import GIB, Exclusivity, Tier
from tests.unit.office.ledger.bench import ANN, BEN, Bench, device, gpu, inventory

PRICES = Rates(currency="EUR", gpu=1, models={"NVIDIA A100": 2_000_000, "Tesla T4": 500_000})


def office(a100: int = 1, t4: int = 1) -> Bench:
    """Cards of two models; the larger ones are taken by Ben."""
    large = [device(f"n1/a{n}", model="NVIDIA A100", capacity=40 * GIB) for n in range(a100)]
    small = [device(f"n2/t{n}", model="Tesla T4", capacity=16 * GIB) for n in range(t4)]
    bench = Bench(inventory("n1", *large), inventory("n2", *small))
    bench.do(cmd.SetPrices(prices=prices_record(PRICES)))
    for _ in range(a100):
        bench.granted(gpu(40), tenant=BEN, ttl_s=540)
    return bench


def offer(bench: Bench, *wants: Want, **how: object) -> Offer:
    answer = bench.ask(*wants, **how)  # type: ignore[arg-type]
    assert isinstance(answer, Offer), answer
    return answer


@pytest.mark.parametrize("other", ["*", "T4", "L4|t4"])
def test_another_model_that_is_free_is_offered_with_time_and_price(other: str) -> None:
    """16 GiB on the A100 in about nine minutes; on a T4 now, at a quarter of the price."""
    bench = office()
    found = offer(bench, gpu(16, model="A100", other=other), tenant=ANN)
    assert (found.model, found.requested, found.offered) == ("Tesla T4", 16 * GIB, 16 * GIB)
    assert found.prices == (500_000, 2_000_000)
    assert found.currency == "EUR"
    assert found.estimate_ns is not None
    assert 540 <= found.estimate_ns / 1e9 <= 550
    again = bench.ask(gpu(16, model="A100", other=other), tenant=ANN, request=found.lease.request_id, lease="again")
    assert again == found
    claimed = bench.claim(found.lease)
    assert isinstance(claimed, Granted)
    assert claimed.lease.status is LeaseStatus.ACTIVE


def test_a_part_is_compared_with_the_same_amount_of_the_other_card() -> None:
    bench = office()
    found = offer(bench, gpu(8, model="A100", other="*", exclusivity=Exclusivity.SHARED), tenant=ANN)
    assert found.prices == (250_000, 400_000), "half of a T4, a fifth of an A100"


def test_who_says_no_waits_for_what_was_asked_and_is_not_offered_it_again() -> None:
    bench = office()
    found = offer(bench, gpu(16, model="A100", other="*"), tenant=ANN)
    answer = bench.do(cmd.Decline(tenant=ANN, lease=found.lease.id)).answer
    assert isinstance(answer, Place)
    assert "GPU (A100)" in answer.reason
    bench.wait(600)
    lease = bench.state.leases[found.lease.id]
    assert [part.resource for part in lease.parts] == ["n1/a0"]


def test_an_offer_that_runs_out_leaves_the_request_in_the_line() -> None:
    bench = office()
    found = offer(bench, gpu(16, model="A100", other="*"), tenant=ANN)
    bench.wait(31)
    assert bench.state.leases[found.lease.id].status is LeaseStatus.QUEUED


def test_what_was_asked_for_goes_first_and_a_smaller_offer_last() -> None:
    both = gpu(16, model="A100", other="*", least=1)
    free = office(a100=0)
    free.do(cmd.NodeUp(inventory=inventory("n3", device("n3/a", model="NVIDIA A100"))))
    assert free.granted(both, tenant=ANN).parts[0].resource == "n3/a"
    bench = office()
    assert offer(bench, both, tenant=ANN).model == "Tesla T4"
    part = Bench(
        inventory("n1", device("n1/a", model="NVIDIA A100"), device("n1/t", model="Tesla T4", capacity=4 * GIB))
    )
    part.granted(gpu(10, exclusivity=Exclusivity.SHARED, model="A100"), tenant=ANN)
    less = offer(part, gpu(16, model="A100", other="*", least=1, exclusivity=Exclusivity.SHARED), tenant=ANN)
    assert (less.model, less.offered) == (None, 6 * GIB)


def test_a_model_that_is_nowhere_is_no_refusal_for_who_takes_another() -> None:
    """It is what is waited for, and at its turn it is an offer: a no ends the request."""
    bench = office()
    found = offer(bench, gpu(16, model="H200", other="T4"), tenant=ANN)
    assert (found.model, found.prices, found.estimate_ns) == ("Tesla T4", None, None)
    waiting = bench.queued(gpu(16, model="H200", other="T4"), tenant=BEN)
    bench.do(cmd.Decline(tenant=ANN, lease=found.lease.id))
    ended = bench.state.leases[found.lease.id]
    assert ended.end is not None
    assert ended.end.reason is EndReason.WITHDRAWN
    bench.wait(1)
    then: LeaseRecord = bench.state.leases[waiting.id]
    assert (then.status, then.offered) == (LeaseStatus.GRANTED, True)
    assert "no device here is called 'H200'" in bench.refused(gpu(16, model="H200"), tenant=ANN).reason


def test_a_refusal_names_what_would_fit() -> None:
    refused = office().refused(gpu(16, model="A100"), tenant=ANN, wait_s=0)
    assert refused.do == 'Wait in line for it, or ask for model="Tesla T4", which is free now.'
    bench = office(t4=0)
    assert "model=" not in bench.refused(gpu(16, model="A100"), tenant=ANN, wait_s=0).do


@pytest.mark.parametrize(
    ("want", "said"),
    [
        (gpu(16, other="*"), "or_model needs a model"),
        (gpu(16, model="A100", other="T4||L4"), "one of the models in 'T4||L4' is empty"),
    ],
)
def test_what_makes_no_sense_is_refused(want: Want, said: str) -> None:
    answer = office().ask(want, tenant=ANN)
    assert isinstance(answer, InvalidRequest)
    assert said in answer.message


@pytest.mark.parametrize(("tier", "resource"), [(Tier.INTERACTIVE, "n2/t0"), (Tier.BATCH, "n1/a0")])
def test_interactive_work_can_have_the_cheapest_cards_first(tier: Tier, resource: str) -> None:
    """As long as it fits there; two cards that are not alike do where no two of one model are free."""
    large = device("n1/a0", model="NVIDIA A100", capacity=12 * GIB)
    both_models = [device(f"n3/{model}", model=model) for model in ("NVIDIA A100", "Tesla T4")]
    bench = Bench(
        inventory("n1", large), inventory("n2", device("n2/t0", model="Tesla T4")), inventory("n3", *both_models)
    )
    bench.do(cmd.SetPrices(prices=prices_record(PRICES)))
    both = bench.granted(gpu(16, count=2), tenant=BEN)
    assert {part.resource for part in both.parts} == {"n3/NVIDIA A100", "n3/Tesla T4"}
    bench.ledger.set_policy(msgspec.structs.replace(bench.policy, cheapest_first=True))
    assert bench.granted(gpu(12), tenant=ANN, tier=tier).parts[0].resource == resource
    assert bench.granted(gpu(12), tenant=ANN, tier=tier).parts[0].resource != resource
