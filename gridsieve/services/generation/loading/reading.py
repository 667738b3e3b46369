"""Makes the language model of an embedder or a reranker read prompts."""

from __future__ import annotations

from dataclasses import replace

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.loading.text_family import TextFamily
from gridsieve.services.generation.loading.weights import read_weights
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.reading import Reading, YesOverNo

_OUTPUT = "lm_head.weight"


def reader_of(checkpoint: Checkpoint, family: TextFamily, model: LanguageModel) -> LanguageModel:
    """The model with the output layer of the checkpoint's task. Raises StartupError if its family lacks such models."""
    how = next((each for each in family.readings if each.task == checkpoint.task), None)
    if how is None:
        raise StartupError(
            f"{checkpoint.option} {checkpoint.folder} is a model to {checkpoint.task}, by its modules.json or its name:"
            f" not supported for the model_type {checkpoint.model_type}"
        )
    head = nn.Identity() if checkpoint.task == "embed" else _yes_over_no(checkpoint, family, how, model)
    return replace(model, lm_head=head, reads=how)


def _yes_over_no(checkpoint: Checkpoint, family: TextFamily, how: Reading, model: LanguageModel) -> nn.Module:
    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    rows = [tokenizer.token_to_id(word) for word in (how.yes, how.no)]
    if None in rows:
        raise StartupError(f"{checkpoint.folder}/tokenizer.json has no tokens {how.yes!r} and {how.no!r}")
    yes, no = _output_weights(checkpoint, family, model)[rows]
    return YesOverNo(yes, no).to(model.device)


def _output_weights(checkpoint: Checkpoint, family: TextFamily, model: LanguageModel) -> Tensor:
    """Those of the output layer, on the host: its own or, where they are tied, the embedding's. [vocab_size, D]."""
    names = [_OUTPUT]
    if checkpoint.config.get("tie_word_embeddings"):
        names += [f"{prefix}embed_tokens.weight" for prefix in family.prefixes]
    for name in names:
        if found := read_weights(checkpoint, name, model.dtype, torch.device("cpu"), {}):
            return found[""]
    raise StartupError(f"missing weights ['{names[-1]}'], of which the score is made")
