"""Structured output of a random model, whose free text is no JSON: every answer is a document of its schema."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from gridsieve import GridsieveClient, Video
from gridsieve.client.answer import FinishReason
from gridsieve.client.prompt import Options
from gridsieve.common.contract.errors import InvalidRequest
from tests import media

CLIP = media.clip(8, fps=4)
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "seen": {"enum": ["circle", "square", None]},
            "where": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
                "required": ["x", "sure"],
                "additionalProperties": False,
            },
        },
        "required": ["seen", "where"],
        "additionalProperties": False,
    },
    "long list": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 30, "maxItems": 40},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{3}$"},
    "choice": {"anyOf": [{"const": "yes"}, {"type": "number", "minimum": 0, "maximum": 1}]},
}
SAMPLED = Options(temperature=1.0, seed=3, max_new_tokens=100)


async def test_every_completion_satisfies_its_schema(client: GridsieveClient) -> None:
    options = Options(n=2, seed=1, temperature=1.0, max_new_tokens=400)
    asked = (client.ask(Video(data=CLIP), "What moves?", json_schema=each, **options) for each in SCHEMAS.values())
    for answer, schema in zip(await asyncio.gather(*asked), SCHEMAS.values(), strict=True):
        for choice in answer.choices:
            assert choice.reason is FinishReason.STOP
            jsonschema.validate(json.loads(choice.text), schema)


async def test_an_object_is_json_and_one_that_is_cut_off_its_beginning(client: GridsieveClient) -> None:
    answer = await client.ask(None, "Why?", json_object=True, **SAMPLED)
    if answer.reason is FinishReason.STOP:
        assert isinstance(json.loads(answer.text), dict)
    cut = await client.ask(None, "Why?", json_object=True, **(SAMPLED | {"max_new_tokens": 3}))
    assert cut.reason is FinishReason.LENGTH
    assert answer.text.startswith(cut.text)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (Options(json_schema="{"), "sampling.json_schema is not JSON"),
        (Options(json_schema="[1]"), "sampling.json_schema must be an object"),
        (Options(json_schema={"type": "objectt"}), "cannot be held at its root: Invalid type: objectt"),
        (
            Options(
                json_schema={"type": "object", "properties": {"a": {"items": [{"type": "array", "uniqueItems": True}]}}}
            ),
            "cannot be held at /properties/a",
        ),
        (Options(json_schema=" " * 70_000), "json_schema must be at most 65536 characters, got 70000"),
        (
            Options(json_schema={"type": "object"}, ignore_eos=True),
            "ignore_eos must be false where a document must end",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_schema_that_cannot_be_held_is_refused_with_its_place(
    client: GridsieveClient, options: Options, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await client.ask(None, "Why?", **options)
