"""Qwen's sound towers: transformers' modules over the chunks of all sounds of a forward.

    Qwen2.5-Omni    chunks of 200 frames, each its own window; two rows become a token          arXiv 2503.20215
    Qwen3-Omni      chunks of 100 frames, 13 rows each; windows of 8 chunks; a row is a token   arXiv 2509.17765

    frames    [ 0 … 199 ][ 200 … 399 ][ 400 … 450 ]     chunks, each by itself in the convolutions
    rows      [ 0 … 99  ][ 100 … 199 ][ 200 … 225 ]     in the layers
    tokens    [ 0 … 49  ][  50 …  99 ][ 100 … 112 ]

The last chunk of a sound is padded with zeros to the width of a whole chunk, and Qwen3-Omni's convolutions read the
padding. A sound shorter than one chunk is not padded. transformers pads such a sound if longer sounds are in the same
call, so its embeddings depend on the other sounds. Here every sound gets the embeddings of a call of its own.
Source: `Qwen2_5OmniAudioEncoder` and `Qwen3OmniMoeAudioEncoder` of transformers 5.24.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder, SinusoidsPositionEmbedding
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import refusing
from gridsieve.services.compute.packed_linear import pack_linears
from gridsieve.services.compute.transfers import to_device
from gridsieve.services.encoder.tower.attention import VARLEN, Attend, attend_by_length, find_attention
from gridsieve.services.encoder.tower.packing import ends_of
from gridsieve.services.encoder.tower.saturation import saturate
from gridsieve.services.encoder.tower.sound import SoundTower
from gridsieve.services.encoder.tower.vision_model import RunOptions
from gridsieve.services.encoder.tower.weights import choose_dtype, fill, find_weights, read_weights

_PREFIXES = ("thinker.audio_tower.", "audio_tower.", "thinker.model.audio_tower.", "model.audio_tower.")
# Of Qwen2.5-Omni's, vectors of the tokens around a sound, which the language model has itself.
_UNREAD = "audio_bos_eos_token."
# Chunks whose convolutions are computed together: of Qwen3-Omni the first one makes 6 MB of a chunk in float32.
_CHUNKS_AT_ONCE = 32


def load_sound_tower(checkpoint: Checkpoint, options: RunOptions) -> SoundTower:
    """The sound tower of a whole model or of its thinker alone.

    Raises StartupError if the tower is missing, incomplete or quantised, or if the attention is unavailable.
    """
    written = checkpoint.config.part("audio_config")
    if not written:
        raise StartupError(f"{checkpoint.folder}/config.json has no audio_config")
    made_of = _Qwen3 if checkpoint.model_type.startswith("qwen3") else _Qwen2_5
    with torch.device("meta"), refusing("config.json: audio_config"):
        config = made_of.config_class(**written.written)
        config._attn_implementation = "sdpa"
        model = made_of.model_class(config)
    found, device = find_weights(checkpoint, _PREFIXES), options.device
    stored = {name: each for name, each in found.items() if not name.startswith(_UNREAD)}
    dtype = choose_dtype(stored, options.dtype, device)
    model.audio_bos_eos_token = None
    fill(model, read_weights(stored, dtype, device), dtype, tower="sound tower")
    # Made again off the meta device: they are computed, not stored.
    model.positional_embedding = SinusoidsPositionEmbedding(config.max_source_positions, config.d_model)
    heads = config.encoder_attention_heads
    attend = find_attention(options.attention, device, dtype, heads, config.d_model // heads)
    config._attn_implementation_internal = VARLEN  # the private name: transformers' setter accepts only its own
    if dtype == torch.float16:
        saturate(model)
    pack_linears(model.eval().requires_grad_(False).to(device))
    chunk = 2 * config.n_window
    compute = made_of(model, attend, dtype, device, chunk, getattr(config, "n_window_infer", chunk) // chunk)
    return SoundTower(compute, compute.rows_of, compute.tokens_of, config.num_mel_bins, device)


@dataclass(frozen=True, slots=True, eq=False)
class _Forward(ABC):
    """For `SoundTower.compute`. model: transformers' whole tower. chunk: frames of one. window: chunks of one."""

    config_class: ClassVar[Any]
    model_class: ClassVar[Any]

    model: Any
    attend: Attend
    dtype: torch.dtype
    device: torch.device
    chunk: int
    window: int

    def __call__(self, features: Sequence[Tensor]) -> Tensor:
        states = torch.cat([self._embedded(*each) for each in self._batches(features)])
        rows = [self.rows_of(each.shape[1]) for each in features]
        window_rows = self.window * self.rows_of(self.chunk)
        windows = [min(window_rows, count - first) for count in rows for first in range(0, count, window_rows)]
        ends = torch.from_numpy(ends_of(windows))
        if self.attend is not attend_by_length:  # which reads them on the host
            ends = to_device(ends, self.device)
        for layer in self.model.layers:
            (states,) = layer(states, ends, max_seqlen=max(windows), attend=self.attend)
        return self._tokens(states, rows)

    def rows_of(self, frames: int) -> int:
        """How many rows the layers have of a sound."""
        chunks, rest = divmod(frames, self.chunk)
        return chunks * self._convolved(self.chunk) + self._convolved(rest)

    @abstractmethod
    def tokens_of(self, frames: int) -> int:
        """How many tokens a sound becomes."""

    def _batches(self, features: Sequence[Tensor]) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """Chunks of one width that are computed together, (n, mels, width), and the frames of each, in order."""
        chunks = [
            (chunk, min(self.chunk, each.shape[1])) for each in features for chunk in each.split(self.chunk, dim=1)
        ]
        for width, run in groupby(chunks, key=itemgetter(1)):
            own = [chunk for chunk, _ in run]
            for first in range(0, len(own), _CHUNKS_AT_ONCE):
                together = own[first : first + _CHUNKS_AT_ONCE]
                padded = torch.stack([F.pad(each, (0, width - each.shape[1])) for each in together])
                yield padded.to(self.dtype), [each.shape[1] for each in together]

    def _embedded(self, chunks: Tensor, frames: Sequence[int]) -> Tensor:
        """Rows for the layers, (P, hidden), of chunks (n, mels, width) with so many frames each."""
        rows = self._rows(chunks, frames)
        rows = rows + self.model.positional_embedding(rows.shape[1]).to(self.dtype)
        return torch.cat([own[: self._convolved(count)] for own, count in zip(rows, frames, strict=True)])

    @staticmethod
    @abstractmethod
    def _convolved(frames: int) -> int:
        """How many rows the convolutions make of the frames of a chunk."""

    @abstractmethod
    def _rows(self, chunks: Tensor, frames: Sequence[int]) -> Tensor:
        """Chunks (n, mels, width) after the convolutions, (n, rows, hidden)."""

    @abstractmethod
    def _tokens(self, states: Tensor, rows: Sequence[int]) -> Tensor:
        """The embeddings (tokens, D) of what the layers made of sounds with so many rows each, (P, hidden)."""


class _Qwen2_5(_Forward):  # noqa: N801  (as transformers writes it)
    __slots__ = ()
    config_class, model_class = Qwen2_5OmniAudioEncoderConfig, Qwen2_5OmniAudioEncoder

    def tokens_of(self, frames: int) -> int:
        return self.rows_of(frames) // 2

    @staticmethod
    def _convolved(frames: int) -> int:
        return _halved(frames)

    def _rows(self, chunks: Tensor, frames: Sequence[int]) -> Tensor:
        states = F.gelu(self.model.conv1(chunks))
        for own, count in zip(states, frames, strict=True):
            if count < chunks.shape[2]:
                own[:, count:] = 0
        return F.gelu(self.model.conv2(states)).transpose(1, 2)

    def _tokens(self, states: Tensor, rows: Sequence[int]) -> Tensor:
        """Of each two rows their mean, halved first because the sum may exceed float16; a last one without another is
        dropped."""
        paired = torch.cat([each[: len(each) // 2 * 2] for each in states.split(list(rows))])
        found: Tensor = self.model.proj(self.model.ln_post(paired[::2] / 2 + paired[1::2] / 2))
        return found


class _Qwen3(_Forward):
    __slots__ = ()
    config_class, model_class = Qwen3OmniMoeAudioEncoderConfig, Qwen3OmniMoeAudioEncoder

    def tokens_of(self, frames: int) -> int:
        return self.rows_of(frames)

    @staticmethod
    def _convolved(frames: int) -> int:
        return _halved(_halved(_halved(frames)))

    def _rows(self, chunks: Tensor, frames: Sequence[int]) -> Tensor:
        states = chunks[:, None]
        for convolution in (self.model.conv2d1, self.model.conv2d2, self.model.conv2d3):
            states = F.gelu(convolution(states))  # (n, channels, mels, frames), half as many each
        found: Tensor = self.model.conv_out(states.permute(0, 3, 1, 2).flatten(2))
        return found

    def _tokens(self, states: Tensor, rows: Sequence[int]) -> Tensor:
        model = self.model
        found: Tensor = model.proj2(model.act(model.proj1(model.ln_post(states))))
        return found


def _halved(frames: int) -> int:
    """How many values a convolution with stride 2 makes of so many."""
    return (frames + 1) // 2
