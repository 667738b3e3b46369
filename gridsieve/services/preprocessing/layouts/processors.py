"""Settings of a checkpoint's image and video processors that several families read alike."""

from __future__ import annotations

from collections.abc import Sequence

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import Modality
from gridsieve.common.fields import Fields

# The fields of a size that is stretched to.
SQUARE = ("height", "width")
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


def size_of(processor: Fields, of_number: Sequence[str], name: str = "size") -> Fields:
    """A size of a processor, which older files give as one number or as height and width; empty if it is absent.

    of_number: the fields that one number stands for.
    """
    size = processor.get(name, {})
    if isinstance(size, int) and not isinstance(size, bool):
        size = dict.fromkeys(of_number, size)
    elif isinstance(size, list) and len(size) == len(SQUARE):
        size = dict(zip(SQUARE, size, strict=True))
    return Fields(processor.file, {name: size}, processor.path).part(name)


def background_of(image: Fields) -> tuple[int, int, int]:
    """The colour, RGB, around pictures that an image processor of these settings pads to squares."""
    red, green, blue = (int(255 * value) for value in image.numbers("image_mean", 3, _MEAN))
    return red, green, blue


def placeholder_of(checkpoint: Checkpoint, modality: Modality, default: str | None = None) -> str:
    """The token with the config's image_token_index or image_token_id, or those of videos."""
    config = checkpoint.config
    index = config.get(f"{modality.value}_token_index", config.get(f"{modality.value}_token_id"))
    added = checkpoint.read_json("tokenizer.json").get("added_tokens", [])
    found = (str(token["content"]) for token in added if token["id"] == index)
    return next(found, default or f"<{modality.value}>")
