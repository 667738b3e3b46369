"""Nemotron 3 Nano Omni's sound tower: Parakeet's encoder, a Fast Conformer, and a projector.

    frames    [ 0 … 7 ][ 8 … 15 ] …     of features; the last frame is zeros, and masked
    tokens    [   0   ][   1    ] …     convolutions with stride 2 make one of 8 frames

Layers attend over the whole sound, by the distance of two tokens. Of a sound whose last token has the masked frame
alone, transformers masks this token, so that nothing attends to it and it attends to all alike; the language model gets
it nevertheless. Beside longer sounds this token of transformers differs; here each sound has the embeddings that
transformers gives it alone. Sounds are computed one by one, convolutions and attention in parts, so memory grows with
the longest sound and not with its square.
Source: `ParakeetEncoder` and `NemotronH_Omni_Reasoning_V3` of transformers 5.24; Fast Conformer, arXiv 2305.05084;
weight names of nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16, as transformers renames them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3MultiModalProjector,
)
from transformers.models.parakeet.modeling_parakeet import (
    ParakeetEncoder,
    ParakeetEncoderAttention,
    ParakeetEncoderRelPositionalEncoding,
)

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import refusing
from gridsieve.services.compute.packed_linear import pack_linears
from gridsieve.services.encoder.tower.saturation import saturate, saturated
from gridsieve.services.encoder.tower.sound import SoundTower
from gridsieve.services.encoder.tower.vision_model import RunOptions
from gridsieve.services.encoder.tower.weights import Stored, choose_dtype, fill, find_weights, read_weights

# Parts of checkpoints, as transformers saves them and as published, and their names here.
_PARTS = {
    "audio_tower.": "audio_tower.",
    "embed_audio.": "embed_audio.",
    "sound_encoder.encoder.": "audio_tower.",
    "sound_projection.norm.": "embed_audio.layer_norm.",
    "sound_projection.linear1.": "embed_audio.linear_1.",
    "sound_projection.linear2.": "embed_audio.linear_2.",
}
# Preprocessing makes the features; the other is a count of training.
_FEATURES, _COUNTED = "audio_tower.feature_extractor.", ".num_batches_tracked"
# Biases that a file may have although its config says that there are none. vLLM leaves them out, too.
_CONVOLUTION_BIASES = tuple(f".conv.{name}.bias" for name in ("pointwise_conv1", "depthwise_conv", "pointwise_conv2"))
# Computed together, as sizes of the published tower in float32: tokens, of each of which the first convolution makes
# 0.26 MB, and queries, whose scores are 8 MB for each thousand tokens of the sound.
_TOKENS_AT_ONCE, _QUERIES_AT_ONCE = 256, 256


def load_sound_tower(checkpoint: Checkpoint, options: RunOptions) -> SoundTower | None:
    """The sound tower; None for a checkpoint that has none.

    Raises StartupError if the tower is incomplete, quantised, or of convolutions that are not supported.
    """
    whole = checkpoint.config_as(NemotronH_Omni_Reasoning_V3_Config)
    config = whole.audio_config
    if config is None:
        return None
    factor = config.subsampling_factor
    if (config.subsampling_conv_kernel_size, config.subsampling_conv_stride, factor.bit_count()) != (3, 2, 1):
        raise StartupError(
            f"{checkpoint.folder}/config.json: the sound tower's subsampling_conv_kernel_size must be 3, its "
            f"subsampling_conv_stride 2 and its subsampling_factor a power of 2, got "
            f"{config.subsampling_conv_kernel_size}, {config.subsampling_conv_stride} and {factor}"
        )
    with torch.device("meta"), refusing("config.json: audio_config"):
        model = _Model(config, whole.text_config.hidden_size)
    found, device = _find(checkpoint, config.convolution_bias), options.device
    dtype = choose_dtype(found, options.dtype, device)
    fill(model, read_weights(found, dtype, device), dtype, tower="sound tower")
    # Made again off the meta device: it is computed, not stored.
    model.audio_tower.encode_positions = ParakeetEncoderRelPositionalEncoding(config)
    if dtype == torch.float16:
        saturate(model)
    pack_linears(model.eval().requires_grad_(False).to(device))
    compute = _Forward(model, dtype, factor)
    return SoundTower(compute, compute.tokens_of, compute.tokens_of, config.num_mel_bins, device)


def _find(checkpoint: Checkpoint, convolution_bias: bool) -> dict[str, Stored]:
    found = {
        renamed + name: each
        for part, renamed in _PARTS.items()
        for name, each in find_weights(checkpoint, (part,)).items()
    }
    unread = (_COUNTED,) if convolution_bias else (_COUNTED, *_CONVOLUTION_BIASES)
    return {name: each for name, each in found.items() if not name.startswith(_FEATURES) and not name.endswith(unread)}


class _Model(nn.Module):
    """transformers' modules, under their names. hidden: width of the language model."""

    def __init__(self, config: Any, hidden: int) -> None:
        super().__init__()
        self.audio_tower: Any = ParakeetEncoder(config)
        for index, layer in enumerate(self.audio_tower.layers):
            layer.self_attn = _Attention(config, index)
            # Only training changes its statistics, and counts.
            layer.conv.norm.track_running_stats, layer.conv.norm.num_batches_tracked = False, None
        self.embed_audio = NemotronH_Omni_Reasoning_V3MultiModalProjector(
            config.hidden_size, config.projection_hidden_size, hidden, bias=config.projection_bias
        )


class _Attention(ParakeetEncoderAttention):
    """transformers', over few queries at a time."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states: (1, T, hidden). position_embeddings: of the distances from T - 1 to 1 - T, (1, 2T - 1,
        hidden). attention_mask: bool (1, 1, 1, T), the tokens that are attended to."""
        queries, keys, values = (
            self._heads(project(hidden_states)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        distances = self._heads(self.relative_k_proj(position_embeddings))
        taken, tokens, attended = attention_mask[0, 0, 0], keys.shape[2], []
        for begin in range(0, tokens, _QUERIES_AT_ONCE):
            own = queries[:, :, begin : begin + _QUERIES_AT_ONCE]
            end = begin + own.shape[2]
            of_own = distances[:, :, tokens - end : 2 * tokens - 1 - begin]
            products = saturated(saturated(own + self.bias_v[:, None]) @ of_own.mT)
            scores = self._rel_shift(products)[..., :tokens] * self.scaling
            masked = ~(taken[begin:end, None] & taken)
            scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)
            attended.append(
                F.scaled_dot_product_attention(
                    saturated(own + self.bias_u[:, None]), keys, values, attn_mask=scores, scale=self.scaling
                )
            )
        return self.o_proj(torch.cat(attended, dim=2).transpose(1, 2).flatten(2)), None

    def _heads(self, projected: Tensor) -> Tensor:
        """(1, n, heads · width) to (1, heads, n, width)."""
        heads: Tensor = projected.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        return heads


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """For `SoundTower.compute`. factor: frames of a token."""

    model: _Model
    dtype: torch.dtype
    factor: int

    def __call__(self, features: Sequence[Tensor]) -> Tensor:
        return torch.cat([self._embedded(each.T.to(self.dtype)) for each in features])

    def tokens_of(self, frames: int) -> int:
        """How many tokens a sound becomes."""
        return -(-frames // self.factor)

    def _embedded(self, frames: Tensor) -> Tensor:
        """Embeddings (tokens, D) of a sound (frames, mels), whose last frame is masked."""
        tower = self.model.audio_tower
        states = torch.cat([*self._subsampled(frames)], dim=1) * tower.input_scale
        positions = tower.encode_positions(states)
        taken = torch.arange(states.shape[1], device=frames.device) < self.tokens_of(len(frames) - 1)
        for layer in tower.layers:
            states = layer(states, attention_mask=taken[None, None, None], position_embeddings=positions)
        found: Tensor = self.model.embed_audio(states[0])
        return found

    def _subsampled(self, frames: Tensor) -> Iterator[Tensor]:
        """Rows for the layers, (1, n, hidden) of each part. A part begins with one more token, which the convolutions
        need and which is wrong without those before it."""
        tokens, is_sound = self.tokens_of(len(frames)), torch.ones(1, len(frames), device=frames.device)
        is_sound[:, -1] = 0
        for begin in range(0, tokens, _TOKENS_AT_ONCE):
            spare = min(begin, 1)
            part = slice((begin - spare) * self.factor, (begin + _TOKENS_AT_ONCE) * self.factor)
            yield self.model.audio_tower.subsampling(frames[None, part], is_sound[:, part])[:, spare:]
