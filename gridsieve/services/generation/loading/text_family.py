"""What a family says of its language models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.generation.loading.weights import Named, as_stored
from gridsieve.services.generation.model.reading import Reading


@dataclass(frozen=True, slots=True)
class TextClasses:
    """Transformers' classes: of the whole model, of its text model (or a subclass that adds no state), and of the text
    model's rotary embedding; None if it has none."""

    whole: Any
    text: Any
    rotary: Any


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Vectors of a checkpoint that prompts name by ids after the vocabulary's last.

    names: of the weight that has them, one vector [D] or a row for each [n, D]; the first that the checkpoint has is
        read. rows: for the config of the whole model, those of the rows that prompts name.
    """

    names: Sequence[str]
    rows: Callable[[Any], slice] = lambda config: slice(None)


@dataclass(frozen=True, slots=True)
class TextFamily:
    """How the language models of one model type differ from those of others.

    config: reads the config of the whole model. Raises StartupError for what the family does not support.
    classes: for a config.
    prefixes: of the text model's weights; the first that the checkpoint has is used.
    position_axes: see `LanguageModel`.
    embed_levels: for a config, see `LanguageModel`.
    stored: vectors that have the ids after the vocabulary's last, in this order.
    plan: transformers' tensor-parallel plan, if the text config has none of the layers.
    named: for a config, maps a stored name after the prefix to the text model's.
    change: changes the weights that were read to those that the text model takes.
    readings: of its embedders and rerankers.
    clock_times: whether it was trained to write times of videos as `mm:ss.ff`, else in seconds.
    """

    config: Callable[[Checkpoint], Any]
    classes: Callable[[Any], TextClasses]
    prefixes: Sequence[str]
    position_axes: int = 3
    embed_levels: Callable[[Any], int] = lambda config: 0
    stored: Sequence[StoredVectors] = ()
    plan: Mapping[str, str] | None = None
    named: Callable[[Any], Named] = lambda config: as_stored
    change: Callable[[nn.Module, dict[str, Tensor]], None] = lambda text, weights: None
    readings: Sequence[Reading] = ()
    clock_times: bool = False

    @classmethod
    def of(cls, config_class: Any, classes: TextClasses, prefixes: Sequence[str], **others: Any) -> Self:
        """Of a model type whose models all have the same classes. config_class: transformers', of the whole model."""
        return cls(lambda checkpoint: checkpoint.config_as(config_class), lambda _: classes, prefixes, **others)
