"""What a live session's `open` and its questions ask for, checked: their messages end here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from gridsieve.common.contract.errors import InvalidRequest, within
from gridsieve.common.contract.requests import check_prompt
from gridsieve.common.contract.retention import EVS_CAUSAL, NONE, PIXEL_CHANGE, SUGGESTED, ItemPruning
from gridsieve.common.contract.wire import completed, pruning_message, pruning_of
from gridsieve.families import not_live
from gridsieve.services.generation.answers.messages import sampling_request
from gridsieve.services.generation.live.ask import Ask, Trigger
from gridsieve.services.generation.live.frames import microseconds
from gridsieve.services.generation.request.request import Adapter
from gridsieve.services.generation.served_model import LiveModel, ServedModel
from gridsieve.v1 import generation_pb2, prompt_pb2

FPS, MAX_FPS = 2.0, 60.0
WINDOW_TOKENS, ANSWER_TOKENS, MIN_TOKENS = 4096, 1024, 16
MAX_TRIGGERS = 16
MAX_ASK_ID_CHARACTERS = 128
SOURCE_NAME, MAX_SOURCE_NAME_CHARACTERS = "source", 64
NOTHING_PRUNED = ItemPruning(method=NONE)


@dataclass(frozen=True, slots=True)
class Options:
    """messages: the conversation before the first frame. window_s: infinite without a limit. max_pixels: of a frame;
    None: the checkpoint's own. source: a URL, or empty. source_name: in metrics and logs. reopens: whether it is opened
    again whatever ends it."""

    messages: Sequence[prompt_pb2.Message]
    pruning: ItemPruning
    fps: float
    max_pixels: int | None
    window_tokens: int
    answer_tokens: int
    window_s: float
    adapter: Adapter | None
    triggers: Sequence[Trigger]
    live: LiveModel
    source: str
    source_name: str
    reopens: bool
    snapshots: generation_pb2.Snapshots

    @classmethod
    def of(cls, message: generation_pb2.LiveOpen, model: ServedModel) -> Self:
        """Raises InvalidRequest."""
        if model.live is None:
            raise InvalidRequest(not_live())
        for index, each in enumerate(message.messages):
            _check_text(each.parts, f"open.messages[{index}].parts")
        if message.messages and message.messages[-1].role not in (prompt_pb2.ROLE_SYSTEM, prompt_pb2.ROLE_ASSISTANT):
            raise InvalidRequest(
                "must not end with a turn of the user, which begins with the first frame", field="open.messages"
            )
        fps = message.fps if message.HasField("fps") else FPS
        if not 0 < fps <= MAX_FPS:
            raise InvalidRequest(field="open.fps", limit=f"above 0 and at most {MAX_FPS:g}", value=fps)
        window_s = message.window_s if message.HasField("window_s") else math.inf
        if not window_s > 0:
            raise InvalidRequest(field="open.window_s", limit="above 0", value=window_s)
        room = min(model.live.tokens, model.limit.tokens)
        answer = message.answer_tokens if message.HasField("answer_tokens") else ANSWER_TOKENS
        as_many = max(min(WINDOW_TOKENS, room - answer), MIN_TOKENS)
        window = message.window_tokens if message.HasField("window_tokens") else as_many
        for name, value in (("window_tokens", window), ("answer_tokens", answer)):
            if value < MIN_TOKENS:
                raise InvalidRequest(field=f"open.{name}", limit=f"at least {MIN_TOKENS}", value=value)
        if window + answer > room:
            raise InvalidRequest(
                f"and answer_tokens together must be at most {model.live.tokens}, what live sessions may hold together "
                f"(--live-tokens), and {model.limit.tokens} (--max-model-len), got {window + answer}",
                field="open.window_tokens",
            )
        name = message.source_name
        if len(name) > MAX_SOURCE_NAME_CHARACTERS or not name.isprintable():
            limit = f"at most {MAX_SOURCE_NAME_CHARACTERS} printable characters"
            raise InvalidRequest(field="open.source_name", limit=limit, value=name[:MAX_SOURCE_NAME_CHARACTERS])
        pruning = _pruning(message.pruning, model.pruning_methods)
        triggers = _triggers(message.triggers, pruning)
        return cls(
            messages=tuple(message.messages),
            pruning=pruning,
            fps=fps,
            max_pixels=message.max_pixels if message.HasField("max_pixels") else None,
            window_tokens=window,
            answer_tokens=answer,
            window_s=window_s,
            adapter=model.adapters.find(message.adapter) if message.HasField("adapter") else None,
            triggers=triggers,
            live=model.live,
            source=message.source,
            source_name=message.source_name or SOURCE_NAME,
            reopens=message.reopens,
            snapshots=message.snapshots,
        )


def ask_of(message: generation_pb2.LiveAsk) -> Ask:
    """Raises InvalidRequest, with the field's name within the message."""
    if len(message.ask_id) > MAX_ASK_ID_CHARACTERS:
        limit = f"at most {MAX_ASK_ID_CHARACTERS} characters"
        raise InvalidRequest(field="ask.ask_id", limit=limit, value=f"{len(message.ask_id)} characters")
    _check_text(message.parts, "ask.parts")
    prompt = prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=message.parts)])
    check_prompt(prompt)
    wanted = sampling_request(generation_pb2.GenerateRequest(prompt=prompt, sampling=message.sampling))
    if wanted.n != 1:
        raise InvalidRequest(field="ask.sampling.n", limit="1", value=wanted.n)
    if wanted.attention:
        raise InvalidRequest(field="ask.sampling.attention", limit="false in a live session", value=True)
    if wanted.needs_times:
        name = "moments" if wanted.moments else "json_schema"
        raise InvalidRequest(field=f"ask.sampling.{name}", limit="without times of a video in a live session")
    return Ask(message.ask_id, [part.text for part in message.parts], wanted, message.transient)


def _triggers(messages: Sequence[generation_pb2.LiveTrigger], pruning: ItemPruning) -> Sequence[Trigger]:
    """Raises InvalidRequest."""
    if len(messages) > MAX_TRIGGERS:
        raise InvalidRequest(field="open.triggers", limit=f"at most {MAX_TRIGGERS}", value=len(messages))
    triggers = []
    for index, message in enumerate(messages):
        name = f"open.triggers[{index}]"
        with within(name):
            ask = ask_of(message.ask)
        every_s = message.every_s if message.HasField("every_s") else None
        on_change = message.on_change if message.HasField("on_change") else None
        if every_s is None and on_change is None:
            raise InvalidRequest("must have every_s or on_change", field=name)
        if every_s is not None and not 0 < every_s < math.inf:
            raise InvalidRequest(field=f"{name}.every_s", limit="above 0, and finite", value=every_s)
        if on_change is not None:
            if not 0 < on_change <= 1:
                limit = "above 0, and at most 1"
                raise InvalidRequest(field=f"{name}.on_change", limit=limit, value=on_change)
            if pruning.method != PIXEL_CHANGE:
                text = f"needs the pruning {PIXEL_CHANGE}, which compares pixels"
                raise InvalidRequest(text, field=f"{name}.on_change", value=pruning.method)
        triggers.append(Trigger(ask, None if every_s is None else microseconds(every_s), on_change))
    return triggers


def _check_text(parts: Sequence[prompt_pb2.Part], name: str) -> None:
    """Raises InvalidRequest for parts other than text, and for none."""
    if not parts:
        raise InvalidRequest("must hold at least one part", field=name)
    for index, part in enumerate(parts):
        if part.WhichOneof("content") != "text":
            raise InvalidRequest("must be text: what a live session sees are its frames", field=f"{name}[{index}]")


def _pruning(message: prompt_pb2.Pruning, methods: Sequence[str]) -> ItemPruning:
    """How slices are pruned. Raises InvalidRequest for what compares more than a slice and the one before it."""
    default = SUGGESTED if SUGGESTED.method in methods else NOTHING_PRUNED  # the rate of all slices is not known
    wanted = pruning_of(completed(message, pruning_message(default)))
    by_change = wanted.method == PIXEL_CHANGE and wanted.threshold is not None and not wanted.rate
    if not (wanted.method in (EVS_CAUSAL, NONE) or by_change):
        raise InvalidRequest(
            f"must compare a slice with the one before it alone: {EVS_CAUSAL} with a rate, {PIXEL_CHANGE} with a "
            f"threshold and no rate, or {NONE}",
            field="open.pruning",
            value=wanted.method,
        )
    return wanted
