"""Reads LoRA adapters from folders in PEFT's format, checks config and weights, and sorts the weights by part.

    text    layers.3.self_attn.q_proj  ◀─  base_model.model.model.language_model.layers.3.self_attn.q_proj.lora_A.weight
    tower   visual.blocks.3.attn.qkv   ◀─  base_model.model.model.visual.blocks.3.attn.qkv.lora_A.weight
            the part's own name            any prefix of the model that was trained

PEFT parses the files and decides which layers a config targets. Weights must be safetensors: nothing is unpickled. A
config field that would change the result and is not implemented here is refused, by adapter, field and value.
Generation adds the weights of the text, the encoder those of the vision tower and its projector.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from gridsieve.common.adapter_folder import AdapterFolder
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import tagged_digest
from gridsieve.services.compute.adapters import Features, LowRank

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_DOMAIN = b"gridsieve adapter v1"
_KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_IN_TEXT = re.compile(r"(?P<before>(?:(?:model|language_model|llm)\.)*)(?P<name>layers\.\d+\..+)")
# Published checkpoints have CLIP's and SigLIP's layers one level deeper than transformers 5.
_TOWER, _DEEPER_TOWER = "vision_tower.", "vision_tower.vision_model."
_IN_TOWER = re.compile(r"(?P<before>(?:model\.)?)(?P<name>(?:visual|vision_tower|multi_modal_projector|merger)\..+)")
# Fields that describe an adapter's origin or training. PEFT ignores fan_in_fan_out for linear layers.
_WITHOUT_EFFECT = {
    *("peft_type", "peft_version", "auto_mapping", "task_type", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config", "lora_dropout", "fan_in_fan_out", "ensure_weight_tying", "qalora_group_size"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
# Values of init_lora_weights that leave the base weights unchanged; the others would alter them.
_PLAIN_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")


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


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedPart:
    """An adapter's weights for one part of a model.

    sides: matrices A and B by the layer's own name. trained_name: of a layer, by its own.
    """

    folder: AdapterFolder
    config: Any
    sides: Mapping[str, Mapping[str, Tensor]]
    trained_name: Callable[[str], str]

    def additions(self, layers: Mapping[str, Features], dtype: torch.dtype) -> dict[str, LowRank]:
        """What the adapter adds to layers, by their names. layers: all linear ones of this part.

        Raises StartupError for weights that are not of these, that do not fit them, or that the config does not target.
        """
        with _refusing(self.folder):
            if unknown := self.sides.keys() - layers.keys():
                raise unsupported(self.folder, self.trained_name(min(unknown)))
            for name, sides in self.sides.items():
                if len(sides) < 2:
                    text = f"{WEIGHTS_FILE} holds lora_{min(sides)} of {name} but not its counterpart"
                    raise self.folder.refusal(text)
            if self.sides:
                _check_targets(self.folder, self.config, self.sides, {name: self.trained_name(name) for name in layers})
            return {name: self._addition(name, layers[name], dtype) for name in self.sides}

    def _addition(self, name: str, layer: Features, dtype: torch.dtype) -> LowRank:
        key_of = importlib.import_module("peft.utils.other").get_pattern_key
        config, sides, trained_name = self.config, self.sides[name], self.trained_name(name)
        ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
        rank = ranks.get(key_of(ranks, trained_name), config.r)
        alpha = alphas.get(key_of(alphas, trained_name), config.lora_alpha)
        expected = {"A": (rank, layer.inputs), "B": (layer.outputs, rank)}
        for side, shape in expected.items():
            if sides[side].shape != shape:
                raise self.folder.refusal(
                    f"{trained_name}.lora_{side} must have shape {list(shape)} by {CONFIG_FILE} and the model, got "
                    f"{list(sides[side].shape)}"
                )
        scaling = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        addition = LowRank(sides["A"].to(dtype), (sides["B"].float() * scaling).to(dtype))
        if not (addition.down.isfinite().all() and addition.up.isfinite().all()):
            raise self.folder.refusal(f"weights of {trained_name}, scaled by {scaling}, are not finite as {dtype}")
        return addition


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFiles:
    """An adapter as read. digest: of both files. text, tower: its weights for the language model's blocks, and for the
    vision tower and its projector."""

    folder: AdapterFolder
    digest: bytes
    text: AdaptedPart
    tower: AdaptedPart


def read_adapters(folders: Sequence[AdapterFolder], device: torch.device) -> Iterator[AdapterFiles]:
    """Reads adapters, one at a time, onto a device. Raises StartupError, with the adapter's name, for an unsupported
    one."""
    if not folders:
        return
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise StartupError("--adapters needs PEFT, which is not installed: pip install 'gridsieve[lora]'") from error
    for folder in folders:
        with _refusing(folder):
            config = _read_config(folder, peft)
            text, tower = _by_part(folder, config, _read_weights(folder, peft, device))
            digests = [_file_digest(folder.path / name) for name in (CONFIG_FILE, WEIGHTS_FILE)]
        yield AdapterFiles(folder, tagged_digest(_DOMAIN, digests), text, tower)


def unsupported(folder: AdapterFolder, layer: str) -> StartupError:
    """The error for weights of a layer that no service can adapt."""
    return folder.refusal(
        f"{WEIGHTS_FILE} holds weights of {layer}; only linear layers of the language model's blocks, its vision tower "
        f"and its projector can be adapted, not experts, embeddings, convolutions or the output layer; merge such an "
        f"adapter into a checkpoint (PEFT's merge_and_unload)"
    )


@contextmanager
def _refusing(folder: AdapterFolder) -> Iterator[None]:
    try:
        yield
    except re.error as error:
        raise folder.refusal(f"{CONFIG_FILE}: {error.pattern!r} is not a regular expression: {error}") from error
    except (OSError, RecursionError, OverflowError) as error:  # the last two from parsing JSON or patterns
        raise folder.refusal(str(error)) from error


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


def _by_part(folder: AdapterFolder, config: Any, weights: Mapping[str, Tensor]) -> tuple[AdaptedPart, AdaptedPart]:
    """Matrices A and B by layer, of the text and of the tower."""
    found: dict[re.Pattern[str], dict[str, dict[str, Tensor]]] = {_IN_TEXT: {}, _IN_TOWER: {}}
    before: dict[re.Pattern[str], set[str]] = {_IN_TEXT: set(), _IN_TOWER: set()}
    deeper = False
    for key, tensor in weights.items():
        match = _KEY.fullmatch(key)
        place = match and (_IN_TEXT.fullmatch(match["layer"]) or _IN_TOWER.fullmatch(match["layer"]))
        if not (match and place):
            raise unsupported(folder, key)
        deeper = deeper or place["name"].startswith(_DEEPER_TOWER)
        before[place.re].add(place["before"])
        own_name = place["name"].replace(_DEEPER_TOWER, _TOWER, 1)
        found[place.re].setdefault(own_name, {})[match["side"]] = tensor
    for prefixes in before.values():
        if len(prefixes) > 1 or not weights:
            raise folder.refusal(
                f"{WEIGHTS_FILE} must hold weights for layers of one model, got the prefixes {sorted(prefixes)}"
            )
    text, tower = ("".join(prefixes) for prefixes in before.values())

    def in_text(name: str) -> str:
        return text + name

    def in_tower(name: str) -> str:
        return tower + (name.replace(_TOWER, _DEEPER_TOWER, 1) if deeper else name)

    of_text, of_tower = found.values()
    return AdaptedPart(folder, config, of_text, in_text), AdaptedPart(folder, config, of_tower, in_tower)


def _check_targets(
    folder: AdapterFolder, config: Any, weights: Mapping[str, object], trained_names: Mapping[str, str]
) -> None:
    """Raises StartupError unless exactly the layers that the config targets have weights.

    trained_names: for each layer of the part, its name in the model that was trained.
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


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _shown(targets: str | set[str]) -> str:
    return repr(targets if isinstance(targets, str) else sorted(targets))
