"""Settings of a checkpoint's image and video processors that several families read alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError
from framesieve.common.contract.plan import Modality

# The mean of transformers' classes.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_BICUBIC = 3
_ONLY = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC}


def check_processors(checkpoint: Checkpoint, **only: object) -> None:
    """Raises StartupError for settings of the image or the video processor that are not supported.

    only: the supported values of further settings.
    """
    image = checkpoint.processor("image")
    for name, settings in (("image", image), ("video", checkpoint.processor("video") or image)):
        for key, value in (_ONLY | only).items():
            if settings.get(key, value) != value:
                raise StartupError(f"the {name} processor's {key} is {settings[key]}, only {value} is supported")


def background_of(image: Mapping[str, Any]) -> tuple[int, int, int]:
    """The colour, RGB, around pictures that an image processor of these settings pads to squares."""
    red, green, blue = (int(255 * value) for value in image.get("image_mean", _MEAN))
    return red, green, blue


def placeholder_of(checkpoint: Checkpoint, modality: Modality, default: str | None = None) -> str:
    """The token with the config's image_token_index or image_token_id, or those of videos."""
    config = checkpoint.config
    index = config.get(f"{modality.value}_token_index", config.get(f"{modality.value}_token_id"))
    added = checkpoint.read_json("tokenizer.json").get("added_tokens") or []
    found = (str(token["content"]) for token in added if token["id"] == index)
    return next(found, default or f"<{modality.value}>")
