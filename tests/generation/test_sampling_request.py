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
    [unset] = SamplingRequest().resolve(OWN, limit_tokens=5000)
    assert (unset.temperature, unset.top_p, unset.top_k, unset.min_p) == (0.7, 0.8, 20, 0.1)
    assert (unset.repetition_penalty, unset.presence_penalty, unset.frequency_penalty) == (1.05, 0, 0)
    assert (unset.eos_ids, unset.max_new_tokens, unset.logprobs, unset.top_logprobs) == ((3, 4), 50, False, 0)


def test_set_fields_override_the_checkpoints_defaults() -> None:
    given = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    more = {"presence_penalty": -0.5, "frequency_penalty": 1.5, "seed": 9, "logprobs": True, "top_logprobs": 2}
    [asked] = SamplingRequest(max_new_tokens=60, stop=("x",), **given, **more).resolve(OWN, limit_tokens=5000)
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


def test_an_n_of_0_is_not_taken_for_unset() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.n must be between 1 and 16, got 0"):
        sampling_request(Sampling(n=0))


@pytest.mark.parametrize(("limit_tokens", "expected"), [(5000, 1024), (10, 10)])
def test_the_default_length_is_what_fits_and_at_most_1024(limit_tokens: int, expected: int) -> None:
    assert SamplingRequest().resolve(NEUTRAL, limit_tokens)[0].max_new_tokens == expected


def test_a_seed_is_drawn_if_none_is_given() -> None:
    seeds = {SamplingRequest().resolve(NEUTRAL, 1)[0].seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


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


@pytest.mark.parametrize("token_id", [-1, VOCABULARY])
def test_a_stop_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    message = rf"^sampling.stop_token_ids\[1\] must be at least 0 and below {VOCABULARY}, got {token_id}$"
    with pytest.raises(InvalidRequest, match=message):
        SamplingRequest(stop_token_ids=(5, token_id)).resolve(NEUTRAL, 10)


def test_values_at_the_limits_are_accepted() -> None:
    low: dict[str, Any] = {"top_p": 1.0, "min_p": 0.0, "presence_penalty": -2.0, "n": 1}
    high: dict[str, Any] = {"temperature": 100.0, "min_p": 1.0, "repetition_penalty": 100.0, "frequency_penalty": 2.0}
    high |= {"logprobs": True, "top_logprobs": 20, "stop": ("x" * 256,) * 16, "n": 16}
    for given in (low, high | {"stop_token_ids": (VOCABULARY - 1,) * 64}):
        SamplingRequest(**given).resolve(NEUTRAL, 10)


REFUSED = {
    "max_new_tokens": ("at least 1", [0]),
    "temperature": ("between 0 and 100", [-0.5, 101.0, math.nan]),
    "top_p": ("above 0 and at most 1", [0.0, math.nan]),
    "top_k": ("at least 0", [-1]),
    "min_p": ("between 0 and 1", [-0.1, 1.1, math.nan]),
    "repetition_penalty": ("above 0 and at most 100", [0.0, 100.5, math.nan]),
    "presence_penalty": ("between -2 and 2", [2.1, math.nan]),
    "frequency_penalty": ("between -2 and 2", [-2.1, math.inf]),
    "seed": ("at least 0", [-1]),
    "top_logprobs": ("between 0 and 20", [21, -1]),
    "n": ("between 1 and 16", [0, 17]),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_number_out_of_range_is_refused_with_field_limit_and_value(field: str) -> None:
    limit, values = REFUSED[field]
    for value in values:
        given: dict[str, Any] = {"logprobs": True, field: value}
        with pytest.raises(InvalidRequest, match=f"^sampling.{field} must be {limit}, got {value}$"):
            SamplingRequest(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop": ("x",) * 17}, "stop must be at most 16 strings, got 17 strings"),
        ({"stop": ("x", "")}, r"stop\[1\] must be 1 to 256 characters, got 0 characters"),
        ({"stop": ("x" * 257,)}, r"stop\[0\] must be 1 to 256 characters, got 257 characters"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids must be at most 64 tokens, got 65 tokens"),
        ({"top_logprobs": 3}, "top_logprobs must be 0 without logprobs, got 3"),
    ],
)
def test_too_many_or_too_long_stops_and_top_logprobs_alone_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^sampling.{message}$"):
        SamplingRequest(**given)
