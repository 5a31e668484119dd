"""Generates the OpenAPI 3.1 document from the route table and the message types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from sublet.office.api.routes import ROUTES, Right, Route
from sublet.wire.http import WIRE_HEADER, WIRE_VERSION, ErrorBody

_REF: Final = "#/components/schemas/{name}"


def openapi_document(version: str) -> dict[str, Any]:
    """The document as JSON-like data; ``version`` is that of the office."""
    messages: list[Any] = [ErrorBody]
    for route in ROUTES:
        messages += [] if route.request is None else [route.request]
        messages += [answer for answer in route.answers.values() if not isinstance(answer, str)]
    schemas, components = msgspec.json.schema_components(messages, ref_template=_REF)
    by_message = dict(zip(map(_key, messages), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_message)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sublet",
            "version": version,
            "summary": "Leases of GPUs, cores, memory and storage: time-bound, fenced, accounted for.",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "accessToken": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "As printed by `sublet tenant add`. On the owner-only socket it may be left out.",
                }
            },
        },
    }


_DESCRIPTION: Final = f"""Sizes are integer bytes, durations are seconds, times are RFC 3339 in UTC; `deadline` is
seconds of CLOCK_BOOTTIME on the office's machine. A client may send its wire version in the header `{WIRE_HEADER}`
(this office: {WIRE_VERSION}) and must be at most one version away. Another tenant's object and no object look the
same. An epoch is a pair of numbers; it is sent with every renewal.""".replace("\n", " ")


def _operation(route: Route, by_message: Mapping[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "tags": [route.path.split("/")[2] if route.path.startswith("/v1/") else "about"],
        "responses": {
            **{str(status): _response(status, answer, by_message) for status, answer in sorted(route.answers.items())},
            "default": {
                "description": "An error: what happened, and what to do now.",
                "content": {"application/json": {"schema": by_message[_key(ErrorBody)]}},
            },
        },
        "security": [] if route.right is Right.OPEN else [{"accessToken": []}],
    }
    if route.right is Right.OPERATOR:
        operation["description"] = "For operators."
    parameters = [
        {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in route.query.items()
    ]
    if "{id}" in route.path:
        described = f"The {route.of}."
        parameters.insert(
            0, {"name": "id", "in": "path", "required": True, "description": described, "schema": {"type": "string"}}
        )
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        content = {"application/json": {"schema": by_message[_key(route.request)]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _response(status: int, answer: Any, by_message: Mapping[str, Any]) -> dict[str, Any]:
    described = {201: "Granted or made.", 202: "A place in the queue.", 409: "Refused, with numbers."}.get(
        status, "Done."
    )
    if isinstance(answer, str):
        schema = {"type": "object"} if answer == "application/json" else {"type": "string"}
        return {"description": described, "content": {answer: {"schema": schema}}}
    return {"description": described, "content": {"application/json": {"schema": by_message[_key(answer)]}}}


def _operation_id(route: Route) -> str:
    words = [route.method.lower(), *(w for w in re.split(r"[^a-z]+", route.path.replace("/v1", "")) if w)]
    return "_".join(words)


def _key(message: Any) -> str:
    """Unions and lists are not all hashable the same way; their text is unique enough within one table."""
    return repr(message)
