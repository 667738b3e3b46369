"""Sampling fields of a request override the checkpoint's defaults, within the limits of the contract."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.contract.errors import InvalidRequest
from framesieve.v1.generation_pb2 import Sampling
from services.generation.rpc.messages import sampling_request
from services.generation.sampling.defaults import SamplingDefaults
from services.generation.sampling.params import SamplingRequest

VOCABULARY = 61
NEUTRAL = SamplingDefaults(VOCABULARY)
OWN = SamplingDefaults(
    VOCABULARY,
    temperature=0.7,
    top_p=0.8,
    top_k=20,
    min_p=0.1,
    repetition_penalty=1.05,
    max_new_tokens=50,
    eos_ids=(3, 4),
)


def test_unset_fields_take_the_checkpoints_defaults() -> None:
    [unset] = SamplingRequest().resolve(OWN, room_tokens=5000)
    assert (unset.temperature, unset.top_p, unset.top_k, unset.min_p) == (0.7, 0.8, 20, 0.1)
    assert (unset.repetition_penalty, unset.presence_penalty, unset.frequency_penalty) == (1.05, 0, 0)
    assert (unset.eos_ids, unset.max_new_tokens, unset.logprobs, unset.top_logprobs) == ((3, 4), 50, False, 0)


def test_set_fields_override_the_checkpoints_defaults() -> None:
    given = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    more = {"presence_penalty": -0.5, "frequency_penalty": 1.5, "seed": 9, "logprobs": True, "top_logprobs": 2}
    [asked] = SamplingRequest(max_new_tokens=60, stop=("x",), **given, **more).resolve(OWN, room_tokens=5000)
    assert {name: getattr(asked, name) for name in given | more} == given | more
    assert (asked.max_new_tokens, asked.stop) == (60, ("x",))


def test_every_field_of_the_message_is_read() -> None:
    given: dict[str, Any] = {
        "max_new_tokens": 60,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "seed": 0,
        "stop": ("x", "y"),
        "logprobs": True,
        "min_p": 0.0,
        "repetition_penalty": 1.5,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "top_logprobs": 20,
        "stop_token_ids": (5, 6),
        "n": 2,
        "ignore_eos": True,
    }
    assert set(given) == set(Sampling.DESCRIPTOR.fields_by_name)
    assert sampling_request(Sampling(**given)) == SamplingRequest(**given)
    assert sampling_request(Sampling()) == SamplingRequest()


@pytest.mark.parametrize(("room_tokens", "expected"), [(5000, 1024), (10, 10)])
def test_the_default_length_is_what_fits_and_at_most_1024(room_tokens: int, expected: int) -> None:
    assert SamplingRequest().resolve(NEUTRAL, room_tokens)[0].max_new_tokens == expected


def test_a_seed_is_drawn_if_none_is_given() -> None:
    assert len({SamplingRequest().resolve(NEUTRAL, 1)[0].seed for _ in range(8)}) == 8


@pytest.mark.parametrize("first", [7, 2**63 - 2])
def test_several_answers_differ_only_in_their_seeds(first: int) -> None:
    asked = SamplingRequest(seed=first, temperature=1.0, n=4)
    answers = asked.resolve(NEUTRAL, 10)
    assert [answer.seed for answer in answers] == [(first + index) % 2**63 for index in range(4)]
    for answer in answers:
        alone = SamplingRequest(seed=answer.seed, temperature=1.0)
        assert alone.resolve(NEUTRAL, 10) == (answer,)


@pytest.mark.parametrize(("ignored", "own"), [(False, (3, 4)), (True, ())])
def test_stop_tokens_add_to_the_end_tokens_of_the_checkpoint(ignored: bool, own: tuple[int, ...]) -> None:
    asked = SamplingRequest(stop_token_ids=(60, 0), ignore_eos=ignored)
    assert asked.resolve(OWN, 10)[0].eos_ids == (*own, 60, 0)


def test_values_at_the_limits_are_accepted() -> None:
    low: dict[str, Any] = {"top_p": 1.0, "min_p": 0.0, "presence_penalty": -2.0, "n": 1, "stop_token_ids": (0,)}
    high: dict[str, Any] = {"temperature": 100.0, "min_p": 1.0, "repetition_penalty": 100.0, "frequency_penalty": 2.0}
    high |= {"logprobs": True, "top_logprobs": 20, "stop": ("x" * 256,) * 16, "n": 16}
    for given in (low, high | {"stop_token_ids": (VOCABULARY - 1,) * 64}):
        SamplingRequest(**given).resolve(NEUTRAL, 10)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", 0, "at least 1, got 0"),
        ("temperature", -0.5, "between 0 and 100, got -0.5"),
        ("temperature", 101.0, "between 0 and 100, got 101.0"),
        ("temperature", math.nan, "between 0 and 100, got nan"),
        ("top_p", 0.0, "above 0 and at most 1, got 0.0"),
        ("top_p", math.nan, "above 0 and at most 1, got nan"),
        ("top_k", -1, "at least 0, got -1"),
        ("min_p", 1.1, "between 0 and 1, got 1.1"),
        ("min_p", math.nan, "between 0 and 1, got nan"),
        ("repetition_penalty", 0.0, "above 0 and at most 100, got 0.0"),
        ("repetition_penalty", math.nan, "above 0 and at most 100, got nan"),
        ("presence_penalty", math.nan, "between -2 and 2, got nan"),
        ("frequency_penalty", -2.1, "between -2 and 2, got -2.1"),
        ("seed", -1, "at least 0, got -1"),
        ("top_logprobs", 21, "between 0 and 20, got 21"),
        ("top_logprobs", 3, "0 without logprobs, got 3"),
        ("n", 0, "between 1 and 16, got 0"),
        ("n", 17, "between 1 and 16, got 17"),
        ("stop", ("x",) * 17, "at most 16 strings, got 17 strings"),
        ("stop", ("",), "1 to 256 characters, got 0 characters"),
        ("stop", ("x" * 257,), "1 to 256 characters, got 257 characters"),
        ("stop_token_ids", (1,) * 65, "at most 64 tokens, got 65 tokens"),
        ("stop_token_ids", (-1,), f"at least 0 and below {VOCABULARY}, got -1"),
        ("stop_token_ids", (VOCABULARY,), f"at least 0 and below {VOCABULARY}, got {VOCABULARY}"),
    ],
)
def test_a_value_out_of_range_is_refused_with_field_limit_and_value(field: str, value: Any, message: str) -> None:
    logprobs = field == "top_logprobs" and value == 21
    with pytest.raises(InvalidRequest, match=rf"^sampling\.{field}(\[0\])? must be {message}$"):
        SamplingRequest(**{"logprobs": logprobs, field: value}).resolve(NEUTRAL, 10)
