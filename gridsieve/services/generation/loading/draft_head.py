"""Loads an EAGLE-3 head from a checkpoint in one of the two published layouts, which differ in more than its name.

    config.json: architectures        LlamaForCausalLMEagle3       Eagle3LlamaForCausalLM
    by, served by                     SpecForge, SGLang            AngelSlim, vLLM
    ids of layers name those whose    output is read               input is read
    which is read                     before deepstack is added    after it was added
    a row has the position of         the next token               its own token

Without ids (`eagle_aux_hidden_state_layer_ids`, by itself or in `eagle_config`) both read the inputs of layers 2, n / 2
and n − 3. Weights have the same names in both, but for the layer, `midlayer` or `layers.0`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gridsieve.common.checkpoint import DRAFTS, Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import Fields
from gridsieve.services.compute.packed_linear import pack_linears
from gridsieve.services.generation.loading.weights import fill, read_weights
from gridsieve.services.generation.model.eagle3 import Eagle3Head, Eagle3Sizes, Rotary
from gridsieve.services.generation.model.language_model import LanguageModel

# Whether ids of layers name those whose output is read, before deepstack, and rows have the next token's position.
LAYOUTS: Mapping[str, bool] = {"LlamaForCausalLMEagle3": True, "Eagle3LlamaForCausalLM": False}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Fields of heads that compute otherwise, in the config or its `eagle_config`.
_UNSUPPORTED = (
    "attention_bias",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "parallel_drafting",
)
# Weights of the head, and those of a checkpoint that are joined to them.
JOINED: Mapping[str, Sequence[str]] = {
    "midlayer.self_attn.qkv_proj.weight": [f"midlayer.self_attn.{each}_proj.weight" for each in "qkv"],
    "midlayer.mlp.gate_up_proj.weight": [f"midlayer.mlp.{each}_proj.weight" for each in ("gate", "up")],
}
_ROPE_TYPES = (None, "default", "mrope")
_EMBEDDING = "embed_tokens."


def load_draft_head(checkpoint: Checkpoint, model: LanguageModel) -> Eagle3Head:
    """The head of a checkpoint, in the dtype and on the device of `model`, whose embedding it reads unless it has one.

    From now on it reads every forward of the text model.

    Raises StartupError for another architecture or kind of head, missing or unknown weights, sizes other than the
    model's, and a model that cannot be drafted for.
    """
    if not model.position_axes:
        raise StartupError("--draft-model: models that read no positions are not supported")
    checkpoint = replace(checkpoint, option=DRAFTS)
    sizes = draft_sizes(checkpoint.config, model)
    with torch.device("meta"):
        head = Eagle3Head(sizes)
    own = read_weights(checkpoint, _EMBEDDING, model.dtype, model.device, {})
    exact = {"d2t": torch.int64}
    weights = read_weights(checkpoint, "", model.dtype, model.device, {}, exact, _named)
    if sizes.vocab == model.vocab_size:
        weights.setdefault("d2t", torch.zeros(sizes.vocab, dtype=torch.int64, device=model.device))
    for joined, names in JOINED.items():
        parts = [weights.get(name, torch.empty(())) for name in names]
        if len({each.shape[1:] for each in parts}) == 1 and parts[0].ndim == 2:
            weights[joined] = torch.cat([weights.pop(name) for name in names])
    try:
        fill(head, weights, "")
    except StartupError as error:
        raise StartupError(f"--draft-model: {error}") from error
    targets = head.d2t + torch.arange(sizes.vocab, device=model.device)
    if int(targets.min()) < 0 or int(targets.max()) >= model.vocab_size:
        raise StartupError(
            f"--draft-model: d2t names tokens {int(targets.min())} to {int(targets.max())}, the model has "
            f"{model.vocab_size}"
        )
    if own:
        table = own["weight"]
        if table.shape[0] < model.vocab_size or table.shape[1] != sizes.hidden:
            raise StartupError(f"--draft-model: embed_tokens.weight is {list(table.shape)}, which is not the model's")
        if not torch.equal(table[: model.vocab_size], model.embed_tokens.weight[: model.vocab_size]):
            head.embed_tokens = nn.Embedding.from_pretrained(table)
    head.prepare(model.device)
    pack_linears(head)
    head.read(model.text)
    return head.train(False).requires_grad_(False)


def draft_sizes(written: Mapping[str, Any], model: LanguageModel) -> Eagle3Sizes:
    """Of a head's config. Raises StartupError, with the field, for what is not supported or is not the model's."""
    config = Fields("config.json", written)
    architecture = str(next(iter(config.get("architectures", ())), None))
    if architecture not in LAYOUTS:
        raise StartupError(f"--draft-model: architectures must be one of {', '.join(LAYOUTS)}, got {architecture!r}")
    eagle = config.part("eagle_config")
    for name in _UNSUPPORTED:
        if config.get(name) or eagle.get(name):
            raise StartupError(f"--draft-model: {name} is not supported")
    if config.get("num_hidden_layers", 1) != 1:
        raise StartupError(f"--draft-model: num_hidden_layers must be 1, got {config['num_hidden_layers']}")
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    for name in ("hidden_size", "target_hidden_size"):
        if config.get(name, model.hidden_size) != model.hidden_size:
            raise StartupError(f"--draft-model: {name} is {config[name]}, the model's is {model.hidden_size}")
    text: Any = model.text
    head_dim, rotary = config.whole("head_dim", hidden // heads), _rotary(config)
    if rotary.sections and 2 * sum(rotary.sections) != head_dim:
        raise StartupError(
            f"--draft-model: mrope_section {list(rotary.sections)} does not add up to half of {head_dim}"
        )
    return Eagle3Sizes(
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        layers=_layers(config.get(_LAYER_IDS) or eagle.get(_LAYER_IDS), LAYOUTS[architecture], len(text.layers)),
        before_levels=LAYOUTS[architecture],
        ahead=LAYOUTS[architecture],
        axes=3 if rotary.sections else 1,
        hidden=hidden,
        intermediate=config.whole("intermediate_size"),
        vocab=config.whole("draft_vocab_size", model.vocab_size),
        eps=config.number("rms_norm_eps", 1e-6),
        activation=config.get("hidden_act", "silu"),
        rotary=rotary,
    )


def _layers(ids: Any, of_outputs: bool, layers: int) -> tuple[int, ...]:
    """The layers whose input is read."""
    if not ids:
        return (2, layers // 2, layers - 3)
    found = tuple(int(each) + of_outputs for each in ids)
    if not all(0 <= each <= layers for each in found):
        raise StartupError(f"--draft-model: {_LAYER_IDS} {list(ids)} names layers that the model, of {layers}, lacks")
    return found


def _rotary(config: Fields) -> Rotary:
    rope = config.part("rope_parameters") or config.part("rope_scaling")
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in _ROPE_TYPES:
        raise StartupError(f"--draft-model: rope_scaling.rope_type {kind!r} is not supported")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    sections, interleaved = tuple(rope.get("mrope_section") or ()), bool(rope.get("mrope_interleaved"))
    return Rotary(theta, sections, interleaved)


def _named(name: str) -> str | None:
    if name == "t2d" or name.startswith(_EMBEDDING):
        return None
    return name.replace("layers.0.", "midlayer.")
