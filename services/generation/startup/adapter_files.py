"""Loads LoRA adapters from folders in PEFT's format and checks config and weights.

    layers.3.self_attn.q_proj   ◀─   base_model.model.model.language_model.layers.3.self_attn.q_proj.lora_A.weight
    the text model's own name        any prefix of the model that was trained

PEFT parses the files and decides which layers a config targets. Weights must be safetensors: nothing is unpickled. A
config field that would change the result and is not implemented here is refused, by adapter, field and value.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import structlog
import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from framesieve.common.contract.errors import StartupError
from framesieve.common.contract.plan import tagged_digest
from framesieve.services.compute.int4_linear import Int4Linear
from framesieve.services.generation.model.adapters import AdaptedLinear, LowRank
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.parallel.group import Group
from framesieve.services.generation.parallel.sharding import part
from framesieve.services.generation.request.request import Adapter
from framesieve.services.generation.settings import AdapterFolder

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_DOMAIN = b"framesieve adapter v1"
_KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_IN_TEXT = re.compile(r"(?P<before>(?:(?:model|language_model|llm)\.)*)(?P<name>layers\.\d+\..+)")
# Fields that describe an adapter's origin or training. PEFT ignores fan_in_fan_out for linear layers.
_WITHOUT_EFFECT = {
    *("peft_type", "peft_version", "auto_mapping", "task_type", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config", "lora_dropout", "fan_in_fan_out", "ensure_weight_tying", "qalora_group_size"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
# Values of init_lora_weights that leave the base weights unchanged; the others would alter them.
_PLAIN_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")

log = structlog.get_logger()


class _Computed(BaseModel):
    """Types of the LoraConfig fields that are implemented here; LoraConfig itself accepts any value."""

    model_config = ConfigDict(strict=True, from_attributes=True)

    r: PositiveInt
    lora_alpha: FiniteFloat
    use_rslora: bool
    rank_pattern: dict[str, PositiveInt] | None
    alpha_pattern: dict[str, FiniteFloat] | None
    target_modules: str | set[str] | None
    exclude_modules: str | set[str] | None
    layers_to_transform: list[int] | int | None
    layers_pattern: list[str] | str | None


def load_adapters(folders: Sequence[AdapterFolder], model: LanguageModel, group: Group | None = None) -> None:
    """Adds adapters to a model that has none. Raises StartupError, with the adapter's name, for an unsupported one.

    group: of the ranks of a sharded model, each of which loads all adapters.
    """
    if not folders:
        return
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise StartupError("--adapters needs PEFT, which is not installed: pip install 'framesieve[lora]'") from error
    modules = dict(model.text.named_modules())
    assert not any(isinstance(each, AdaptedLinear) for each in modules.values()), "the model has adapters already"
    layers = {name: each for name, each in modules.items() if hasattr(each, "in_features")}
    digests: list[bytes] = []
    for folder in folders:
        try:
            digest, additions = _read(folder, peft, layers, model, group)
        except re.error as error:
            raise folder.refusal(f"{CONFIG_FILE}: {error.pattern!r} is not a regular expression: {error}") from error
        except (OSError, RecursionError, OverflowError) as error:  # the last two from parsing JSON or patterns
            raise folder.refusal(str(error)) from error
        adapter = Adapter(folder.name, digest)
        model.adapters.add(adapter, model.text, additions)
        digests.append(digest)
        ranks = sorted({addition.down.shape[0] for addition in additions.values()})
        facts = {"adapter": adapter.name, "digest": adapter.digest.hex()[:12], "path": str(folder.path)}
        log.info("adapter loaded", **facts, layers=len(additions), ranks=ranks)
    if group and not group.agree(int.from_bytes(tagged_digest(_DOMAIN, digests)[:7])):
        raise StartupError("--adapters: the ranks have read different files")


def _read(
    folder: AdapterFolder, peft: Any, layers: Mapping[str, nn.Module], model: LanguageModel, group: Group | None
) -> tuple[bytes, dict[str, LowRank]]:
    """An adapter's digest, and its additions by names of layers in the text model."""
    config = _read_config(folder, peft)
    weights, before = _by_layer(folder, _read_weights(folder, peft, model.device), layers)
    _check_targets(folder, config, weights, {name: before + name for name in layers})
    additions = {
        name: _of_rank(_addition(folder, config, before + name, layers[name], sides, model.dtype), layers[name], group)
        for name, sides in weights.items()
    }
    return _digest(folder), additions


def _read_config(folder: AdapterFolder, peft: Any) -> Any:
    """PEFT's LoraConfig. Raises StartupError for an invalid file and for fields that are not implemented here."""
    path = folder.path / CONFIG_FILE
    if not path.is_file():
        raise folder.refusal(f"the folder has no {CONFIG_FILE}")
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        kind = given["peft_type"]
    except (ValueError, TypeError, KeyError) as error:
        raise folder.refusal(f"{CONFIG_FILE} is not a JSON object with a peft_type: {error}") from error
    if kind != "LORA":
        raise folder.refusal(f"{CONFIG_FILE}: peft_type = {kind!r} is not supported, only 'LORA'")
    known = {field.name for field in fields(peft.LoraConfig)}
    for name, value in given.items():
        if name not in known and value:
            raise folder.refusal(f"{CONFIG_FILE}: {name} = {value!r} is not known to PEFT {peft.__version__}")
    plain = peft.LoraConfig()
    for name in known & given.keys() - _Computed.model_fields.keys() - _WITHOUT_EFFECT:
        allowed = _PLAIN_INITIALISATIONS if name == "init_lora_weights" else (getattr(plain, name), None, False, [], {})
        if given[name] not in allowed:
            raise folder.refusal(f"{CONFIG_FILE}: {name} = {given[name]!r} is not supported")
    try:
        config = peft.LoraConfig(**{name: given[name] for name in _Computed.model_fields.keys() & given.keys()})
        _Computed.model_validate(config)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = wrong["loc"][0]
        raise folder.refusal(f"{CONFIG_FILE}: {name} = {given[name]!r} is not supported: {wrong['msg']}") from error
    except (ValueError, TypeError) as error:
        raise folder.refusal(f"{CONFIG_FILE}: {error}") from error
    return config


def _read_weights(folder: AdapterFolder, peft: Any, device: torch.device) -> dict[str, Tensor]:
    # Without this file PEFT would look for a pickle, and then for both on the network.
    if not (folder.path / WEIGHTS_FILE).is_file():
        raise folder.refusal(f"the folder has no {WEIGHTS_FILE}; other formats are not supported")
    try:
        weights: dict[str, Tensor] = peft.load_peft_weights(str(folder.path), device=str(device))
    except (SafetensorError, OSError) as error:
        raise folder.refusal(f"{WEIGHTS_FILE} cannot be read: {error}") from error
    return weights


def _by_layer(
    folder: AdapterFolder, weights: Mapping[str, Tensor], layers: Mapping[str, nn.Module]
) -> tuple[dict[str, dict[str, Tensor]], str]:
    """Matrices A and B by layer of the text model, and the prefix of the layers' names in the file."""
    found: dict[str, dict[str, Tensor]] = {}
    before: set[str] = set()
    for key, tensor in weights.items():
        match = _KEY.fullmatch(key)
        place = match and _IN_TEXT.fullmatch(match["layer"])
        if not (match and place and place["name"] in layers):
            raise folder.refusal(
                f"{WEIGHTS_FILE} holds {key}; only linear layers of the language model's blocks can be adapted, not "
                f"experts, embeddings, the output layer, the vision tower or its projector; merge such an adapter into "
                f"a checkpoint (PEFT's merge_and_unload)"
            )
        before.add(place["before"])
        found.setdefault(place["name"], {})[match["side"]] = tensor
    if len(before) != 1:
        raise folder.refusal(
            f"{WEIGHTS_FILE} must hold weights for layers of one model, got the prefixes {sorted(before)}"
        )
    for name, sides in found.items():
        if len(sides) < 2:
            raise folder.refusal(f"{WEIGHTS_FILE} holds lora_{min(sides)} of {name} but not its counterpart")
    return found, before.pop()


def _check_targets(
    folder: AdapterFolder, config: Any, weights: Mapping[str, object], trained_names: Mapping[str, str]
) -> None:
    """Raises StartupError unless exactly the layers that the config targets have weights.

    trained_names: for each layer of the text model, its name in the model that was trained.
    """
    if not config.target_modules:
        raise folder.refusal(f"{CONFIG_FILE}: target_modules = {config.target_modules!r} is empty")
    targets = importlib.import_module("peft.tuners.tuners_utils")
    targeted = {name for name, trained in trained_names.items() if targets.check_target_module_exists(config, trained)}
    missing, surplus = targeted - weights.keys(), weights.keys() - targeted
    for which, names in (("lacks weights of", missing), ("holds weights of", surplus)):
        if names:
            raise folder.refusal(
                f"{WEIGHTS_FILE} {which} {min(names)}, which target_modules = {_shown(config.target_modules)} "
                f"{'targets' if names <= targeted else 'does not target'}"
            )


def _addition(
    folder: AdapterFolder,
    config: Any,
    trained_name: str,
    layer: nn.Module,
    sides: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> LowRank:
    key_of = importlib.import_module("peft.utils.other").get_pattern_key
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = ranks.get(key_of(ranks, trained_name), config.r)
    alpha = alphas.get(key_of(alphas, trained_name), config.lora_alpha)
    expected = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
    for side, shape in expected.items():
        if sides[side].shape != shape:
            raise folder.refusal(
                f"{trained_name}.lora_{side} must have shape {list(shape)} by {CONFIG_FILE} and the model, got "
                f"{list(sides[side].shape)}"
            )
    scaling = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    addition = LowRank(sides["A"].to(dtype), (sides["B"].float() * scaling).to(dtype))
    if not (addition.down.isfinite().all() and addition.up.isfinite().all()):
        raise folder.refusal(f"weights of {trained_name}, scaled by {scaling}, are not finite as {dtype}")
    return addition


def _of_rank(addition: LowRank, layer: Any, group: Group | None) -> LowRank:
    """The part of an addition for a rank that has some columns of the layer, some of its rows, or all."""
    if group is None:
        return addition
    rows, columns = layer.int4.shape if isinstance(layer, Int4Linear) else layer.weight.shape
    if getattr(layer, "output_is_whole", False):
        return addition
    if columns < layer.in_features:
        return LowRank(part(addition.down, 1, group), addition.up, group.total)
    if rows == layer.out_features:
        return addition
    halves = addition.up.chunk(2) if getattr(layer, "packed", False) else (addition.up,)
    return replace(addition, up=torch.cat([part(each, 0, group) for each in halves]))


def _digest(folder: AdapterFolder) -> bytes:
    return tagged_digest(_DOMAIN, [_file_digest(folder.path / name) for name in (CONFIG_FILE, WEIGHTS_FILE)])


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _shown(targets: str | set[str]) -> str:
    return repr(targets if isinstance(targets, str) else sorted(targets))
