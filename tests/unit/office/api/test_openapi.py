"""The OpenAPI document is valid, complete, and says what the routes say."""

from __future__ import annotations

import json
from typing import Any, Final

from sublet.errors import RenewalRefusal
from sublet.office.api.openapi import openapi_document
from sublet.office.api.routes import ROUTES, Right
from tests.unit.office.api.bench import bench, run

DOCUMENT: Final[dict[str, Any]] = json.loads(json.dumps(openapi_document("1.2.3")))


def test_it_is_a_valid_document_of_version_3_1() -> None:
    """As a validator that is not ours sees it."""
    from openapi_spec_validator import OpenAPIV31SpecValidator  # every process of the suite would load it otherwise

    OpenAPIV31SpecValidator(DOCUMENT).validate()
    assert DOCUMENT["openapi"].startswith("3.1")
    assert DOCUMENT["info"]["version"] == "1.2.3"


def test_every_route_is_in_it_and_nothing_else() -> None:
    """With its request, its answers and its parameters."""
    described = {(method.upper(), path) for path, one in DOCUMENT["paths"].items() for method in one}
    assert described == {(route.method, route.path) for route in ROUTES}
    for route in ROUTES:
        one = DOCUMENT["paths"][route.path][route.method.lower()]
        assert ("requestBody" in one) == (route.request is not None)
        assert set(one["responses"]) == {str(status) for status in route.answers} | {"default"}
        names = {parameter["name"] for parameter in one.get("parameters", ())}
        assert names == set(route.query) | ({"id"} if "{id}" in route.path else set())
        assert one["security"] == ([] if route.right is Right.OPEN else [{"accessToken": []}])


def test_operations_have_names_that_are_their_own() -> None:
    """Generators of clients make functions of them."""
    ids = [one["operationId"] for path in DOCUMENT["paths"].values() for one in path.values()]
    assert len(set(ids)) == len(ids)
    assert all(name.isidentifier() for name in ids)


def test_no_schema_is_left_dangling() -> None:
    """Every reference leads to a component."""
    text = json.dumps(DOCUMENT)
    names = {piece.split('"')[0] for piece in text.split("#/components/schemas/")[1:]}
    assert names <= set(DOCUMENT["components"]["schemas"])


def test_the_office_hands_it_out_to_everybody() -> None:
    """Without a token, also where there is no local rule."""

    async def story() -> None:
        async with bench(local_rule=False) as b:
            answer = await b.ask("GET", "/openapi.json")
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
            assert answer.json["paths"].keys() == DOCUMENT["paths"].keys()

    run(story)


def test_the_words_of_a_refused_renewal_are_in_it() -> None:
    """A client in another language finds them where it finds the field."""
    reason = DOCUMENT["components"]["schemas"]["ErrorView"]["properties"]["reason"]
    assert all(word in json.dumps(reason) for word in RenewalRefusal)
