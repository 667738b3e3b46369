"""Sampling fields of a request override the checkpoint's generation_config.json; both are read strictly."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.services.generation.answers.messages import sampling_request
from gridsieve.services.generation.sampling.defaults import NEUTRAL, SamplingDefaults, sampling_defaults
from gridsieve.services.generation.sampling.params import SamplingRequest
from gridsieve.v1.generation_pb2 import GenerateRequest, Sampling
from gridsieve.v1.prompt_pb2 import Prompt, Tool

VOCABULARY = 151936

READ = "do_sample temperature top_p top_k min_p repetition_penalty max_new_tokens eos_token_id"
# Fields of transformers that do not change the tokens of a plain `generate`: names, formats, caches, assistant models.
SILENT = """
_from_model_config assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind
bos_token_id cache_config cache_implementation compile_config continuous_batching_config decoder_start_token_id
disable_compile early_stopping is_assistant length_penalty low_memory max_cache_len max_length
max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states
output_logits output_scores pad_token_id prefill_chunk_size prompt_lookup_num_tokens renormalize_logits
return_dict_in_generate speculation_type target_lookbehind transformers_version use_cache use_mtp
"""


def checkpoint_of(folder: Path, given: dict[str, Any], config: dict[str, Any]) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, **config}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # without tensors
    (folder / "generation_config.json").write_text(json.dumps(given))
    return Checkpoint(folder)


def defaults_of(folder: Path, **given: Any) -> SamplingDefaults:
    return sampling_defaults(checkpoint_of(folder, given, {}))


def test_every_field_of_transformers_is_honoured_refused_or_listed_as_silent() -> None:
    assert set(vars(GenerationConfig())) == set(READ.split()) | set(NEUTRAL) | set(SILENT.split())


def test_the_defaults_of_transformers_are_neutral(tmp_path: Path) -> None:
    written = GenerationConfig._get_default_generation_params()
    unsupported = {name: value for name, value in written.items() if name in NEUTRAL}
    assert defaults_of(tmp_path, **unsupported) == SamplingDefaults(VOCABULARY)


def test_without_do_sample_answers_are_greedy_whatever_the_temperature(tmp_path: Path) -> None:
    given = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1}
    assert defaults_of(tmp_path, **given).temperature == 0
    expected = SamplingDefaults(VOCABULARY, temperature=0.7, top_p=0.8, top_k=20, min_p=0.1)
    assert defaults_of(tmp_path, do_sample=True, **given) == expected
    assert defaults_of(tmp_path, do_sample=True).temperature == 1


@pytest.mark.parametrize(
    ("given", "config", "ids"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 3}, (7,)),
        ({}, {"eos_token_id": [7, 9, 7]}, (7, 9)),
        ({}, {"text_config": {"vocab_size": 9, "eos_token_id": 4}}, (4,)),
        ({"eos_token_id": None}, {"eos_token_id": None, "text_config": {"vocab_size": 9, "eos_token_id": 5}}, (5,)),
    ],
)
def test_end_tokens_come_from_config_json_if_the_file_has_none(
    tmp_path: Path, given: dict[str, Any], config: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert sampling_defaults(checkpoint_of(tmp_path, given, config)).eos_ids == ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_beams", 4),
        ("do_sample", "yes"),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 2.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("eos_token_id", [1, None]),
    ],
)
def test_a_value_that_is_not_supported_is_a_startup_error(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(StartupError, match=field):
        defaults_of(tmp_path, **{field: value})
    assert defaults_of(tmp_path, **{field: None}) == SamplingDefaults(VOCABULARY)


def test_the_vocabulary_is_that_of_the_language_model(tmp_path: Path) -> None:
    assert sampling_defaults(checkpoint_of(tmp_path, {}, {"text_config": {"vocab_size": 9}})).vocab_size == 9
    with pytest.raises(StartupError, match="lacks vocab_size"):
        sampling_defaults(checkpoint_of(tmp_path, {}, {"vocab_size": None}))


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
        "min_new_tokens": 9,
        "logit_bias": {5: -100.0, 0: 0.5},
        "bad_words": ("x", "y"),
        "attention": True,
    }
    ending = {"json_object", "json_schema", "moments", "max_thinking_tokens"}  # not with ignore_eos
    assert set(given) == set(Sampling.DESCRIPTOR.fields_by_name) - ending
    assert sampling_request(GenerateRequest(sampling=Sampling(**given))) == SamplingRequest(**given)
    for fields, schema in (({"json_object": True}, '{"type": "object"}'), ({"json_schema": "{}"}, "{}")):
        request = GenerateRequest(sampling=Sampling(**fields))
        assert sampling_request(request) == SamplingRequest(json_schema=schema)
    assert sampling_request(GenerateRequest()) == SamplingRequest()


def test_too_many_tools_are_refused_before_they_are_read() -> None:
    request = GenerateRequest(prompt=Prompt(tools=[Tool(name="a")] * 2**18))
    begun = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"^prompt\.tools must be at most 512 tools, got 262144$"):
        sampling_request(request)
    assert time.thread_time() - begun < 0.1


@pytest.mark.parametrize(("limit_tokens", "expected"), [(5000, 1024), (10, 10)])
def test_the_default_length_is_what_fits_and_at_most_1024(limit_tokens: int, expected: int) -> None:
    assert SamplingRequest().resolve(SamplingDefaults(VOCABULARY), limit_tokens)[0].max_new_tokens == expected


def test_a_seed_is_drawn_if_none_is_given() -> None:
    assert len({SamplingRequest().resolve(SamplingDefaults(VOCABULARY), 1)[0].seed for _ in range(8)}) == 8


@pytest.mark.parametrize("first", [7, 2**63 - 2])
def test_several_answers_differ_only_in_their_seeds(first: int) -> None:
    asked = SamplingRequest(seed=first, temperature=1.0, n=4)
    answers = asked.resolve(SamplingDefaults(VOCABULARY), 10)
    assert [answer.seed for answer in answers] == [(first + index) % 2**63 for index in range(4)]
    for answer in answers:
        alone = SamplingRequest(seed=answer.seed, temperature=1.0)
        assert alone.resolve(SamplingDefaults(VOCABULARY), 10) == (answer,)


@pytest.mark.parametrize(("ignored", "own"), [(False, (3, 4)), (True, ())])
def test_stop_tokens_add_to_the_end_tokens_of_the_checkpoint(ignored: bool, own: tuple[int, ...]) -> None:
    asked = SamplingRequest(stop_token_ids=(60, 0), ignore_eos=ignored)
    assert asked.resolve(OWN, 10)[0].eos_ids == (*own, 60, 0)


def test_bad_words_leave_out_end_tokens_and_tokens_that_the_model_lacks() -> None:
    asked = SamplingRequest(stop_token_ids=(60,))
    spelt = [(5,), (4,), (5, 60), (60, 5), (5, VOCABULARY), (VOCABULARY - 1,)]
    assert asked.resolve(OWN, 10, bad_words=spelt)[0].bad_words == ((5,), (60, 5), (VOCABULARY - 1,))


def test_values_at_the_limits_are_accepted() -> None:
    low: dict[str, Any] = {"top_p": 1.0, "min_p": 0.0, "presence_penalty": -2.0, "n": 1, "stop_token_ids": (0,)}
    low |= {"min_new_tokens": 10, "logit_bias": dict.fromkeys(range(1024), -100.0)}
    high: dict[str, Any] = {"temperature": 100.0, "min_p": 1.0, "repetition_penalty": 100.0, "frequency_penalty": 2.0}
    high |= {"logprobs": True, "top_logprobs": 20, "stop": ("x" * 256,) * 16, "n": 16}
    high |= {"logit_bias": {VOCABULARY - 1: 100.0}, "bad_words": ("x" * 256,) * 64}
    for given in (low, high | {"stop_token_ids": (VOCABULARY - 1,) * 64}):
        SamplingRequest(**given).resolve(SamplingDefaults(VOCABULARY), 10)


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
        ("min_new_tokens", -1, "at least 0, got -1"),
        ("min_new_tokens", 11, r"at most 10, got 11; raise sampling\.max_new_tokens"),
        ("logit_bias", {0: 100.5}, "between -100 and 100, got 100.5"),
        ("logit_bias", {0: math.nan}, "between -100 and 100, got nan"),
        ("logit_bias", {VOCABULARY: 1.0}, f"of tokens at least 0 and below {VOCABULARY}, got {VOCABULARY}"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "of at most 1024 tokens, got 1025 tokens"),
        ("bad_words", ("x",) * 65, "at most 64 strings, got 65 strings"),
        ("bad_words", ("",), "1 to 256 characters, got 0 characters"),
    ],
)
def test_a_value_out_of_range_is_refused_with_field_limit_and_value(field: str, value: Any, message: str) -> None:
    logprobs = field == "top_logprobs" and value == 21
    with pytest.raises(InvalidRequest, match=rf"^sampling\.{field}(\[0\])? must be {message}$"):
        SamplingRequest(**{"logprobs": logprobs, field: value}).resolve(SamplingDefaults(VOCABULARY), 10)


def test_a_document_has_no_least_length() -> None:
    message = r"^sampling\.min_new_tokens must be 0 where a document ends by itself, got 3$"
    with pytest.raises(InvalidRequest, match=message):
        SamplingRequest(json_schema="{}", min_new_tokens=3)
