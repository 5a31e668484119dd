"""Two tenants and every route: what is not mine does not exist for me.

The matrix is made from the route table itself, with the rule of the local socket off, so a route that is added tomorrow
is in it. For each route and each way of not being allowed the answer is a no; and where an id is named, the id of
another tenant's object and an id that never was are answered alike, to the byte.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pytest

from sublet.office.access import new_token, token_hash
from sublet.office.api.routes import ROUTES, Right, Route
from sublet.office.ledger.commands import AddTenant, DisableTenant
from sublet.values import GIB, MIB, TenantId
from sublet.wire.http_views import SESSION_LABEL
from tests.unit.office.api.bench import Answer, Bench, bench, exchange, run

ANN, BOB, ROOT, STUDIO = (new_token(bytes([n]) * 32) for n in (1, 2, 3, 4))
NEVER_WAS: Final = "l-0123456789abcdef"

NOBODIES: Final = {
    "no token": None,
    "garbage": "garbage",
    "a token nobody has": new_token(b"\x09" * 32),
    "a token that was taken back": new_token(b"\x08" * 32),
    "a capability token": "capability",  # replaced by a real one of ann's lease
    "the hash of a token": token_hash(ANN),
}


@dataclass
class Office:
    """An office with two tenants, an operator, and a lease of ann's in every state that can be addressed."""

    bench: Bench
    leases: dict[str, str]
    capability: str

    async def ask(
        self, route: Route, token: str | None, *, of: str = "", body: Any = None, for_tenant: str = ""
    ) -> Answer:
        path = route.path.replace("{id}", of)
        payload = example(route) if body is None else body
        gone = asyncio.Event()
        gone.set()  # nobody waits for the end of a stream here
        pieces = [b"" if payload is None else msgspec.json.encode(payload)]
        headers = [(b"sublet-for-tenant", for_tenant.encode())] if for_tenant else []
        return await exchange(self.bench.app, route.method, path, pieces, token=token, headers=headers, gone=gone)


def example(route: Route) -> Any:
    """A well-formed message for a route, made from its type, so that nothing is refused for its form."""
    if route.request is None:
        return None
    given: dict[str, Any] = {
        "request_id": "example",
        "wants": [{"kind": "gpu", "amount": GIB}],
        "epoch": [1, 1],
        "items": [],
        "active": True,
        "path": "/nowhere/at/all",
        "request": {"request_id": "examples", "wants": [{"kind": "memory", "amount": MIB}]},
        "count": 2,
        "labels": {},
        "id": "example",
        "group": "default",
        "gpus": 1,
        "when": "every Tue 10:00-12:00",
        "zone": "UTC",
        "text": "[tenant]\nleases = 9",
    }
    fields = {field.name: field for field in msgspec.structs.fields(route.request)}
    needed = {name for name, field in fields.items() if field.required}
    unknown = needed - given.keys()
    assert not unknown, f"{route.request.__name__} needs {unknown}: say here what a good value is"
    return {name: given[name] for name in needed}


async def furnish(b: Bench) -> Office:
    for name, token, operator in (("ann", ANN, False), ("bob", BOB, False), ("root", ROOT, True)):
        await b.driver.submit(AddTenant(tenant=TenantId(name), token_hash=token_hash(token), operator=operator))
    await b.driver.submit(AddTenant(tenant=TenantId("page"), token_hash=token_hash(STUDIO), studio=True))
    removed = NOBODIES["a token that was taken back"]
    assert removed is not None
    await b.driver.submit(AddTenant(tenant=TenantId("gone"), token_hash=token_hash(removed)))
    changed = await b.ask("PATCH", "/v1/tenants/gone", {"new_token": True}, token=ROOT)
    assert changed.status == 200

    async def acquire(request: str, **more: Any) -> Any:
        return await b.acquire(ANN, request_id=request, **more)

    active = await acquire("active", token=True)
    ended = await acquire("ended")
    await b.ask("POST", f"/v1/leases/{ended['lease']['id']}/release", {}, token=ANN)
    await b.pass_time("1s")
    shared = [{"kind": "gpu", "amount": 3 * GIB, "exclusivity": "shared"}]
    await acquire("filler", wants=shared)
    smaller = [{"kind": "gpu", "amount": 2 * GIB, "least": GIB >> 1, "exclusivity": "shared"}]
    offered = await acquire("offered", wants=smaller)
    queued = await acquire("queued")
    leases = {
        "active": active["lease"]["id"],
        "ended": ended["lease"]["id"],
        "offered": offered["lease"]["id"],
        "queued": queued["lease"]["id"],
    }
    exam = {"id": "exam", "group": "default", "gpus": 1, "when": "2100-01-04 10:00-12:00", "zone": "UTC"}
    assert (await b.ask("POST", "/v1/reservations", exam, token=ROOT)).status == 201
    await b.volume(ANN, "ann-live", live=True)
    await b.volume(ANN, "ann-kept")
    states = {name: str(b.driver.ledger.state.leases[lease].status) for name, lease in leases.items()}
    assert states == {"active": "active", "ended": "ended", "offered": "granted", "queued": "queued"}
    return Office(b, leases, active["token"])


def name_of(route: Route) -> str:
    return f"{route.method} {route.path}"


GUARDED: Final = [route for route in ROUTES if route.right is not Right.OPEN]
OF_OPERATORS: Final = [route for route in ROUTES if route.right is Right.OPERATOR]
OF_A_LEASE: Final = [route for route in ROUTES if route.of == "lease" and route.right is Right.TENANT]
OF_A_VOLUME: Final = [route for route in ROUTES if route.of == "volume"]
VOLUMES: Final = ("ann-live", "ann-kept")


def test_who_is_nobody_gets_the_same_no_on_every_route() -> None:
    """No token, garbage, unknown, taken back, a capability token, a hash: 401, whatever is asked about."""

    async def story() -> None:
        async with bench(local_rule=False) as b:
            office = await furnish(b)
            for route in GUARDED:
                before = b.driver.commits
                for what, token in NOBODIES.items():
                    shown = office.capability if what == "a capability token" else token
                    bodies = set()
                    for of in (*office.leases.values(), NEVER_WAS) if route.of else ("",):
                        answer = await office.ask(route, shown, of=of)
                        assert answer.status == 401, f"{what} on {name_of(route)}: {answer.status} {answer.body!r}"
                        assert answer.error["kind"] == "Unauthorized"
                        bodies.add((answer.body, tuple(sorted(answer.headers.items()))))
                    assert len(bodies) == 1, f"{what} can tell objects apart on {name_of(route)}"
                assert b.driver.commits == before, "somebody without rights changed something"

    run(story)


def test_a_tenant_is_no_operator() -> None:
    """Also for its own lease; and the answer does not say whether the object exists."""

    async def story() -> None:
        async with bench(local_rule=False) as b:
            office = await furnish(b)
            for route in OF_OPERATORS:
                before = b.driver.commits
                objects = {"lease": [*office.leases.values(), NEVER_WAS], "tenant": ["ann", "bob", "none"]}
                objects |= {"node": ["n1", "none"], "group": ["default", "none"], "reservation": ["exam", "none"]}
                for token in (ANN, BOB):
                    answers = [
                        await office.ask(route, token, of=of) for of in (objects[route.of] if route.of else [""])
                    ]
                    assert {answer.status for answer in answers} == {401}, name_of(route)
                    assert len({answer.body for answer in answers}) == 1, name_of(route)
                assert b.driver.commits == before, name_of(route)

    run(story)


def test_another_tenants_lease_and_no_lease_are_answered_alike() -> None:
    """Status, headers and body are equal but for the id that was asked for; and nothing happened."""

    async def story() -> None:
        async with bench(local_rule=False) as b:
            office = await furnish(b)
            for route in OF_A_LEASE:
                before = b.driver.commits
                unknown = await office.ask(route, BOB, of=NEVER_WAS)
                assert unknown.status == 404, f"{name_of(route)}: {unknown.body!r}"
                for state, lease in office.leases.items():
                    other = await office.ask(route, BOB, of=lease)
                    assert other.status == unknown.status, f"{name_of(route)} gives {state} away by its status"
                    assert other.headers == unknown.headers, f"{name_of(route)} gives {state} away by its headers"
                    assert other.body == unknown.body.replace(NEVER_WAS.encode(), lease.encode())
                assert b.driver.commits == before, name_of(route)

    run(story)


def test_another_tenants_lease_is_as_unknown_with_a_query_or_an_epoch_that_fits() -> None:
    """Knowing the right epoch, or waiting for a change, opens nothing either."""

    async def story() -> None:
        async with bench(local_rule=False) as b:
            office = await furnish(b)
            for route in OF_A_LEASE:
                lease = b.driver.ledger.state.leases[office.leases["active"]]  # type: ignore[index]
                body = example(route)
                if isinstance(body, dict) and "epoch" in body:
                    body["epoch"] = list(lease.epoch or ())
                query = "?" + "&".join(f"{name}=1" for name in route.query) if route.query else ""
                asked = []
                for of in (lease.id, NEVER_WAS):
                    pieces = [b"" if body is None else msgspec.json.encode(body)]
                    path = route.path.replace("{id}", of) + query
                    answer = await exchange(b.app, route.method, path, pieces, token=BOB)
                    asked.append((answer.status, answer.body.replace(of.encode(), b"ID")))
                assert asked[0] == asked[1], name_of(route)
                assert asked[0][0] == 404, name_of(route)

    run(story)


def test_another_tenants_volume_and_no_volume_are_answered_alike() -> None:
    """By its name, whoever's it is said to be; what is no name at all is no volume either. Nothing happened."""

    async def story() -> None:
        async with bench(local_rule=False) as b:
            office = await furnish(b)
            for route in OF_A_VOLUME:
                before = b.driver.commits
                for query in ("", "?tenant=bob", "?tenant=ann", "?tenant=nobody"):
                    path = route.path + query
                    unknown = await exchange(b.app, route.method, path.replace("{id}", "none"), [b""], token=BOB)
                    assert unknown.status == 404, f"{path}: {unknown.body!r}"
                    for name in (*VOLUMES, *BAD_NAMES):
                        other = await exchange(b.app, route.method, path.replace("{id}", name), [b""], token=BOB)
                        assert (other.status, other.headers["content-type"]) == (
                            404,
                            unknown.headers["content-type"],
                        ), name
                        if name in VOLUMES:
                            assert other.body == unknown.body.replace(b"none", name.encode())
                assert b.driver.commits == before, name_of(route)
                assert set(b.driver.ledger.state.volumes) == {f"ann/{name}" for name in VOLUMES}
                assert office.leases

    run(story)


BAD_NAMES: Final = ("%C3%9Cn%C3%AF", "%2e%2e%2fann-kept", "ann%2fann-kept", "x" * 5000, "%20")


LISTS: Final = [route for route in ROUTES if route.right is Right.TENANT and not route.of and route.request is None]


@pytest.mark.parametrize("route", LISTS, ids=name_of)
def test_no_list_or_stream_tells_of_another_tenant(route: Route) -> None:
    """Whatever parameters are given: neither the ids of ann's leases nor her name reach bob."""

    async def story() -> None:
        async with bench(local_rule=False) as b:
            office = await furnish(b)
            for query in queries(route, office):
                gone = asyncio.Event()
                heard: list[bytes] = []
                asking = asyncio.ensure_future(
                    exchange(b.app, route.method, route.path + query, [b""], token=BOB, gone=gone, on_body=heard.append)
                )
                await asyncio.sleep(0)
                await b.ask("POST", f"/v1/leases/{office.leases['active']}/activity", renewal(b, office), token=ANN)
                gone.set()
                answer = await asking
                told = (answer.body + b"".join(heard)).decode().replace(query, "")
                for secret in (*office.leases.values(), *VOLUMES, "ann"):
                    asked = secret in query  # an error may repeat what was asked for
                    assert asked or not re.search(rf"\b{secret}\b", told), f"{route.path}{query} tells of {secret}"
                if answer.status == 200 and "lease=" in query:
                    pytest.fail(f"{route.path}{query} was answered")

    run(story)


def renewal(b: Bench, office: Office) -> dict[str, object]:
    lease = b.driver.ledger.state.leases[office.leases["active"]]  # type: ignore[index]
    return {"epoch": list(lease.epoch or ()), "active": True, "busy": 1}


def queries(route: Route, office: Office) -> Iterator[str]:
    yield ""
    values = {"all": "1", "tenant": "ann", "lease": office.leases["active"], "by": "tenant", "format": "csv"}
    for name in route.query:
        yield f"?{name}={values.get(name, '2020-01-01T00:00:00Z')}"
    if "tenant" in route.query:
        yield "?all=1&tenant=ann"


def test_renewals_of_another_tenant_are_unknown_among_ones_own() -> None:
    """The one route that names leases in its message: foreign and unknown ids have the same error."""

    async def story() -> None:
        async with bench(local_rule=False) as b:
            office = await furnish(b)
            epoch = list(b.driver.ledger.state.leases[office.leases["active"]].epoch or ())  # type: ignore[index]
            items = [{"lease": lease, "epoch": epoch} for lease in (*office.leases.values(), NEVER_WAS)]
            answer = await b.ask("POST", "/v1/renewals", {"items": items}, token=BOB)
            assert answer.json["items"] == [None] * len(items)
            shapes = {
                json.dumps(error).replace(item["lease"], "ID")  # type: ignore[arg-type]
                for error, item in zip(answer.json["errors"], items, strict=True)
            }
            assert len(shapes) == 1
            assert json.loads(shapes.pop())["kind"] == "NotFound"

    run(story)


def test_a_request_id_of_another_tenant_is_ones_own() -> None:
    """Bob uses the request id that ann used: he gets a lease of his own, not hers, and no conflict."""

    async def story() -> None:
        async with bench(local_rule=False) as b:
            office = await furnish(b)
            wants = [{"kind": "memory", "amount": 4096}]
            answer = await b.ask("POST", "/v1/leases", {"request_id": "active", "wants": wants}, token=BOB)
            assert answer.status == 201
            assert answer.json["lease"]["tenant"] == "bob"
            assert answer.json["lease"]["id"] not in office.leases.values()

    run(story)


# ---- a studio, which is neither tenant nor operator

SHOWN: Final = {
    "status",
    "leases",
    "leases/{id}",
    "leases/{id}/explain",
    "queue",
    "tenants",
    "tenants/{id}",
    "groups",
} | {
    "reservations",
    "fences",
    "bill",
    "bill/neighbours",
    "connections",
    "events",
    "metrics",
}
"""What a studio reads of all tenants (GET)."""
DONE_FOR_A_TENANT: Final = {
    *(f"GET /v1/{name}" for name in ("status", "leases", "leases/{id}", "leases/{id}/explain", "bill", "events")),
    *(f"POST /v1/{name}" for name in ("leases", "renewals", "releases")),
    *(f"POST /v1/leases/{{id}}/{verb}" for verb in ("claim", "decline", "renew", "activity", "release", "attach")),
    "POST /v1/leases/{id}/unbind",
}


def test_a_studio_reads_what_it_shows_acts_on_sessions_and_has_no_other_route() -> None:
    """In its own name and for a tenant. A refusal does not say whether the object exists, and changes nothing. A lease
    that is no session's, also the tenant's own, is answered as one that never was."""

    async def story() -> None:
        async with bench(local_rule=False) as b:
            office = await furnish(b)
            for route in GUARDED:
                before = b.driver.commits
                objects = {
                    "lease": [*office.leases.values(), NEVER_WAS],
                    "tenant": ["ann", "page", "none"],
                    "volume": [*VOLUMES, "none"],
                    "node": ["n1", "none"],
                    "group": ["default", "none"],
                    "reservation": ["exam", "none"],
                }.get(route.of, [""])
                own = [await office.ask(route, STUDIO, of=of) for of in objects]
                reads = route.method == "GET" and route.path.removeprefix("/v1").removeprefix("/") in SHOWN
                assert {answer.status == 401 for answer in own} == {not reads}, (
                    name_of(route),
                    [answer.body for answer in own],
                )
                for tenant in ("ann", "bob"):
                    acting = [await office.ask(route, STUDIO, of=of, for_tenant=tenant) for of in objects]
                    acts = name_of(route) in DONE_FOR_A_TENANT
                    assert {answer.status == 401 for answer in acting} == {
                        not acts or (route.path == "/v1/leases" and route.method == "POST")
                    }
                    if route.of == "lease" and acts:
                        told = {
                            answer.body.replace(of.encode(), b"ID") for answer, of in zip(acting, objects, strict=True)
                        }
                        assert ({answer.status for answer in acting}, len(told)) == ({404}, 1), name_of(route)
                    elif not acts:
                        assert len({answer.body for answer in acting}) == 1, name_of(route)
                if not reads:
                    assert len({answer.body for answer in own}) == 1, name_of(route)
                for tenant in ("page", "none", "gone/../ann"):
                    assert (await office.ask(route, STUDIO, of=objects[0], for_tenant=tenant)).status == 401, (
                        tenant,
                        name_of(route),
                    )
                assert b.driver.commits == before, name_of(route)

    run(story)


def test_a_studio_acquires_and_keeps_leases_of_sessions_and_gets_no_token_with_them() -> None:
    """The lease is the tenant's; the records name both. Of another tenant's session it knows nothing in this name."""

    async def story() -> None:
        async with bench(local_rule=False, gpus=2) as b:
            for name, token, studio in (("ann", ANN, False), ("bob", BOB, False), ("page", STUDIO, True)):
                await b.driver.submit(AddTenant(tenant=TenantId(name), token_hash=token_hash(token), studio=studio))

            async def ask(method: str, path: str, body: Any = None, tenant: str = "ann") -> Answer:
                headers = [(b"sublet-for-tenant", tenant.encode())]
                return await b.ask(method, path, body, token=STUDIO, headers=headers)

            good: dict[str, Any] = {
                "request_id": "one",
                "wants": [{"kind": "gpu", "amount": GIB}],
                "labels": {SESSION_LABEL: "s-1"},
            }
            before = b.driver.commits
            bad: list[dict[str, Any]] = [
                {"labels": {}},
                {"labels": {SESSION_LABEL: ""}},
                {"token": True},
                {"wants": [{"kind": "block", "amount": GIB}], "name": "ann-live"},
                {"wants": [*good["wants"], {"kind": "block", "amount": GIB}]},
                {"wants": [{"kind": "memory", "amount": GIB}]},
                {"wants": [], "resume": NEVER_WAS},
                {"replaces": NEVER_WAS},
            ]
            for wrong in bad:
                answer = await ask("POST", "/v1/leases", good | wrong)
                assert answer.status == 401, (wrong, answer.body)
            assert b.driver.commits == before
            assert (await b.ask("POST", "/v1/leases", good, token=STUDIO)).status == 401, "it has no leases of its own"
            granted = await ask("POST", "/v1/leases", good)
            assert (granted.status, granted.json.get("token"), granted.json["lease"]["tenant"]) == (201, None, "ann")
            path, epoch = f"/v1/leases/{granted.json['lease']['id']}", granted.json["lease"]["epoch"]
            for verb, body in (("renew", {"epoch": epoch}), ("attach", {"request_id": "a"}), ("claim", {})):
                assert (await ask("POST", f"{path}/{verb}", body | {"token": True})).status == 401, verb
                assert (await ask("POST", f"{path}/{verb}", body, tenant="bob")).status == 404, verb
            attached = await ask("POST", f"{path}/attach", {"request_id": "a"})
            epoch = attached.json["lease"]["epoch"]
            assert (attached.status, attached.json.get("token")) == (200, None)
            item = {"lease": path.rpartition("/")[2], "epoch": epoch}
            plain = {"request_id": "own", "wants": good["wants"]}
            own = (await b.ask("POST", "/v1/leases", plain, token=ANN)).json["lease"]
            for verb, body in (("renew", {"epoch": own["epoch"]}), ("release", {"request_id": "r"})):
                answer = await ask("POST", f"/v1/leases/{own['id']}/{verb}", body)
                assert answer.status == 404, "a lease of the same tenant that is no session's"
            many = [await ask("POST", "/v1/renewals", {"items": [item]}, tenant=one) for one in ("ann", "bob")]
            assert [answer.status for answer in many] == [200, 404]
            page = b.service.access.caller(b"Bearer " + STUDIO.encode())
            stream = b.service.hub.open(b.service.access.acting_for(page, b"ann"), None, everything=False)
            released = await ask("POST", f"{path}/release", {"request_id": "r"})
            assert released.status == 200
            batches = [event for batch in b.journal.batches for event in batch]
            actors = {getattr(event, "by", None) for event in batches if getattr(event, "lease", None) == item["lease"]}
            assert "tenant:ann (for it: page)" in actors
            closed = [stream.closed]
            await b.driver.submit(DisableTenant(tenant=TenantId("page")))
            assert [*closed, stream.closed] == [False, True], "what was opened with its token is cut"
            assert (await b.ask("GET", "/v1/queue", token=STUDIO)).status == 401
            assert (await ask("GET", "/v1/leases")).status == 401

    run(story)


def test_a_studio_is_one_from_its_start_and_never_an_operator() -> None:
    async def story() -> None:
        async with bench() as b:
            assert (await b.ask("POST", "/v1/tenants", {"id": "x", "studio": True, "operator": True})).status == 400
            made = await b.ask("POST", "/v1/tenants", {"id": "page", "studio": True})
            assert made.json["tenant"]["studio"] is True
            assert (await b.ask("POST", "/v1/tenants", {"id": "ann"})).json["tenant"]["studio"] is False
            for name, change in (("page", {"operator": True}), ("page", {"studio": False}), ("ann", {"studio": True})):
                assert (await b.ask("PATCH", f"/v1/tenants/{name}", change)).status == 400, change
            again = await b.ask("PATCH", "/v1/tenants/page", {"new_token": True, "studio": True})
            assert (await b.ask("GET", "/v1/queue", token=made.json["token"])).status == 401, "revoked"
            assert (await b.ask("GET", "/v1/queue", token=again.json["token"])).status == 200
            assert (await b.ask("GET", "/v1/hello")).json["studios"] is True

    run(story)


def test_the_matrix_has_every_route() -> None:
    """What is open to everybody is so on purpose, and is listed here by name."""
    assert {name_of(route) for route in ROUTES if route.right is Right.OPEN} == {"GET /v1/hello", "GET /openapi.json"}
    assert {route.of for route in ROUTES} <= {"", "lease", "tenant", "group", "reservation", "node", "volume"}


def test_the_owner_of_the_matrix_may_do_what_others_may_not() -> None:
    """The same requests succeed for ann or the operator, so the refusals above are about rights and nothing else."""

    async def story() -> None:
        for route in GUARDED:
            async with bench(local_rule=False, gpus=2) as b:
                office = await furnish(b)
                token = ROOT if route.right is Right.OPERATOR else ANN
                of = {
                    "lease": office.leases["active"],
                    "tenant": "ann",
                    "node": "n1",
                    "volume": "ann-kept",
                    "group": "default",
                    "reservation": "exam",
                }.get(route.of, "")
                if route.path.endswith(("/claim", "/decline")):
                    of = office.leases["offered"]
                body = example(route)
                if isinstance(body, dict) and "epoch" in body:
                    epoch = b.driver.ledger.state.leases[of].epoch  # type: ignore[index]
                    body["epoch"] = list(epoch or ())
                answer = await office.ask(route, token, of=of, body=body)
                allowed = answer.status < 300 or (route.path, answer.status) in EXPECTED
                assert allowed, f"{name_of(route)}: {answer.status} {answer.body!r}"

    run(story)


EXPECTED: Final = {
    ("/v1/groups", 400),  # without a name
    ("/v1/groups/{id}/remove", 400),  # the default group is always there
    ("/v1/tenants/{id}/enable", 400),  # it is not disabled
    ("/v1/tenants/{id}/remove", 400),  # it has leases
    ("/v1/tenants", 400),  # a tenant without a name
    ("/v1/budgets", 400),  # of neither a tenant nor a group
    ("/v1/budgets/credit", 400),
    ("/v1/budgets/remove", 400),
    ("/v1/fences/clear", 404),  # no resource was named
    ("/v1/down", 400),  # leases live
    ("/v1/policy/apply", 501),  # this office has no file
    ("/v1/backup", 401),  # allowed in one folder only, which this office has not: see test_office_http
}
"""Well-formed, allowed, and refused for another reason than rights."""
