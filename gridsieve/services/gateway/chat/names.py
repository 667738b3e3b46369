"""Where the caller of a request wrote what the fields of gRPC's messages hold, for errors that name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gridsieve.common.contract.errors import path_of, steps_of

_OF_FRAME = {"pictures": "frame", "timestamps_s": "the time of frame"}
_FRAME_CHOICE = {"start_s": "video_start", "end_s": "video_end", "max_slices": "max_slice_nums"}


@dataclass(frozen=True, slots=True)
class MediaNames:
    """location: of the media's URL, file or embeddings. pruning: of the item's pruning, its own or the request's.
    sampling: of the fields of FrameSampling that the caller set."""

    location: str
    pruning: str = "pruning"
    sampling: Mapping[str, str] = field(default_factory=dict)


class FieldNames:
    """media: by message and part. options: of fields of Sampling, by their names there, where they differ."""

    def __init__(self) -> None:
        self.media: dict[tuple[int, int], MediaNames] = {}
        self.options: dict[str, str] = {}

    def name_of(self, field: str) -> str:
        """The caller's name of a field of the gRPC request."""
        match steps_of(field):
            case "prompt", "messages", int(message), "parts", int(place), "image" | "video", *rest:
                return self._of_media(message, place, rest)
            case "prompt", "messages", int(message), "parts", int(place), *_:
                return f"messages[{message}].content[{place}]"
            case "prompt", "messages", int(message), "parts":
                return f"messages[{message}].content"
            case "prompt", "messages", int(message), "tool_calls", int(call), "name" | "arguments" as name:
                return f"messages[{message}].tool_calls[{call}].function.{name}"
            case "prompt", "messages", *rest:
                return path_of("messages", *rest)
            case "prompt", "tools", int(index), *rest:
                return path_of("tools", index, "function", *rest)
            case "prompt", "tools":
                return "tools"
            case "prompt", "template_options", *rest:
                return path_of("chat_template_kwargs", *rest)
            case "prompt", "cache_salt":
                return "cache_salt"
            case "tool_choice", "mode":
                return "tool_choice"
            case "sampling", str(name), *rest:
                return path_of(self.options.get(name, name), *rest)
            case "frame_sampling", str(name):
                return self._of_sampling(name, None)
        return field

    def _of_media(self, message: int, place: int, rest: Sequence[str | int]) -> str:
        own = self.media.get((message, place))
        location = own.location if own else f"messages[{message}].content[{place}]"
        match rest:
            case "frame_sampling", str(name), *_:
                return self._of_sampling(name, own)
            case "pruning", str(name):
                return f"{own.pruning if own else 'pruning'}.{name}"
            case "frames", "pictures" | "timestamps_s" as kind, int(number):  # the caller has one field for all frames
                return f"{location} at {_OF_FRAME[kind]} {number}"
            case "embeds", *fields:  # the caller has the tensor's fields beside the others
                return path_of(location, *(each for each in fields if each != "tensor"))
        return location

    def _of_sampling(self, name: str, own: MediaNames | None) -> str:
        known = own.sampling.get(name) if own else None
        return known or f"mm_processor_kwargs.{_FRAME_CHOICE.get(name, name)}"
