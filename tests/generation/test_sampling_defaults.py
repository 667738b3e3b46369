"""Every field of generation_config.json is honoured, or refused if it would change answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from common.checkpoint import Checkpoint
from common.contract.errors import StartupError
from services.generation.sampling.defaults import HONOURED, NEUTRAL, SamplingDefaults, sampling_defaults

VOCABULARY = 151936

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
    (folder / "model.safetensors").touch()
    (folder / "generation_config.json").write_text(json.dumps(given))
    return Checkpoint(folder)


def defaults_of(folder: Path, **given: Any) -> SamplingDefaults:
    return sampling_defaults(checkpoint_of(folder, given, {}))


def test_every_field_of_transformers_is_honoured_refused_or_listed_as_silent() -> None:
    assert set(vars(GenerationConfig())) == set(HONOURED) | set(NEUTRAL) | set(SILENT.split())


def test_the_defaults_of_transformers_are_neutral(tmp_path: Path) -> None:
    written = GenerationConfig._get_default_generation_params()
    unsupported = {name: value for name, value in written.items() if name in NEUTRAL}
    assert defaults_of(tmp_path, **unsupported) == SamplingDefaults(VOCABULARY)


def test_the_file_of_qwen_is_read(tmp_path: Path) -> None:
    # generation_config.json of Qwen/Qwen2.5-VL-7B-Instruct
    given = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.05,
        "temperature": 0.000001,
        "transformers_version": "4.49.0",
    }
    expected = SamplingDefaults(VOCABULARY, temperature=1e-6, repetition_penalty=1.05, eos_ids=(151645, 151643))
    assert defaults_of(tmp_path, **given) == expected


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
    with pytest.raises(StartupError, match="vocab_size must be at least 1, got None"):
        sampling_defaults(checkpoint_of(tmp_path, {}, {"vocab_size": None}))
