"""Sampling defaults of a checkpoint: its generation_config.json, read strictly.

An unsupported field that would change answers is a startup error instead of being ignored. Missing fields are neutral:
library defaults that `generate` would fill in (top_k = 50) do not come from the checkpoint.
Source: transformers.GenerationConfig, of which every field is read here, in NEUTRAL, or listed in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import Fields

FILE = "generation_config.json"

# Unsupported fields that change answers, and the values with which they change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "sequence_bias": ([], {}),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters for fields that a request leaves unset.

    temperature: 0 is greedy. max_new_tokens: None if the checkpoint has no limit.
    """

    vocab_size: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    eos_ids: tuple[int, ...] = ()


def sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """Raises StartupError, with field and value, for an unsupported field or a value out of range."""
    given = checkpoint.read_json(FILE)
    for name, neutral in NEUTRAL.items():
        if name in given and given[name] not in neutral:
            raise StartupError(f"{FILE}: {name} = {given[name]!r} changes answers and is not supported")
    sampled = given.get("do_sample", False)
    if not isinstance(sampled, bool):
        raise given.refusal("do_sample", "true or false")
    temperature = given.number("temperature", 1.0, lambda value: value >= 0, "at least 0")
    return SamplingDefaults(
        vocab_size=(checkpoint.text_config or checkpoint.config).whole("vocab_size"),
        temperature=temperature if sampled else 0.0,
        top_p=given.number("top_p", 1.0, lambda value: 0 < value <= 1, "above 0 and at most 1"),
        top_k=given.whole("top_k", 0, least=0),
        min_p=given.number("min_p", 0.0, lambda value: 0 <= value <= 1, "between 0 and 1"),
        repetition_penalty=given.number("repetition_penalty", 1.0),
        max_new_tokens=given.whole("max_new_tokens") if "max_new_tokens" in given else None,
        eos_ids=_eos_ids(given, checkpoint.config, checkpoint.text_config),
    )


def _eos_ids(*files: Fields) -> tuple[int, ...]:
    """One id or a list of ids, from the first of the files' objects that has them."""
    found = next((each for each in files if "eos_token_id" in each), files[0])
    ids = found.get("eos_token_id", [])
    ids = ids if isinstance(ids, list) else [ids]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise found.refusal("eos_token_id", "token ids")
    return tuple(dict.fromkeys(ids))
