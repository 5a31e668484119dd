"""A new access token, a disabled tenant: what was opened before is closed, and what was signed before opens nothing."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from typing import Any

import pytest

import sublet
from sublet.client.address import Address, find_address
from sublet.client.guests import list_guests
from sublet.client.line import connect_data
from sublet.errors import InvalidRequest, NotFound, SubletError, Unauthorized
from sublet.values import MIB
from tests.security.conftest import Place


def post(fabric: sublet.Fabric, path: str, body: object = None, method: str = "POST") -> Any:
    return fabric.request(method, path, {} if body is None else body, shape=dict)


def new_tenant(place: Place, name: str) -> str:
    token: str = post(place.owner, "/v1/tenants", {"id": name})["token"]
    return token


def address_of(place: Place, token: str) -> Address:
    return find_address(None, token, str(place.home), os.environ, as_tenant=True)


def capability_of(fabric: sublet.Fabric, lease: str) -> str:
    token: str = fabric.request("GET", f"/v1/leases/{lease}/token", shape=dict)["token"]
    return token


def lease_of(fabric: sublet.Fabric) -> str:
    """As a program without our client asks: nothing is renewed or released by itself."""
    body = {
        "request_id": secrets.token_hex(8),
        "wants": [{"kind": "memory", "amount": 64 * MIB}],
        "ttl": 600,
        "renew": "never",
    }
    found: str = post(fabric, "/v1/leases", body)["lease"]["id"]
    return found


def shown(place: Place, lease: str) -> Any:
    return place.owner.request("GET", f"/v1/leases/{lease}?wait=30&after=ending", shape=dict)["lease"]


def test_a_capability_token_of_before_the_rotation_opens_nothing(place: Place) -> None:
    token = new_tenant(place, "rotated")
    with place.connect(token) as thief:
        lease = lease_of(thief)
        address, capability = address_of(place, token), capability_of(thief, lease)
        with connect_data(address, capability):
            pass  # it opens connections, until now
        fresh = post(place.owner, "/v1/tenants/rotated", {"new_token": True}, "PATCH")["token"]
        with pytest.raises(Unauthorized):
            connect_data(address, capability)
        with pytest.raises(Unauthorized):
            list_guests(address, lease, ended=False)
    with place.connect(fresh) as fabric:
        with connect_data(address_of(place, fresh), capability_of(fabric, lease)):
            pass  # the lease is its tenant's still, and the tenant goes on with it
        post(fabric, f"/v1/leases/{lease}/release")


def test_a_connection_of_before_the_rotation_is_cut(place: Place) -> None:
    token = new_tenant(place, "cut")
    with place.connect(token) as thief:
        lease = lease_of(thief)
        with connect_data(address_of(place, token), capability_of(thief, lease)) as conversation:
            post(place.owner, "/v1/tenants/cut", {"new_token": True}, "PATCH")
            assert is_cut(conversation)
    post(place.owner, f"/v1/leases/{lease}/revoke")


def is_cut(conversation: Any) -> bool:
    """Whether the other side ends it, which happens in the background."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            conversation.call(b"{}", timeout_s=10)
        except InvalidRequest:
            continue  # that message was none
        except SubletError:
            return True
    return False


def test_what_an_operator_opened_for_a_tenant_is_cut_when_the_operators_token_is_replaced(place: Place) -> None:
    """The tenant's own connections stay."""
    own, operators = new_tenant(place, "served"), post(place.owner, "/v1/tenants", {"id": "otto", "operator": True})
    with place.connect(own) as tenant:
        lease = lease_of(tenant)
        address = address_of(place, own)
        acting = sublet.connect(home=place.home, token=operators["token"], as_tenant=True, for_tenant="served")
        with acting as thief:
            capability = capability_of(thief, lease)
            with (
                connect_data(address, capability) as conversation,
                connect_data(address, capability_of(tenant, lease)) as tenants_own,
            ):
                post(place.owner, "/v1/tenants/otto", {"new_token": True}, "PATCH")
                assert is_cut(conversation)
                with pytest.raises(InvalidRequest):
                    tenants_own.call(b"{}", timeout_s=10)
            with pytest.raises(Unauthorized):
                connect_data(address, capability)
            with pytest.raises(Unauthorized):
                capability_of(thief, lease)
        with connect_data(address, capability_of(tenant, lease)):
            pass
        post(tenant, f"/v1/leases/{lease}/release")


def test_a_disabled_tenant_has_no_rights_and_its_leases_end(place: Place) -> None:
    token = new_tenant(place, "gone")
    with place.connect(token) as fabric:
        lease = lease_of(fabric)
        capability = capability_of(fabric, lease)
        assert post(place.owner, "/v1/tenants/gone/disable", {"notice": False})["disabled"]
        with pytest.raises(Unauthorized):
            lease_of(fabric)
    with pytest.raises(Unauthorized):
        connect_data(address_of(place, token), capability)
    ended = shown(place, lease)
    assert (ended["status"], ended["end"]["reason"]) == ("ended", "operator")
    assert "gone was disabled" in ended["end"]["detail"]
    with pytest.raises(InvalidRequest, match="is disabled"):
        post(place.owner, "/v1/tenants/gone", {"new_token": True}, "PATCH")
    with place.connect(post(place.owner, "/v1/tenants/gone/enable")["token"]) as fabric:
        lease = lease_of(fabric)
        with pytest.raises(InvalidRequest, match="still has 1 lease"):
            post(place.owner, "/v1/tenants/gone/remove")
        with pytest.raises(InvalidRequest, match="is not disabled"):
            post(place.owner, "/v1/tenants/gone/enable")
        post(fabric, f"/v1/leases/{lease}/release")


def test_a_tenant_with_nothing_left_is_removed_and_its_bill_stays(place: Place) -> None:
    def tenant(*words: str) -> subprocess.CompletedProcess[str]:
        return place.command("tenant", *words)

    token = tenant("add", "brief").stdout.strip()
    with place.connect(token) as fabric:
        lease = lease_of(fabric)
        found = tenant("rm", "brief")
        assert (found.returncode, "still has 1 lease" in found.stderr) == (2, True), found
        assert "brief (disabled)" not in tenant("ls").stdout
        assert tenant("disable", "brief", "--now").returncode == 0
        assert "brief (disabled)" in tenant("ls").stdout
        assert shown(place, lease)["status"] == "ended"
        assert tenant("rm", "brief").returncode == 0
        with pytest.raises(Unauthorized):
            lease_of(fabric)
    with pytest.raises(NotFound):
        place.owner.request("GET", "/v1/tenants/brief", shape=dict)
    lines = place.owner.request("GET", "/v1/bill?by=tenant", shape=list)
    assert any(line["tenant"] == "brief" for line in lines), lines
    assert tenant("add", "brief").stdout.strip() not in ("", token)
    assert tenant("disable", "local").returncode == 2
