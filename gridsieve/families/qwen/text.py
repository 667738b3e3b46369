"""Qwen's language models: transformers' text classes, with weights found by prefix.

    Qwen2-VL      arXiv 2409.12191                      weight names of Qwen/Qwen2-VL-7B-Instruct
    Qwen2.5-VL    arXiv 2502.13923                      Qwen/Qwen2.5-VL-7B-Instruct
    Qwen2.5-Omni  arXiv 2503.20215, its thinker         Qwen/Qwen2.5-Omni-7B
    Qwen3-VL      arXiv 2511.21631, deepstack           Qwen/Qwen3-VL-4B-Instruct, Qwen/Qwen3-VL-30B-A3B-Instruct
                  is arXiv 2406.04334
                  arXiv 2601.04720          Qwen/Qwen3-VL-Embedding-2B, Qwen/Qwen3-VL-Reranker-2B, and their scripts
    Qwen3.5       and its line: transformers' classes   Qwen/Qwen3.5-9B, Qwen/Qwen3.5-35B-A3B
    Qwen3-Omni    arXiv 2509.17765, its thinker         Qwen/Qwen3-Omni-30B-A3B-Instruct

Three of four layers of Qwen3.5 are gated delta networks, which keep a recurrent state, the fourth is gated attention
with partial rotary embeddings. Its weights `mtp.*`, which predict several tokens, are read by `loading/mtp.py`.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5OmniThinkerConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3Config,
    Qwen3OmniMoeThinkerConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniRotaryEmbedding,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerTextModel,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLRotaryEmbedding,
    Qwen2_5_VLTextModel,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLForConditionalGeneration,
    Qwen2VLRotaryEmbedding,
    Qwen2VLTextModel,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextModel,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextModel,
    Qwen3_5MoeTextRotaryEmbedding,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerTextModel,
    Qwen3OmniMoeThinkerTextRotaryEmbedding,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLForConditionalGeneration,
    Qwen3VLTextModel,
    Qwen3VLTextRotaryEmbedding,
)
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLMoeTextModel,
    Qwen3VLMoeTextRotaryEmbedding,
)

from gridsieve.services.generation.loading.text_family import TextClasses, TextFamily
from gridsieve.services.generation.model.levels import add_level
from gridsieve.services.generation.model.reading import Reading

# Published checkpoints of Qwen2-VL and 2.5 use the second; transformers 5 writes the first if asked not to keep the
# original names.
_PREFIXES_OF_2 = ("model.language_model.", "model.")
_PREFIXES_OF_3 = ("model.language_model.",)
# Of a thinker that transformers 5 wrote, of published models that also speak, and of such thinkers alone.
_PREFIXES_OF_OMNI = ("model.language_model.", "thinker.model.", "model.")
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# Of Qwen3-VL-Embedding and -Reranker.
_READINGS = (
    Reading("embed", "Represent the user's input."),
    Reading(
        "score",
        "Given a search query, retrieve relevant candidates that answer the query.",
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
        'answer can only be "yes" or "no".',
    ),
)


class _Deepstack:
    """Adds deepstack features by row index; transformers uses a boolean mask, which makes the host wait for CUDA."""

    def _deepstack_process(
        self, hidden_states: Tensor, visual_pos_masks: Tensor | None, visual_embeds: Tensor
    ) -> Tensor:
        return add_level(hidden_states, visual_pos_masks, visual_embeds)


class _Text(_Deepstack, Qwen3VLTextModel):
    pass


class _MoeText(_Deepstack, Qwen3VLMoeTextModel):
    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers searches the source file of the class for a decorator; without it experts run one by one.
        can_set: bool = Qwen3VLMoeTextModel._can_set_experts_implementation()
        return can_set


class _OmniText(_Deepstack, Qwen3OmniMoeThinkerTextModel):
    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # As of `_MoeText`.
        can_set: bool = Qwen3OmniMoeThinkerTextModel._can_set_experts_implementation()
        return can_set


def _transpose_experts(text: nn.Module, weights: dict[str, Tensor]) -> None:
    """Published checkpoints store the weights of experts with their last two axes swapped."""
    for name, parameter in text.named_parameters():
        if not name.endswith(_EXPERTS) or name not in weights:
            continue
        experts, rows, columns = parameter.shape
        if weights[name].shape == (experts, columns, rows) != (experts, rows, columns):
            weights[name] = weights[name].transpose(1, 2).contiguous()


QWEN2_VL = TextFamily.of(
    Qwen2VLConfig,
    TextClasses(Qwen2VLForConditionalGeneration, Qwen2VLTextModel, Qwen2VLRotaryEmbedding),
    _PREFIXES_OF_2,
)
QWEN2_5_VL = TextFamily.of(
    Qwen2_5_VLConfig,
    TextClasses(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLTextModel, Qwen2_5_VLRotaryEmbedding),
    _PREFIXES_OF_2,
    clock_times=True,
    readings=_READINGS[:1],
)
QWEN2_5_OMNI = TextFamily.of(
    Qwen2_5OmniThinkerConfig,
    TextClasses(Qwen2_5OmniThinkerForConditionalGeneration, Qwen2_5OmniThinkerTextModel, Qwen2_5OmniRotaryEmbedding),
    _PREFIXES_OF_OMNI,
)
QWEN3_VL, QWEN3_VL_MOE = (
    TextFamily.of(
        config_class,
        classes,
        _PREFIXES_OF_3,
        embed_levels=lambda config: len(config.vision_config.deepstack_visual_indexes),
        # The dense model has no tensor-parallel plan, but its layers have the structure and names of Qwen3's.
        plan=Qwen3Config.base_model_tp_plan,
        change=_transpose_experts,
        readings=_READINGS,
        clock_times=True,
    )
    for config_class, classes in (
        (Qwen3VLConfig, TextClasses(Qwen3VLForConditionalGeneration, _Text, Qwen3VLTextRotaryEmbedding)),
        (Qwen3VLMoeConfig, TextClasses(Qwen3VLMoeForConditionalGeneration, _MoeText, Qwen3VLMoeTextRotaryEmbedding)),
    )
)
QWEN3_5 = TextFamily.of(
    Qwen3_5Config,
    TextClasses(Qwen3_5ForConditionalGeneration, Qwen3_5TextModel, Qwen3_5TextRotaryEmbedding),
    _PREFIXES_OF_3,
    change=_transpose_experts,
    clock_times=True,
)
QWEN3_5_MOE = TextFamily.of(
    Qwen3_5MoeConfig,
    TextClasses(Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeTextModel, Qwen3_5MoeTextRotaryEmbedding),
    _PREFIXES_OF_3,
    change=_transpose_experts,
    clock_times=True,
)
QWEN3_OMNI_MOE = TextFamily.of(
    Qwen3OmniMoeThinkerConfig,
    TextClasses(Qwen3OmniMoeThinkerForConditionalGeneration, _OmniText, Qwen3OmniMoeThinkerTextRotaryEmbedding),
    _PREFIXES_OF_OMNI,
    embed_levels=lambda config: len(config.vision_config.deepstack_visual_indexes),
    change=_transpose_experts,
)
