"""GET /openapi.json: valid, with every route, and with schemas that take what the gateway takes."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from starlette.routing import Route, WebSocketRoute

from gridsieve.services.gateway.app import routes
from gridsieve.services.gateway.page import PAGE_ROUTES
from tests.integration.gateway import question, video
from tests.integration.test_gateway_tools import SENT
from tests.integration.test_responses import SAME


@pytest.fixture
def told(http: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = http.get("/openapi.json").raise_for_status().json()
    return document


def test_the_document_is_valid_and_has_every_route_but_those_of_the_page(told: dict[str, Any]) -> None:
    validate(told)
    wanted = set()
    for route in routes(*[Mock(limits=None)] * 10, tokens=None).routes:
        if route not in PAGE_ROUTES:
            assert isinstance(route, Route | WebSocketRoute)
            methods = getattr(route, "methods", None) or {"GET"}
            wanted |= {(route.path_format, method.lower()) for method in methods - {"HEAD"}}
    assert {(path, method) for path, operations in told["paths"].items() for method in operations} == wanted
    open_to_all = {
        path for path, operations in told["paths"].items() if operations.get("get", {}).get("security") == []
    }
    assert {"/health", "/metrics", "/openapi.json"} <= open_to_all
    assert not {path for path in open_to_all if path.startswith("/v1/")}


def test_its_schemas_take_and_refuse_what_the_gateway_does(told: dict[str, Any]) -> None:
    def takes(path: str, body: dict[str, Any]) -> bool:
        schema = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return Draft202012Validator(told | schema).is_valid(body)

    asked = question(video("https://example.org/clip.mp4"), "What?", pruning={"rate": 0.5}, response_format=None)
    assert takes("/v1/chat/completions", asked)
    assert not takes("/v1/chat/completions", asked | {"n_best": 2})
    assert not takes("/v1/chat/completions", asked | {"messages": []})
    assert all(takes("/v1/chat/completions", body) for body in SENT.values())
    assert all(takes("/v1/responses", body) for body, _ in SAME.values())
    assert not takes("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]})
