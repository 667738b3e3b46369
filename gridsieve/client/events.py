"""Converts protobuf responses to the events of a request, and of a live session."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message as ProtobufMessage

from gridsieve.client.answer import (
    Accepted,
    Answer,
    Delta,
    Event,
    Finished,
    FinishReason,
    MediaUsage,
    Moment,
    Progress,
    Timings,
    Usage,
    choice_of,
)
from gridsieve.client.attention import Attention, Float32Array, MediaAttention, over_grid
from gridsieve.client.live_events import (
    DropReason,
    Filmed,
    LiveDelta,
    LiveDropped,
    LiveEvent,
    LiveEvicted,
    LiveFinished,
    LiveRefused,
    LiveRestarted,
    LiveSlice,
    LiveStream,
    LiveUsage,
    StreamState,
    WallClock,
)
from gridsieve.client.tools import ToolCallDelta
from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, PeerContract, Unavailable
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.wire import int32_array, modality_of
from gridsieve.v1 import generation_pb2

_REASONS = {generation_pb2.FinishReason.Value(f"FINISH_REASON_{each.name}"): each for each in FinishReason}
DROP_REASONS = {generation_pb2.DropReason.Value(f"DROP_REASON_{each.name}"): each for each in DropReason}
WALL_CLOCKS = {generation_pb2.WallClock.Value(f"WALL_CLOCK_{each.name}"): each for each in WallClock}
STREAM_STATES = {generation_pb2.StreamState.Value(f"STREAM_STATE_{each.name}"): each for each in StreamState}

Name = TypeVar("Name", bound=Enum)


def event_of(response: generation_pb2.GenerateResponse) -> Event:
    """The event in a response. Raises PeerContract for a kind of event that this client does not know."""
    match response.WhichOneof("response"):
        case "accepted":
            return Accepted(response.accepted.request_id, usage_of(response.accepted.usage))
        case "progress":
            return Progress(**_fields(response.progress))
        case "delta":
            return _delta(response.delta)
        case "finished":
            return _finished(response.finished)
        case _:
            raise PeerContract("the service sent an unknown kind of event")


class LiveEvents:
    """The events of a live session, from its responses in order. questions: by ask_id, those that may be answered."""

    def __init__(self, request_id: str, questions: Mapping[str, str]) -> None:
        self._request_id = request_id
        self._questions = questions
        self._deltas = defaultdict[str, list[Delta]](list)  # by ask_id, of questions that are not finished
        self._seen_s: float | None = None

    def of(self, response: generation_pb2.LiveResponse) -> LiveEvent:
        """Raises PeerContract for a kind of event that this client does not know."""
        match response.WhichOneof("response"):
            case "delta":
                delta = _delta(response.delta.delta)
                self._deltas[response.delta.ask_id].append(delta)
                return LiveDelta(response.delta.ask_id, delta)
            case "finished":
                return self._answered(response.finished)
            case "slice":
                told = response.slice
                self._seen_s = told.last_time_s
                return LiveSlice(
                    told.first_time_s,
                    told.last_time_s,
                    Grid(**_fields(told.grid)),
                    int32_array(told.kept),
                    LiveUsage(**_fields(told.usage)),
                    _filmed(told),
                )
            case "evicted":
                return LiveEvicted(**_fields(response.evicted))
            case "dropped":
                reason = known(DROP_REASONS, response.dropped.reason, "drop reason")
                return LiveDropped(response.dropped.frames, reason, response.dropped.error)
            case "restarted":
                return LiveRestarted(response.restarted.segments)
            case "stream":
                return LiveStream(known(STREAM_STATES, response.stream.state, "stream state"), response.stream.reason)
            case _:
                raise PeerContract("the service sent an unknown kind of event")

    def _answered(self, message: generation_pb2.LiveFinished) -> LiveFinished | LiveRefused:
        if message.ask_id not in self._questions:
            raise PeerContract(f"the service answered {message.ask_id!r}, which was not asked")
        question, usage = self._questions[message.ask_id], LiveUsage(**_fields(message.usage))
        deltas = self._deltas.pop(message.ask_id, [])
        if message.error:
            return LiveRefused(message.ask_id, question, error_of(message))
        finished = _finished(message.finished)
        answer = Answer(self._request_id, (choice_of(finished, deltas),), finished.usage, finished.timings)
        return LiveFinished(message.ask_id, question, answer, self._seen_s, usage, _filmed(message))


def _filmed(message: generation_pb2.LiveSlice | generation_pb2.LiveFinished) -> Filmed | None:
    if message.wall_clock == generation_pb2.WALL_CLOCK_UNSPECIFIED:
        return None
    clock = known(WALL_CLOCKS, message.wall_clock, "wall clock")
    return Filmed(message.wall_time_s, clock, message.snapshot)


def error_of(message: generation_pb2.LiveFinished) -> GridsieveError:
    """Why a question has no answer."""
    if message.finished.reason != generation_pb2.FINISH_REASON_REFUSED:  # a service was away
        return Unavailable(message.error, "generation")
    return refusal_of(message)


def refusal_of(message: generation_pb2.LiveFinished | generation_pb2.LiveDropped) -> InvalidRequest:
    field = message.error_field or None
    return InvalidRequest(message.error.removeprefix(f"{field} "), field=field)


def _fields(message: ProtobufMessage) -> dict[str, Any]:
    """The values of a message whose fields have the names of an event's."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def known(names: Mapping[int, Name], number: int, what: str) -> Name:
    """Raises PeerContract for a number of an enum that this client does not know."""
    if number not in names:
        raise PeerContract(f"the service sent the unknown {what} {number}")
    return names[number]


def _delta(delta: generation_pb2.Delta) -> Delta:
    for top in delta.top_logprobs:
        if len(top.token_ids) != len(top.logprobs):
            raise PeerContract(f"the service sent {len(top.logprobs)} log-probabilities of {len(top.token_ids)} tokens")
    return Delta(
        delta.choice_index,
        delta.text,
        tuple(delta.token_ids),
        tuple(delta.logprobs),
        tuple(tuple(zip(top.token_ids, top.logprobs, strict=True)) for top in delta.top_logprobs),
        dict(delta.token_texts),
        dict(delta.token_bytes),
        tuple(ToolCallDelta(**_fields(each)) for each in delta.tool_calls),
        delta.thought,
    )


def _finished(finished: generation_pb2.Finished) -> Finished:
    reason = known(_REASONS, finished.reason, "finish reason")
    timings, moments = Timings(**_fields(finished.timings)), tuple(Moment(**_fields(each)) for each in finished.moments)
    usage, attention = usage_of(finished.usage), None
    if finished.HasField("attention"):
        attention = _attention(finished.attention, usage)
    return Finished(finished.choice_index, reason, usage, timings, moments, attention)


def _attention(message: generation_pb2.Attention, usage: Usage) -> Attention:
    """Raises PeerContract if sizes contradict one another, or the media of `usage`."""
    count, media = len(message.tokens), list[MediaAttention]()
    if len(message.media) != len(usage.media):
        raise PeerContract(f"the service sent attention on {len(message.media)} of {len(usage.media)} media items")
    for each, item in zip(message.media, usage.media, strict=True):
        kept = np.fromiter(each.kept, np.int32)
        weights, by_token = _floats(each.weights), _floats(each.token_weights)
        sizes = (kept.size, len(each.token_shares), by_token.size or count * kept.size)
        inside = not kept.size or (kept.min() >= 0 and kept.max() < item.grid.tokens)
        if sizes != (weights.size, count, count * kept.size) or not inside:
            raise PeerContract("the service sent attention that does not fit the kept tokens and the answer's tokens")
        media.append(
            MediaAttention(
                item.grid,
                kept,
                over_grid(item.grid, kept, weights),
                _floats(each.token_shares),
                by_token.reshape(count, kept.size) if by_token.size else None,
            )
        )
    return Attention(tuple(media), message.text_share, tuple(message.tokens))


def _floats(values: Iterable[float]) -> Float32Array:
    return np.fromiter(values, np.float32)


def usage_of(usage: generation_pb2.Usage) -> Usage:
    media = [
        MediaUsage(**_fields(each) | {"modality": modality_of(each.modality), "grid": Grid(**_fields(each.grid))})
        for each in usage.media
    ]
    return Usage(**_fields(usage) | {"media": tuple(media)})
