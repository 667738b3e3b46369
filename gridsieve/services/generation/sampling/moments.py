"""Moments: answers whose times are those of the videos that the model was shown.

    slices of a clip     0        1        2        3          4 slices, last frame at 7.5 s
    times, s            0.25     2.25     4.25     6.25  7.5   a moment begins at a slice and ends at a later time

    [{"start_time": "00:02.25", "end_time": "00:06.25", "description": "a car stops"}]

The grammar has rules for each time, so an answer is a list in the order of the starts, of times that exist, each end
after its start. In a JSON schema of the caller, a value of the format `video-time` is one of the times; a schema cannot
say an order. This module knows plans, neither requests nor the matcher.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Int32Array, MediaPlan, Modality, PromptPlan

MAX_TIMES = 4096
MAX_SCHEMA_BYTES = 2**20  # with the times
_ROUNDING = 1e-6
FORMAT = "video-time"
_LITERAL = ("const", "enum", "default", "examples")
_MOMENTS = "sampling.moments"
_SCHEMA = "sampling.json_schema"
# Text within a JSON string.
_TEXT = r'DESCRIPTION: /"([^"\\\x00-\x1f\x7f]|\\["\\\/bfnrt])*"/'


@dataclass(frozen=True, slots=True)
class MomentsFormat:
    """An answer that is a list of moments. grain_s: of their times, from the first frame on; None: slices' own."""

    grain_s: float | None = None

    def __post_init__(self) -> None:
        if self.grain_s is not None and not 0 < self.grain_s < math.inf:
            raise InvalidRequest(field=f"{_MOMENTS}.grain_s", limit="finite and above 0", value=self.grain_s)


@dataclass(frozen=True, slots=True)
class Moment:
    """A part of a video, and what an answer says of it.

    media_index: the video among the prompt's media. first_slice, last_slice: those shown from start to end. kept:
    whether pruning kept tokens of one of them.
    """

    media_index: int
    start_s: float
    end_s: float
    description: str
    first_slice: int
    last_slice: int
    kept: bool


@dataclass(frozen=True, slots=True)
class ClipTimes:
    """The times of a video. begins_s: of the first frame of each slice. slices_s: of each slice, as the prompt tells
    them. end_s: of the last frame, or, of given embeddings, the last slice."""

    media_index: int
    begins_s: tuple[float, ...]
    slices_s: tuple[float, ...]
    end_s: float

    @classmethod
    def of(cls, media_index: int, item: MediaPlan) -> ClipTimes:
        frames, count = item.timestamps_s, item.grid.t
        if not frames:
            assert item.seconds_per_grid
            begins = tuple(float(number * item.seconds_per_grid) for number in range(count))
            return cls(media_index, begins, begins, begins[-1])
        each = item.frames.group_frames or -(-len(frames) // count)
        shown = [frames[first : first + each] for first in range(0, len(frames), each)]
        begins = tuple(slice_s[0] for slice_s in shown)
        middles = tuple((slice_s[0] + slice_s[-1]) / 2 for slice_s in shown)
        return cls(media_index, begins, begins if item.timed_by_first else middles, frames[-1])

    def times_s(self, grain_s: float | None) -> tuple[float, ...]:
        """The times at which moments may begin and end, in order."""
        first = self.begins_s[0]
        if grain_s is None:
            return (*self.slices_s, *([self.end_s] if self.end_s > self.slices_s[-1] else []))
        last = math.floor((self.end_s - first) / grain_s + _ROUNDING)
        return tuple(min(self.end_s, first + number * grain_s) for number in range(last + 1))

    def slice_at(self, time_s: float) -> int:
        """The last slice that has begun."""
        return max(0, bisect_right(self.begins_s, time_s) - 1)


def clips_of(plan: PromptPlan, field: str) -> tuple[ClipTimes, ...]:
    """Of a prompt's videos. Raises InvalidRequest if it has none."""
    clips = tuple(ClipTimes.of(index, item) for index, item in enumerate(plan.media) if item.modality is Modality.VIDEO)
    if not clips:
        raise InvalidRequest("needs a video in the prompt: its times are the video's", field=field)
    return clips


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family writes times. clock: as `mm:ss.ff`, else in seconds with one decimal, as timestamps of prompts."""

    clock: bool = False

    def spelled(self, clip: ClipTimes, grain_s: float | None, field: str) -> dict[str, float]:
        """The times of a clip as JSON, in order, with what each means. Times that are written alike are one, the first.

        Raises InvalidRequest if they are too many.
        """
        least_s = (clip.end_s - clip.begins_s[0]) / MAX_TIMES
        if grain_s is not None and grain_s <= least_s:
            raise InvalidRequest(field=field, limit=f"above {least_s:.4g} for this video", value=grain_s)
        times = clip.times_s(grain_s)
        if len(times) > MAX_TIMES + 1:
            limit = f"set: the video has {len(times)} times, and at most {MAX_TIMES} can be told apart"
            raise InvalidRequest(field=field, limit=limit)
        found = dict[str, float]()
        for time_s in times:
            found.setdefault(self._text(time_s, clip.end_s), time_s)
        return found

    def _text(self, time_s: float, end_s: float) -> str:
        """Rounded, but not beyond the clip's end."""
        parts = 100 if self.clock else 10
        count = round(time_s * parts)
        if count > end_s * parts + _ROUNDING:
            count = math.floor(end_s * parts + _ROUNDING)
        whole, part = divmod(count, parts)
        return f'"{whole // 60:02d}:{whole % 60:02d}.{part:02d}"' if self.clock else f"{whole}.{part}"


def moments_rules(plan: PromptPlan, wanted: MomentsFormat, notation: Notation) -> list[str]:
    """Rules of llguidance's Lark for `document`, a list of moments.

        from_0    a moment that begins at time 0 and those after it, or what `from_1` says
        end_1     time 1 as the end of a moment, or what `end_2` says

    Of several videos each moment names its own, counted from 1, in their order.
    Raises InvalidRequest if the prompt has no video, or too many times.
    """
    clips = clips_of(plan, _MOMENTS)
    rules, following = [_TEXT], ""  # following: a moment of one of the videos after this
    for number, clip in reversed([*enumerate(clips, 1)]):
        texts = [*notation.spelled(clip, wanted.grain_s, f"{_MOMENTS}.grain_s")]
        if len(texts) > 1:
            rules += _clip_rules(number, texts, f'"video": {number}, ' if len(clips) > 1 else "", following)
            rules.append(f"clip_{number}: from_{number}_0" + (f" | {following}" if following else ""))
            following = f"clip_{number}"
    rules.append(f'document: "[" ({following} | "]")' if following else 'document: "[]"')
    return rules


def _clip_rules(number: int, texts: Sequence[str], named: str, following: str) -> Iterator[str]:
    """The rules of one video. texts: its times, at least two. named: what names it. following: see above."""
    last = len(texts) - 1
    rest = f' | ", " {following}' if following else ""
    for place, text in enumerate(texts):
        quoted, after = json.dumps(text), place + 1
        if place:
            yield f"end_{number}_{place}: {quoted}" + (f" | end_{number}_{after}" if place < last else "")
        if place < last:
            begin, end = json.dumps(f'{{{named}"start_time": {text}, "end_time": '), json.dumps(', "description": ')
            later = f" | from_{number}_{after}" if after < last else ""
            times = f"{begin} end_{number}_{after} {end}"
            yield f'from_{number}_{place}: {times} DESCRIPTION "}}" more_{number}_{place}{later}'
            yield f'more_{number}_{place}: "]" | ", " from_{number}_{place}{rest}'


def has_times(schema: str) -> bool:
    """Whether a JSON schema may have a value of the format `video-time`."""
    return FORMAT in schema


def schema_with_times(schema: str, plan: PromptPlan, notation: Notation) -> str:
    """A JSON schema, as text, in which each value of the format `video-time` is one of the video's times.

    `type` `number` means seconds; `string` (or none), the family's notation. `multipleOf`: a grain, instead of slices.
    `video`: which of several videos, counted from 1.
    Raises InvalidRequest if there is no such video, or for too many times. What cannot be read stays as it is.
    """
    try:
        return json.dumps(_Timed(plan, notation).schema(json.loads(schema)))
    except (ValueError, RecursionError):
        return schema  # `Grammars` tells what is wrong with it


class _Timed:
    """Puts times into a schema."""

    def __init__(self, plan: PromptPlan, notation: Notation) -> None:
        self._plan, self._notation = plan, notation
        self._bytes = 0

    def schema(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.schema(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        if schema.get("format") != FORMAT:
            return {key: value if key in _LITERAL else self.schema(value) for key, value in schema.items()}
        clips = clips_of(self._plan, _SCHEMA)
        number, kind, grain_s = schema.get("video"), schema.get("type", "string"), schema.get("multipleOf")
        if number is None and len(clips) == 1:
            number = 1
        if type(number) is not int or not 1 <= number <= len(clips):
            raise InvalidRequest(f"has a {FORMAT} whose `video` must be 1 to {len(clips)}, got {number}", field=_SCHEMA)
        if kind not in ("number", "string"):
            raise InvalidRequest(f"has a {FORMAT} whose `type` must be number or string, got {kind}", field=_SCHEMA)
        if grain_s is not None and not (type(grain_s) in (int, float) and 0 < grain_s < math.inf):
            raise InvalidRequest(f"has a {FORMAT} whose `multipleOf` must be above 0, got {grain_s}", field=_SCHEMA)
        written = self._notation if kind == "string" else Notation()
        texts = [json.loads(text) for text in written.spelled(clips[number - 1], grain_s, _SCHEMA)]
        self._bytes += sum(len(str(text)) for text in texts)
        if self._bytes > MAX_SCHEMA_BYTES:
            limit = f"at most {MAX_SCHEMA_BYTES} characters of times, of all {FORMAT} together"
            raise InvalidRequest(field=_SCHEMA, limit=limit, remedy="define it once, and use `$ref`")
        others = {key: value for key, value in schema.items() if key not in ("format", "video", "type", "multipleOf")}
        return others | {"enum": texts if kind == "number" else [str(text) for text in texts]}


class MomentsReader:
    """Reads the moments of answers.

    plan, wanted, notation: as the grammar had them.
    """

    def __init__(self, plan: PromptPlan, wanted: MomentsFormat, notation: Notation) -> None:
        self._clips = clips_of(plan, _MOMENTS)
        self._times = [notation.spelled(clip, wanted.grain_s, _MOMENTS) for clip in self._clips]
        self._slice_tokens = [item.grid.slice_tokens for item in plan.media]

    def read(self, text: str, kept: Mapping[int, Int32Array]) -> list[Moment]:
        """The moments of an answer; of one that was cut off, those that are whole.

        kept: by media index, the kept tokens of its grid, int32 [K].
        """
        shown = {index: set((tokens // self._slice_tokens[index]).tolist()) for index, tokens in kept.items()}
        return [moment for told in _objects(text) if (moment := self._moment(told, shown))]

    def _moment(self, told: Mapping[str, Any], shown: Mapping[int, set[int]]) -> Moment | None:
        """None for an object that is no moment, such as one in a thought whose end was not found."""
        try:
            number = told.get("video", 1) - 1
            clip, times = self._clips[number], self._times[number]
            start_s, end_s = (times[json.dumps(told[name])] for name in ("start_time", "end_time"))
        except (LookupError, TypeError):
            return None
        first, last = clip.slice_at(start_s), clip.slice_at(end_s)
        kept = not shown[clip.media_index].isdisjoint(range(first, last + 1))
        return Moment(clip.media_index, start_s, end_s, str(told.get("description")), first, last, kept)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The whole objects at the beginning of a list, which may be cut off."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            told, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        yield told
        at = text.find("{", at)
