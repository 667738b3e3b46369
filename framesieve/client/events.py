"""Converts protobuf responses to the events of a request, and of a live session."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from framesieve.client.answer import (
    Accepted,
    Answer,
    Delta,
    Event,
    Finished,
    FinishReason,
    MediaUsage,
    Progress,
    Timings,
    Usage,
    choice_of,
)
from framesieve.client.live_events import (
    DropReason,
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
)
from framesieve.client.tools import ToolCallDelta
from framesieve.common.contract.errors import FramesieveError, InvalidRequest, PeerContract, Unavailable
from framesieve.common.contract.plan import Grid
from framesieve.common.contract.wire import int32_array, modality_of
from framesieve.v1 import generation_pb2

_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
    generation_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_DROPS = {
    generation_pb2.DROP_REASON_LATE: DropReason.LATE,
    generation_pb2.DROP_REASON_UNAVAILABLE: DropReason.UNAVAILABLE,
    generation_pb2.DROP_REASON_REFUSED: DropReason.REFUSED,
}
_STATES = {
    generation_pb2.STREAM_STATE_ENDED: StreamState.ENDED,
    generation_pb2.STREAM_STATE_LOST: StreamState.LOST,
}


def event_of(response: generation_pb2.GenerateResponse) -> Event:
    """The event in a response. Raises PeerContract for a kind of event that this client does not know."""
    match response.WhichOneof("response"):
        case "accepted":
            return Accepted(response.accepted.request_id, _usage(response.accepted.usage))
        case "progress":
            progress = response.progress
            return Progress(progress.media_index, progress.decoded_slices, progress.encoded_slices)
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
                grid = Grid(told.grid.t, told.grid.h, told.grid.w)
                return LiveSlice(
                    told.first_time_s, told.last_time_s, grid, int32_array(told.kept), _live_usage(told.usage)
                )
            case "evicted":
                return LiveEvicted(response.evicted.segments, response.evicted.tokens)
            case "dropped":
                reason = _DROPS.get(response.dropped.reason)
                if reason is None:
                    raise PeerContract(f"the service sent the unknown drop reason {response.dropped.reason}")
                return LiveDropped(response.dropped.frames, reason, response.dropped.error)
            case "restarted":
                return LiveRestarted(response.restarted.segments)
            case "stream":
                state = _STATES.get(response.stream.state)
                if state is None:
                    raise PeerContract(f"the service sent the unknown stream state {response.stream.state}")
                return LiveStream(state, response.stream.reason)
            case _:
                raise PeerContract("the service sent an unknown kind of event")

    def _answered(self, message: generation_pb2.LiveFinished) -> LiveFinished | LiveRefused:
        if message.ask_id not in self._questions:
            raise PeerContract(f"the service answered {message.ask_id!r}, which was not asked")
        question, usage = self._questions[message.ask_id], _live_usage(message.usage)
        deltas = self._deltas.pop(message.ask_id, [])
        if message.error:
            return LiveRefused(message.ask_id, question, _refusal(message))
        finished = _finished(message.finished)
        answer = Answer(self._request_id, (choice_of(finished, deltas),), finished.usage, finished.timings)
        return LiveFinished(message.ask_id, question, answer, self._seen_s, usage)


def _refusal(message: generation_pb2.LiveFinished) -> FramesieveError:
    if message.finished.reason != generation_pb2.FINISH_REASON_REFUSED:  # a service was away
        return Unavailable(message.error, "generation")
    field = message.error_field if message.HasField("error_field") else None
    return InvalidRequest(message.error.removeprefix(f"{field} "), field=field)


def _live_usage(usage: generation_pb2.LiveUsage) -> LiveUsage:
    return LiveUsage(**{field.name: getattr(usage, field.name) for field in usage.DESCRIPTOR.fields})


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
        tuple(ToolCallDelta(each.index, each.id, each.name, each.arguments) for each in delta.tool_calls),
    )


def _finished(finished: generation_pb2.Finished) -> Finished:
    if finished.reason not in _REASONS:
        raise PeerContract(f"the service sent the unknown finish reason {finished.reason}")
    return Finished(
        finished.choice_index, _REASONS[finished.reason], _usage(finished.usage), _timings(finished.timings)
    )


def _usage(usage: generation_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens_full=usage.prompt_tokens_full,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        media=tuple(
            MediaUsage(
                modality=modality_of(item.modality),
                grid=Grid(item.grid.t, item.grid.h, item.grid.w),
                num_kept=item.num_kept,
                repaired_frames=item.repaired_frames,
                first_slice_only=item.first_slice_only,
                missing_frames=item.missing_frames,
                dropped_frames=item.dropped_frames,
            )
            for item in usage.media
        ),
        cached_prompt_tokens=usage.cached_prompt_tokens,
        draft_tokens=usage.draft_tokens,
        accepted_draft_tokens=usage.accepted_draft_tokens,
    )


def _timings(timings: generation_pb2.Timings) -> Timings:
    return Timings(
        time_to_first_token_s=timings.time_to_first_token_s,
        fetch_s=timings.fetch_s,
        plan_s=timings.plan_s,
        decode_s=timings.decode_s,
        resize_s=timings.resize_s,
        wait_for_encoder_s=timings.wait_for_encoder_s,
        encode_s=timings.encode_s,
        prune_s=timings.prune_s,
        transfer_s=timings.transfer_s,
        wait_for_prefill_s=timings.wait_for_prefill_s,
        prefill_s=timings.prefill_s,
        generate_s=timings.generate_s,
    )
