"""Answers in OpenAI's shapes: the object of a complete answer, and the chunks of a streamed one.

Source: OpenAI's API reference, "chat completion object" and "chat completion chunk object". `usage.gridsieve` is ours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from gridsieve.client.answer import Accepted, Answer, Choice, Delta, Finished, Timings, TopLogprobs, Usage
from gridsieve.client.attention import Attention
from gridsieve.client.captions import captions
from gridsieve.client.tools import ToolCallDelta
from gridsieve.common.contract.errors import GridsieveError
from gridsieve.services.gateway.chat.request import MomentsFormat, StreamOptions
from gridsieve.services.gateway.http.errors import body_of
from gridsieve.services.gateway.questions import ServerSent, server_sent

_DIGITS = 7  # after the point, of the attention


class CompletionWriter:
    """One answer: its object, or its chunks; an `AnswerWriter`.

    options: whether chunks have `usage`: none does, all do (null until the last), or each has that so far.
    moments: that the answer is in moments, of which the choice and its last chunk then have a list.
    """

    def __init__(
        self, options: StreamOptions, request_id: str, model: str, *, moments: MomentsFormat | None = None
    ) -> None:
        self._moments = moments
        self._id, self._model, self._created_s = request_id, model, int(time.time())
        self._tells_usage = bool(options.include_usage)
        self._continuous = bool(options.continuous_usage_stats)
        self._prompt_tokens = self._completion_tokens = 0
        self._begun: set[int] = set()  # the completions whose first chunk was sent

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The object of a complete answer."""
        choices = [
            {
                "index": choice.index,
                "message": _message(choice),
                "logprobs": _logprobs(choice),
                "finish_reason": choice.reason.value,
                **self._told(choice),
            }
            for choice in answer.choices
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": _usage(answer.usage, answer.timings)}

    def begin(self, accepted: Accepted) -> tuple[()]:
        self._prompt_tokens = accepted.usage.prompt_tokens
        return ()

    def next(self, event: Delta | Finished) -> Iterator[ServerSent]:
        index = event.choice_index
        if isinstance(event, Delta):
            self._completion_tokens += len(event.token_ids)
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
        if isinstance(event, Finished):
            yield self._chunk(index, {}, reason=event.reason.value, told=self._told(event))
            return
        if event.thought:
            yield self._chunk(index, {"reasoning_content": event.thought})
        if event.text or event.tool_calls or event.logprobs:
            told: dict[str, Any] = {}
            if event.text or not event.tool_calls:
                told["content"] = event.text
            if event.tool_calls:
                told["tool_calls"] = [_call_delta(part) for part in event.tool_calls]
            yield self._chunk(index, told, logprobs=_logprobs(event))

    def end(self, usage: Usage, timings: Timings) -> Iterator[ServerSent]:
        if self._tells_usage:
            head = self._head("chat.completion.chunk")
            yield server_sent({**head, "choices": [], "usage": _usage(usage, timings)})
        yield {"data": "[DONE]"}

    def failed(self, error: GridsieveError) -> ServerSent:
        return server_sent(body_of(error))

    def _told(self, of: Choice | Finished) -> dict[str, Any]:
        """What a choice has of its moments, and of what it attended to."""
        told: dict[str, Any] = {} if of.attention is None else {"attention": _attention(of.attention)}
        return told if self._moments is None else told | moments_of(of, self._moments)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._id}",
            "object": kind,
            "created": self._created_s,
            "model": self._model,
            "service_tier": None,
            "system_fingerprint": None,
        }

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        logprobs: Any = None,
        reason: str | None = None,
        told: Mapping[str, Any] | None = None,
    ) -> ServerSent:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **(told or {})}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._tells_usage:
            chunk["usage"] = _counts(self._prompt_tokens, self._completion_tokens) if self._continuous else None
        return server_sent(chunk)


def _counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The token counts of `usage`."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _message(choice: Choice) -> dict[str, Any]:
    """content: None where there are only tool calls."""
    content = choice.text if choice.text or not choice.tool_calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.thought:
        message["reasoning_content"] = choice.thought
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return message


def _call_delta(part: ToolCallDelta) -> dict[str, Any]:
    if not part.name:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _usage(usage: Usage, timings: Timings) -> dict[str, Any]:
    """Token counts after pruning, which are what is computed, and under `gridsieve` those before it and the times."""
    return {
        **_counts(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thought_tokens},
        "gridsieve": measured(usage, timings),
    }


def moments_of(of: Choice | Finished, form: MomentsFormat) -> dict[str, Any]:
    """The moments of an answer and, where the request asks for them, captions."""
    told: dict[str, Any] = {"moments": [asdict(moment) for moment in of.moments]}
    return told | {"captions": captions(of.moments, form.captions)} if form.captions else told


def measured(usage: Usage, timings: Timings) -> dict[str, Any]:
    """What OpenAI's usage has no field for."""
    return {
        "prompt_tokens_full": usage.prompt_tokens_full,
        "draft_tokens": usage.draft_tokens,
        "accepted_draft_tokens": usage.accepted_draft_tokens,
        "media": [
            {
                "modality": item.modality.value,
                "grid": {"t": item.grid.t, "h": item.grid.h, "w": item.grid.w},
                "kept_tokens": item.num_kept,
                "pruning_rate": item.pruning_rate,
                "repaired_frames": item.repaired_frames,
                "missing_frames": item.missing_frames,
                "dropped_frames": item.dropped_frames,
                "sampling_mode": item.sampling_mode,
                "sampled_frames": item.sampled_frames,
                "heard_s": item.heard_s,
                "first_slice_only": item.first_slice_only,
            }
            for item in usage.media
        ],
        "time_to_first_token_s": timings.time_to_first_token_s,
        "stages_s": timings.stages_s,
        "generate_s": timings.generate_s,
    }


def _attention(attention: Attention) -> dict[str, Any]:
    """As gRPC's `Attention`; `token_weights` has a list for each token of the answer, or is null."""
    return {
        "text_share": _rounded(attention.text_share),
        "tokens": attention.tokens,
        "media": [
            {
                "grid": asdict(item.grid),
                "kept": item.kept.tolist(),
                "weights": _rounded(item.weights.reshape(-1)[item.kept]),
                "token_shares": _rounded(item.token_shares),
                "token_weights": None if item.token_weights is None else _rounded(item.token_weights),
            }
            for item in attention.media
        ],
    }


def _rounded(values: Any) -> Any:
    """Numbers of few digits: an answer may have hundreds of thousands of weights."""
    return np.round(np.asarray(values, np.float64), _DIGITS).tolist()


def _logprobs(of: Choice | Delta) -> dict[str, Any] | None:
    return {"content": token_logprobs(of), "refusal": None} if of.logprobs else None


def token_logprobs(of: Choice | Delta) -> list[dict[str, Any]]:
    """Each token with the most likely ones at its position; [] where their log-probabilities were not asked for."""
    if not of.logprobs:
        return []
    tops: tuple[TopLogprobs, ...] = of.top_logprobs or ((),) * len(of.logprobs)
    return [
        {**_token(token_id, logprob, of), "top_logprobs": [_token(other, value, of) for other, value in top]}
        for token_id, logprob, top in zip(of.token_ids, of.logprobs, tops, strict=True)
    ]


def _token(token_id: int, logprob: float, of: Choice | Delta) -> dict[str, Any]:
    """bytes: those that the token adds to the text, of which `token` shows what is no part of a character."""
    text = of.token_texts.get(token_id, "")
    return {"token": text, "logprob": logprob, "bytes": list(of.token_bytes.get(token_id, text.encode()))}
