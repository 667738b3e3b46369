"""The model families: one row a model type, which says each fact of the family once, and where its code is.

    FAMILIES ─▶ `gridsieve models`, the table of docs/models.md (`python -m gridsieve.families`), errors
             ─▶ a folder's modules, by name: `prompt` to preprocessing, `tower` to the encoder, `text` to generation

Importing this file imports no family's code, so neither torch nor transformers. An installed distribution adds a family
by an entry point of the group `gridsieve.families` whose value is a `ModelFamily`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import Modality
from gridsieve.common.contract.retention import AFTER_TOWER, METHODS, NONE, VCAST, VIDCOM2, WHY_NOT_BEFORE

GROUP = "gridsieve.families"

_BOTH = (Modality.IMAGE, Modality.VIDEO)
_LINEAR, _UNREAD = "one-dimensional", "one-dimensional, and read by no layer"
_STAMPED = "M-RoPE, each slice after its timestamp"
_FEW_QUANTISED = "quantised checkpoints in 4 bits and in fp8 by blocks only"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One model type.

    model_type: of config.json. models: published ones.
    folder: import name of the package with its code. prompt, tower, text: `module:object` in it: a function of a
        checkpoint to preprocessing's `Family`, a function of a checkpoint and `RunOptions` to the encoder's `Tower`,
        and generation's `TextFamily`. sound: as tower, to the encoder's `SoundTower`, or to None for a checkpoint
        without one; empty: the model type hears nothing. They raise StartupError for a checkpoint that is not supported
        or incomplete.
    positions: of its language model, in words. limits: what it cannot do that others can, in words.
    media: what a prompt may hold.
    methods: the names in `METHODS` that its videos can be pruned by. why_not_all: for errors, why it lacks the others.
    live: whether its videos can be served in live sessions: slices of two frames, each with a grid of its own.
    divisible: whether ranks can each have a share of its tower's layers.
    """

    model_type: str
    models: str
    folder: str
    prompt: str
    tower: str = "tower:load"
    text: str = "text:FAMILY"
    sound: str = ""
    positions: str
    limits: str = ""
    media: tuple[Modality, ...] = _BOTH
    methods: tuple[str, ...] = AFTER_TOWER
    why_not_all: str = WHY_NOT_BEFORE
    live: bool = False
    divisible: bool = False

    def load(self, part: Literal["prompt", "tower", "text", "sound"]) -> Any:
        """Imports one of its parts. Raises StartupError for a row that names what its folder lacks."""
        return _imported(EntryPoint(self.model_type, f"{self.folder}.{getattr(self, part)}", GROUP))

    def hears(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint of this type takes sounds: not without a sound tower."""
        return bool(self.sound) and any(checkpoint.config.part(name) for name in ("audio_config", "sound_config"))

    @property
    def video_methods(self) -> tuple[str, ...]:
        """The methods that drop tokens of its videos; none if it takes no videos."""
        return tuple(each for each in self.methods if each != NONE and Modality.VIDEO in self.media)


# What the model types of a folder have in common.
_QWEN = partial(ModelFamily, folder="gridsieve.families.qwen", methods=METHODS, divisible=True)
_OMNI = partial(_QWEN, sound="sound:load_sound_tower", positions="M-RoPE, time in seconds", media=tuple(Modality))
_QWEN3 = partial(_QWEN, prompt="prompt:Qwen3VL.from_checkpoint", positions=_STAMPED, live=True)
_QWEN3_5 = partial(_QWEN3, tower="tower:load_qwen3_5")
_GLM = partial(
    ModelFamily,
    folder="gridsieve.families.glm",
    prompt="prompt:load",
    positions="M-RoPE, each slice before its timestamp",
    methods=METHODS,
    divisible=True,
)
_OF_LLAVA = partial(ModelFamily, folder="gridsieve.families.llava", positions=_LINEAR)
_LLAVA = partial(
    _OF_LLAVA,
    prompt="prompt:Llava.from_checkpoint",
    limits="no videos",
    media=(Modality.IMAGE,),
)
_MINICPM = partial(ModelFamily, folder="gridsieve.families.minicpm")
_MINICPM_4_6 = partial(
    _MINICPM,
    prompt="v4_6.prompt:MiniCPMV46.from_checkpoint",
    tower="v4_6.tower:load",
    # Measured: benchmarks/RESULTS.md, "Pruning tokens that are no patches".
    methods=tuple(method for method in METHODS if method not in (VCAST, VIDCOM2)),
    why_not_all=f"{VCAST} and {VIDCOM2} keep answers less well than dropping at random",
)
_NEMOTRON = partial(ModelFamily, folder="gridsieve.families.nemotron", methods=METHODS)

FAMILIES = (
    _QWEN(
        model_type="qwen2_vl",
        models="Qwen2-VL",
        prompt="prompt:Qwen2VL.from_checkpoint",
        tower="tower:load_qwen2_vl",
        text="text:QWEN2_VL",
        positions="M-RoPE, a slice is one position",
    ),
    _QWEN(
        model_type="qwen2_5_vl",
        models="Qwen2.5-VL",
        prompt="prompt:Qwen25VL.from_checkpoint",
        tower="tower:load_qwen2_5_vl",
        text="text:QWEN2_5_VL",
        positions="M-RoPE, time in seconds",
        live=True,
    ),
    _OMNI(
        model_type="qwen2_5_omni",
        models="Qwen2.5-Omni, its thinker",
        prompt="prompt:Qwen25Omni.from_checkpoint",
        tower="tower:load_qwen2_5_omni",
        text="text:QWEN2_5_OMNI",
        limits="no spoken answers; sounds of at most 5 minutes",
        divisible=False,
    ),
    _QWEN3(
        model_type="qwen3_vl",
        models="Qwen3-VL, its Embedding and Reranker",
        tower="tower:load_qwen3_vl",
        text="text:QWEN3_VL",
    ),
    _QWEN3(
        model_type="qwen3_vl_moe",
        models="Qwen3-VL, mixture of experts",
        tower="tower:load_qwen3_vl",
        text="text:QWEN3_VL_MOE",
    ),
    _QWEN3_5(model_type="qwen3_5", models="Qwen3.5, 3.6, 3.8", text="text:QWEN3_5"),
    _QWEN3_5(model_type="qwen3_5_moe", models="Qwen3.5, 3.6, 3.8, mixture of experts", text="text:QWEN3_5_MOE"),
    _OMNI(
        model_type="qwen3_omni_moe",
        models="Qwen3-Omni, its thinker",
        prompt="prompt:Qwen3Omni.from_checkpoint",
        tower="tower:load_qwen3_omni",
        text="text:QWEN3_OMNI_MOE",
        limits="no spoken answers; sounds of at most 327 seconds",
        live=True,
    ),
    ModelFamily(
        model_type="cosmos3_edge",
        models="Cosmos 3 Edge, its model that reads",
        folder="gridsieve.families.cosmos",
        prompt="prompt:Cosmos3Edge.from_checkpoint",
        positions="M-RoPE, each frame after its timestamp",
        methods=METHODS,
    ),
    _GLM(model_type="glm4v", models="GLM-4.1V, GLM-4.6V-Flash", text="text:GLM4V"),
    _GLM(model_type="glm46v", models="GLM-4.6V-Flash", text="text:GLM46V"),
    _GLM(model_type="glm4v_moe", models="GLM-4.5V, GLM-4.6V, mixtures of experts", text="text:GLM4V_MOE"),
    _LLAVA(
        model_type="llava",
        models="LLaVA 1.5, Pixtral, and others in LLaVA's layout: CLIP, SigLIP or Pixtral with Llama, Mistral or Qwen",
        text="text:LLAVA",
    ),
    _LLAVA(model_type="mistral3", models="Mistral Small 3.1, 3.2", tower="tower:load_mistral3", text="text:MISTRAL3"),
    _OF_LLAVA(
        model_type="llava_next_video",
        models="LLaVA-NeXT-Video",
        prompt="next_video.prompt:LlavaNextVideo.from_checkpoint",
        tower="next_video.tower:load",
        text="text:NEXT_VIDEO",
        limits="no spatial_pool_mode conv",
    ),
    _OF_LLAVA(
        model_type="llava_onevision",
        models="LLaVA-OneVision",
        prompt="onevision.prompt:LlavaOnevision.from_checkpoint",
        tower="onevision.tower:load",
        text="text:ONEVISION",
    ),
    ModelFamily(
        model_type="internvl",
        models="InternVL 2.5, 3, 3.5 (-hf)",
        folder="gridsieve.families.internvl",
        prompt="prompt:InternVL.from_checkpoint",
        positions=f"{_LINEAR}, each frame after its number",
    ),
    _MINICPM(
        model_type="minicpmv",
        models="MiniCPM-V 2.5, 2.6, 4.0, 4.5",
        prompt="prompt:MiniCPMV.from_checkpoint",
        positions=_LINEAR,
        limits=f"2.5: no videos; {_FEW_QUANTISED}",
        # Measured: benchmarks/RESULTS.md, "Pruning tokens that are no patches".
        methods=(NONE,),
        why_not_all="a resampler's tokens are not places, and no method keeps answers better than dropping at random",
    ),
    _MINICPM_4_6(model_type="minicpmv4_6", models="MiniCPM-V 4.6", text="v4_6.text:FAMILY", positions=_LINEAR),
    _MINICPM_4_6(
        model_type="minicpmv4_7", models="MiniCPM-V 4.7", text="v4_6.text:CANVAS_FAMILY", positions="Canvas M-RoPE"
    ),
    _NEMOTRON(
        model_type="nemotron_h_omni",
        models="Nemotron 3 Nano Omni",
        prompt="prompt:NemotronHOmni.from_checkpoint",
        positions=f"{_UNREAD}; each two frames after their times",
        sound="sound:load_sound_tower",
        media=tuple(Modality),
        limits=f"{_FEW_QUANTISED}; sounds of at most 400 s",
    ),
    _NEMOTRON(
        model_type="NemotronH_Nano_VL_V2",
        models="Nemotron Nano 12B v2 VL",
        prompt="nano.prompt:NemotronNanoVL.from_checkpoint",
        tower="nano.tower:load",
        text="text:NANO_FAMILY",
        positions=f"{_UNREAD}; each frame after its time",
        limits=f"{_FEW_QUANTISED}, so not the FP8 and NVFP4 ones",
    ),
    ModelFamily(
        model_type="ovis2",
        models="Ovis2 (-hf)",
        folder="gridsieve.families.ovis2",
        prompt="prompt:Ovis2.from_checkpoint",
        positions=_LINEAR,
        limits="no videos",
        media=(Modality.IMAGE,),
    ),
    ModelFamily(
        model_type="smolvlm",
        models="SmolVLM2",
        folder="gridsieve.families.smolvlm",
        prompt="prompt:SmolVLM.from_checkpoint",
        positions=f"{_LINEAR}, each frame after its time",
    ),
    ModelFamily(
        model_type="video_llama_3",
        models="VideoLLaMA 3 (-HF)",
        folder="gridsieve.families.videollama",
        prompt="prompt:VideoLlama3.from_checkpoint",
        positions=f"{_LINEAR}, each frame after its time",
        limits="no use_token_compression",
    ),
)


def _imported(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise StartupError(f"entry point {point.name} = {point.value} cannot be imported: {error}") from error


@cache
def families() -> Mapping[str, ModelFamily]:
    """All rows by model type: those above, and those of installed distributions.

    Raises StartupError for a distribution's row that cannot be imported, is none, or has the model type of another row.
    """
    rows = {row.model_type: row for row in FAMILIES}
    for point in entry_points(group=GROUP):
        row = _imported(point)
        if not isinstance(row, ModelFamily) or row.model_type in rows:
            raise StartupError(
                f"entry point {point.name} = {point.value}: {row!r} is no family, or one of a taken type"
            )
        rows[row.model_type] = row
    return rows


def family_of(checkpoint: Checkpoint) -> ModelFamily:
    """The row of a checkpoint's model type. Raises StartupError for a type without one."""
    rows, model_type = families(), checkpoint.model_type
    if model_type not in rows:
        supported = ", ".join(sorted(rows))
        raise StartupError(
            f"{checkpoint.option} {checkpoint.folder} has the model_type {model_type!r}; supported: {supported}"
        )
    return rows[model_type]


def not_live() -> str:
    """Why a model has no live sessions."""
    live = ", ".join(name for name, row in families().items() if row.live)
    return f"live sessions are served for the model types {live}, not for this model"
