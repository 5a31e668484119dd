"""What a tenant is told of the office and of others; and user numbers that two offices of root's give."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import sublet
from sublet.wire.http import StatusView
from tests.security.conftest import Place, office
from tests.traces import until


def is_at_rest(status: StatusView) -> bool:
    """A lease that has ended may have left a slice that is quarantined until it was seen to be clean."""
    return not (status.live or status.quarantined)


def test_the_status_tells_a_tenant_of_nobody_but_itself(place: Place) -> None:
    until("the end of what other tests leased", lambda: is_at_rest(place.owner.status()))
    with place.ana.block("1B"), place.ben.block("1B"), place.owner.block("1B"):
        told, all_of_it = place.ben.status(), place.owner.status()
    assert (told.pid, told.home, told.audit_head) == (0, "", "")
    assert (told.live, told.queued, told.quarantined) == (1, 0, 0)
    assert all_of_it.live == 3
    assert all_of_it.home == str(place.home.resolve())
    assert all_of_it.pid > 0
    assert all_of_it.audit_head
    assert all(len(device.leases) <= 1 for device in told.devices)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's office gives tenants a user number")
def test_two_offices_give_different_user_numbers(place: Place) -> None:
    def number(fabric: sublet.Fabric) -> int:
        with fabric.block("1B") as lease:
            guest = lease.start(["id", "-u"], cwd="/")
            assert guest.wait(timeout=60) == 0
            return int(b"".join(piece.data for piece in guest.output()))

    with office() as other:
        numbers = [number(fabric) for fabric in (place.ana, other.ana, place.ben, other.ben)]
        assert len(set(numbers)) == 4
        assert number(place.ana) == numbers[0]
        file, usual = Path(os.environ["SUBLET_UIDS"]), Path("/etc/sublet/uids")
        assert str(other.home.resolve()) in file.read_text(), "the file that was named divides them"
        assert not usual.exists() or str(other.home.resolve()) not in usual.read_text()


def test_who_shows_no_token_is_told_which_versions_fit_and_no_more(place: Place) -> None:
    told = place.owner.request("GET", "/v1/hello", shape=dict)
    assert told.pop("pid") == 0, "clients of before want the field"
    assert told.pop("studios") is True, "a version has them or not"
    assert sorted(told) == ["version", "wire", "wire_oldest"]
    assert place.owner.status().pid > 0
