"""Answers in OpenAI's shapes: the response object, and the events of a stream that build it.

    created  in_progress  item*  completed | incomplete | failed

    message         output_item.added  content_part.added  output_text.delta*  output_text.done  content_part.done
                    output_item.done
    reasoning       the same, with reasoning_text in place of output_text; or where the request asks for a summary,
                    with reasoning_summary_part and reasoning_summary_text
    function_call   output_item.added  function_call_arguments.delta*  function_call_arguments.done  output_item.done

One item ends before the next begins. Source: OpenAI's API reference, "the response object" and "streaming events".
`usage.gridsieve` is ours.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

from gridsieve.client.answer import Accepted, Answer, Delta, Finished, FinishReason, Timings, Usage
from gridsieve.client.tools import ToolCallDelta
from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, Overloaded
from gridsieve.services.gateway.chat.completion import measured, moments_of, token_logprobs
from gridsieve.services.gateway.chat.request import MomentsFormat
from gridsieve.services.gateway.questions import ServerSent, server_sent
from gridsieve.services.gateway.responses.request import NamedTool, ResponsesRequest


@dataclass(slots=True)
class _Text:
    """A message that is being told."""

    id: str
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    part_event: ClassVar = "content_part"
    place: ClassVar = {"content_index": 0}

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


@dataclass(slots=True)
class _Thought:
    """What the model thinks before its answer. is_summary: it is told as OpenAI tells summaries of thoughts."""

    id: str
    is_summary: bool
    text: str = ""

    @property
    def text_event(self) -> str:
        return "reasoning_summary_text" if self.is_summary else "reasoning_text"

    @property
    def part_event(self) -> str:
        return "reasoning_summary_part" if self.is_summary else "content_part"

    @property
    def place(self) -> dict[str, int]:
        return {"summary_index" if self.is_summary else "content_index": 0}

    def part(self) -> dict[str, Any]:
        return {"type": "summary_text" if self.is_summary else "reasoning_text", "text": self.text}

    def item(self, status: str) -> dict[str, Any]:
        parts = [] if status == "in_progress" else [self.part()]
        summary, content = (parts, []) if self.is_summary else ([], parts)
        return {"type": "reasoning", "id": self.id, "status": status, "summary": summary, "content": content}


@dataclass(slots=True)
class _Call:
    """A function call that is being told. index: of the call in the completion."""

    id: str
    index: int
    call_id: str
    name: str
    arguments: str = ""

    def item(self, status: str) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


class ResponseWriter:
    """One answer: its object, or its events; an `AnswerWriter`.

    fields: those of the request that it repeats. keep: stores the object of an answer, and returns whether it is
    stored; None: it is not to be. moments: that the answer is in moments, of which the whole object then has a list.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        model: str,
        keep: Callable[[dict[str, Any]], bool] | None,
        moments: MomentsFormat | None = None,
    ) -> None:
        self._id = uuid.uuid4().hex  # not the request's, which callers may give to several
        self._keep = keep
        self._moments = moments
        self._found: dict[str, Any] = {}  # moments, and captions
        self._fields = fields | {"model": model, "store": keep is not None}
        self._created_s = int(time.time())
        self._events = 0
        self._output: list[dict[str, Any]] = []
        self._item: _Text | _Thought | _Call | None = None
        self._has_thought = False
        self._early_logprobs: list[dict[str, Any]] = []  # of tokens before the first text
        self._is_cut_off = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The object of a complete answer. It has log-probabilities if there is neither a thought nor a call."""
        (choice,) = answer.choices
        text = Delta(
            choice.index,
            choice.text,
            choice.token_ids,
            () if choice.tool_calls else choice.logprobs,
            choice.top_logprobs,
            choice.token_texts,
            choice.token_bytes,
            tuple(
                ToolCallDelta(index, call.id, call.name, call.arguments) for index, call in enumerate(choice.tool_calls)
            ),
            choice.thought,
        )
        finished = Finished(choice.index, choice.reason, answer.usage, answer.timings, choice.moments)
        for _ in chain(self.next(text), self.next(finished)):
            pass
        return self._ended(answer.usage, answer.timings)

    def begin(self, accepted: Accepted) -> Iterator[ServerSent]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._object("in_progress"))

    def next(self, event: Delta | Finished) -> Iterator[ServerSent]:
        if isinstance(event, Finished):
            self._is_cut_off = event.reason is FinishReason.LENGTH
            if self._moments is not None:
                self._found = moments_of(event, self._moments)
            if not self._output and self._item is None:
                yield from self._begin_item(_Text(self._next_id("msg"), logprobs=self._early_logprobs))
            yield from self._end_item("incomplete" if self._is_cut_off else "completed")
            return
        # What arrived together: the rest of the call that is being told, then text, then other calls.
        told = self._item.index if isinstance(self._item, _Call) else None
        for part in event.tool_calls:
            if part.index == told:
                yield from self._call(part)
        if event.thought:
            yield from self._think(event.thought)
        yield from self._text(event)
        for part in event.tool_calls:
            if part.index != told:
                yield from self._call(part)

    def end(self, usage: Usage, timings: Timings) -> Iterator[ServerSent]:
        yield self._event(self._status(), response=self._ended(usage, timings))

    def failed(self, error: GridsieveError) -> ServerSent:
        code = "server_error"
        if isinstance(error, Overloaded | InvalidRequest):
            code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "invalid_prompt"
        told = {"code": code, "message": str(error)}
        return self._event("failed", response=self._object("failed", error=told) | {"store": False})

    def _think(self, text: str) -> Iterator[ServerSent]:
        item, self._has_thought, self._early_logprobs = self._item, True, []
        if not isinstance(item, _Thought):
            item = _Thought(self._next_id("rs"), is_summary=bool(self._fields["reasoning"]["summary"]))
            yield from self._begin_item(item)
        item.text += text
        yield self._event(f"{item.text_event}.delta", **self._place(), delta=text)

    def _text(self, delta: Delta) -> Iterator[ServerSent]:
        item, logprobs = self._item, [] if self._has_thought else token_logprobs(delta)
        if not isinstance(item, _Text):
            if not delta.text:
                self._early_logprobs += [] if delta.tool_calls else logprobs
                return
            item = _Text(self._next_id("msg"))
            yield from self._begin_item(item)
            logprobs, self._early_logprobs = self._early_logprobs + logprobs, []
        if delta.text or logprobs:
            item.text += delta.text
            item.logprobs += logprobs
            yield self._event("output_text.delta", **self._place(), delta=delta.text, logprobs=logprobs)

    def _call(self, part: ToolCallDelta) -> Iterator[ServerSent]:
        item = self._item
        if not isinstance(item, _Call) or item.index != part.index:
            item = _Call(self._next_id("fc"), part.index, part.id, part.name)
            yield from self._begin_item(item)
        if part.arguments:
            item.arguments += part.arguments
            yield self._event("function_call_arguments.delta", **self._place(), delta=part.arguments)

    def _begin_item(self, item: _Text | _Thought | _Call) -> Iterator[ServerSent]:
        yield from self._end_item("completed")
        self._item = item
        yield self._event("output_item.added", output_index=len(self._output), item=item.item("in_progress"))
        if not isinstance(item, _Call):
            yield self._event(f"{item.part_event}.added", **self._place(), part=item.part())

    def _end_item(self, status: str) -> Iterator[ServerSent]:
        if self._item is None:
            return
        if isinstance(self._item, _Text):
            part = self._item.part()
            yield self._event("output_text.done", **self._place(), text=part["text"], logprobs=part["logprobs"])
            yield self._event("content_part.done", **self._place(), part=part)
        elif isinstance(self._item, _Thought):
            yield self._event(f"{self._item.text_event}.done", **self._place(), text=self._item.text)
            yield self._event(f"{self._item.part_event}.done", **self._place(), part=self._item.part())
        else:
            arguments, name = self._item.arguments, self._item.name
            yield self._event("function_call_arguments.done", **self._place(), arguments=arguments, name=name)
            if not _is_object(arguments):  # an end token cut it off
                status = "incomplete"
        item, index = self._item.item(status), len(self._output)
        self._item = None
        self._output.append(item)
        yield self._event("output_item.done", output_index=index, item=item)

    def _next_id(self, kind: str) -> str:
        return f"{kind}_{self._id}_{len(self._output) + (self._item is not None)}"

    def _place(self) -> dict[str, Any]:
        """Where the events of the item that is being told belong."""
        assert self._item is not None
        place = {"item_id": self._item.id, "output_index": len(self._output)}
        return place if isinstance(self._item, _Call) else place | self._item.place

    def _event(self, kind: str, **fields: Any) -> ServerSent:
        name = f"response.{kind}"
        number, self._events = self._events, self._events + 1
        return server_sent({"type": name, "sequence_number": number, **fields}, name)

    def _ended(self, usage: Usage, timings: Timings) -> dict[str, Any]:
        """The object of the whole answer, which is stored if it is to be."""
        told = self._object(self._status(), usage=_usage(usage, timings)) | self._found
        told["store"] = self._keep is not None and self._keep(told)
        return told

    def _status(self) -> str:
        return "incomplete" if self._is_cut_off else "completed"

    def _object(
        self, status: str, *, usage: dict[str, Any] | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output,
            "usage": usage,
            **self._fields,
        }


def repeated(request: ResponsesRequest) -> dict[str, Any]:
    """The request's fields, with OpenAI's defaults where they are those of this service, too."""
    text, reasoning, choice = request.text, request.reasoning, request.tool_choice
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary or reasoning.generate_summary if reasoning else None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "temperature": request.temperature,
        "text": {
            "format": text.format.model_dump(by_alias=True) if text and text.format else {"type": "text"},
            "verbosity": text.verbosity if text else None,
        },
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _usage(usage: Usage, timings: Timings) -> dict[str, Any]:
    """Token counts after pruning, which are what is computed, and under `gridsieve` those before it and the times."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "gridsieve": measured(usage, timings),
    }
