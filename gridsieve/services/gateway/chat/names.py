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
    audio: of what asks for the sound of a video. sampling: of the fields of FrameSampling that the caller set."""

    location: str
    pruning: str = "pruning"
    audio: str = ""
    sampling: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnNames:
    """turn, content, call_id: of a turn, its content, and the call whose result it is. parts, calls: of each part and
    each tool call. media: by part, those of images, videos and sounds."""

    turn: str
    content: str
    call_id: str = ""
    parts: Sequence[str] = ()
    calls: Sequence[str] = ()
    media: Mapping[int, MediaNames] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FieldNames:
    """turns: of each message; all_turns: the field that holds them. options: of fields of Sampling, by their names
    there, where they differ. function: the field of a tool, and of a call, that has its name; empty: it has it itself.
    """

    turns: Sequence[TurnNames]
    all_turns: str
    options: Mapping[str, str] = field(default_factory=dict)
    function: Sequence[str] = ()

    def name_of(self, field: str) -> str:
        """The caller's name of a field of the gRPC request."""
        match steps_of(field):
            case "prompt", "messages", int(index), *rest if index < len(self.turns):
                return self._of_turn(self.turns[index], rest)
            case "prompt", "messages", *rest:
                return self.all_turns
            case "prompt", "tools", int(index), *rest:
                return path_of("tools", index, *self.function, *rest)
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
                return _of_sampling(name, {})
        return field

    def _of_turn(self, turn: TurnNames, steps: Sequence[str | int]) -> str:
        match steps:
            case "parts", int(number), "image" | "video" | "audio", *rest if number in turn.media:
                return _of_media(turn.media[number], rest)
            case "parts", int(number), *_ if number < len(turn.parts):
                return turn.parts[number]
            case "parts", *_:
                return turn.content
            case "tool_calls", int(number), "name" | "arguments" as name if number < len(turn.calls):
                return path_of(turn.calls[number], *self.function, name)
            case "tool_calls", int(number), *rest if number < len(turn.calls):
                return path_of(turn.calls[number], *rest)
            case ("tool_call_id",):
                return turn.call_id
        return path_of(turn.turn, *steps)


def _of_media(names: MediaNames, steps: Sequence[str | int]) -> str:
    match steps:
        case "frame_sampling", str(name), *_:
            return _of_sampling(name, names.sampling)
        case ("audio",) if names.audio:
            return names.audio
        case "pruning", str(name):
            return f"{names.pruning}.{name}"
        case "frames", "pictures" | "timestamps_s" as kind, int(number):  # the caller has one field for all frames
            return f"{names.location} at {_OF_FRAME[kind]} {number}"
        case "embeds", *fields:  # the caller has the tensor's fields beside the others
            return path_of(names.location, *(each for each in fields if each != "tensor"))
    return names.location


def _of_sampling(name: str, known: Mapping[str, str]) -> str:
    return known.get(name) or f"mm_processor_kwargs.{_FRAME_CHOICE.get(name, name)}"
