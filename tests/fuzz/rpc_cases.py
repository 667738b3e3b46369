"""Valid calls and mutations of them. Each case depends only on its seed and number.

structure, bytes   a request is mutated
order              requests of a stream are dropped, doubled or swapped
leaving            the caller cancels after so many answers, or its deadline passes
peer               the request is valid, and answers of an upstream service are mutated (`rpc_stack`)
whole              the request is valid and must be answered
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import grpc
from google.protobuf.message import Message

from demo.checkpoint import TINY
from gridsieve.common.checkpoint import Task
from gridsieve.common.contract.errors import PeerContract
from gridsieve.v1 import prompt_pb2, tensor_pb2
from gridsieve.v1.encoder_pb2 import EncodePrompt, EncodeRequest
from gridsieve.v1.generation_pb2 import (
    EmbedRequest,
    GenerateRequest,
    LiveAsk,
    LiveCancel,
    LiveClip,
    LiveClose,
    LiveFrame,
    LiveOpen,
    LiveRequest,
    RawFrame,
    Sampling,
    ScoreRequest,
)
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest, WatchOpen, WatchRequest
from tests import media
from tests.families import FAMILIES
from tests.fuzz.rpc_mutations import mutate, mutate_bytes

SERVICES = ("preprocessing", "encoder", "generation")
# Live sessions are calls of generation, too.
LIVE = "live"
# And streams of encoded video are calls of preprocessing.
WATCH = "watch"
# And unary calls of generation with an embedder and with a reranker, whose tasks have the same names.
READERS: tuple[Task, ...] = ("embed", "score")
EMBED, SCORE = READERS
CALLS = (*SERVICES, LIVE, WATCH, *READERS)
_KINDS = {"structure": 45, "bytes": 10, "order": 10, "leaving": 10, "peer": 22, "whole": 3}
_STREAMED = ("preprocessing", "encoder", LIVE, WATCH)
_PEERS = {
    "encoder": ("preprocessing",),
    **dict.fromkeys(("generation", LIVE, *READERS), ("encoder", "encoder", "preprocessing")),
}
# Seconds until a caller who leaves does so.
_DEADLINES = (0.001, 0.01, 0.03, 0.1)

_LIVE_PRUNINGS = (
    prompt_pb2.Pruning(),
    prompt_pb2.Pruning(method="pixel_change", threshold=0.05),
    prompt_pb2.Pruning(method="evs_causal", rate=0.5),
    prompt_pb2.Pruning(method="none"),
)
# Of sessions that go wrong: no picture, one of another size, a time that is not one, encoded video among pictures, a
# question without an end. Pixels are as good as a picture.
_LIVE_EXTRAS = tuple(
    each.SerializeToString()
    for each in (
        LiveRequest(frame=LiveFrame(time_s=1)),
        LiveRequest(frame=LiveFrame(picture=media.picture(84, 56), time_s=1e9 + 5)),
        LiveRequest(frame=LiveFrame(picture=media.picture(56, 56), time_s=float("nan"))),
        LiveRequest(frame=LiveFrame(picture=media.picture(56, 56), time_s=1.7e308)),
        LiveRequest(frame=LiveFrame(raw=RawFrame(width=56, height=56, rgb=bytes(3 * 56 * 56)), time_s=1e9 + 5)),
        LiveRequest(clip=LiveClip(data=media.stream("mpegts", 8, width=56, height=56))),
        LiveRequest(ask=LiveAsk(parts=[prompt_pb2.Part(text="a" * 4000)])),
        LiveRequest(cancel=LiveCancel()),
        LiveRequest(close=LiveClose()),
    )
)

# A stream that is fetched, which the services may not do, one that is no video, and bytes without an end.
_WATCH_EXTRAS = tuple(
    each.SerializeToString()
    for each in (
        WatchRequest(open=WatchOpen(fps=2, url="rtsp://127.0.0.1:1/")),
        WatchRequest(open=WatchOpen(fps=2, url="http://localhost/a.ts")),
        WatchRequest(open=WatchOpen(fps=float("nan"))),
        WatchRequest(data=b"\0" * 1000),
        WatchRequest(data=media.picture(56, 56)),
        WatchRequest(data=bytes(2**21)),
    )
)
_EXTRAS = {LIVE: _LIVE_EXTRAS, WATCH: _WATCH_EXTRAS}

_LEVELS = FAMILIES["qwen3_vl"].levels
_MAX_PIXELS = 3136  # of 56 × 56, which an embedder and a reranker would enlarge

_ALLOWED = frozenset({"OK", "INVALID_ARGUMENT", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"})


@dataclass(frozen=True)
class Case:
    """One call.

    service: one of CALLS. bent: the upstream service whose answers are mutated. leave_after: cancels after so many
    answers.
    """

    seed: int
    number: int
    kind: str
    service: str
    requests: tuple[bytes, ...]
    bent: str = "none"
    leave_after: int | None = None
    timeout_s: float | None = None

    @property
    def task(self) -> Task:
        """Of the model that it is sent to."""
        return next((each for each in READERS if each == self.service), "generate")

    @property
    def request_id(self) -> str:
        """Reaches every service; the proxies in between read from it what to do."""
        return f"fuzz-{self.bent}-{self.seed}-{self.number}"

    def fault_of(self, code: grpc.StatusCode, reason: str) -> str | None:
        """Why this status is wrong for the case, or None."""
        if self.kind == "whole" and code is not grpc.StatusCode.OK:
            return f"a whole request was refused with {code.name}"
        if code.name in _ALLOWED:
            return None
        # At a deadline, the service may cancel the call before the caller notices.
        if self.kind == "leaving" and code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
            return None
        if self.kind == "peer" and code is grpc.StatusCode.INTERNAL and reason == PeerContract.reason:
            return None
        return f"{code.name} {reason}"


def case(seed: int, number: int) -> Case:
    random_ = random.Random(f"{seed}-{number}")
    kind = random_.choices(list(_KINDS), list(_KINDS.values()))[0]
    service = random_.choice({"peer": tuple(_PEERS), "order": _STREAMED}.get(kind, CALLS))
    requests: list[Message]
    if service == LIVE:
        requests = list(_live_session(number, random_))
    elif service == WATCH:
        requests = list(_watched(random_))
    else:
        requests = _conversation(service, _prompt(service, number, random_), random_)
    made = Case(seed, number, kind, service, tuple(each.SerializeToString() for each in requests))
    match kind:
        case "structure":
            mutate(random_.choice((requests[0], requests[0], random_.choice(requests))), random_)
            return replace(made, requests=tuple(each.SerializeToString() for each in requests))
        case "bytes":
            place = random_.randrange(len(requests))
            whole = made.requests
            return replace(made, requests=(*whole[:place], mutate_bytes(whole[place], random_), *whole[place + 1 :]))
        case "order":
            return replace(made, requests=_disordered(service, made.requests, random_))
        case "leaving":
            timeout_s = random_.choice(_DEADLINES if service in READERS else (None, None, None, None, *_DEADLINES))
            return replace(made, timeout_s=timeout_s, leave_after=None if timeout_s else random_.randrange(8))
        case "peer":
            return replace(made, bent=random_.choice(_PEERS[service]))
    return made


def _disordered(service: str, requests: tuple[bytes, ...], random_: random.Random) -> tuple[bytes, ...]:
    changed = list(requests)
    for _ in range(random_.randrange(1, 4)):
        index = random_.choice((0, 1, 2, 3, -1, 2**31 - 1))
        select = PreprocessRequest(select=prompt_pb2.Select(media_index=index)).SerializeToString()
        if service in _EXTRAS:
            select = random_.choice((*requests, *_EXTRAS[service])) * random_.choice((1, 1, 2))
        here = random_.randrange(len(changed) + 1)
        match random_.randrange(4):
            case 0 if changed:
                del changed[here - 1]
            case 1:
                random_.shuffle(changed)
            case 2 if service in _EXTRAS:
                changed[here:here] = [select] * random_.choice((2, 20, 300))
            case _:
                changed.insert(here, random_.choice((select, b"", *requests)))
    return tuple(changed)


def _conversation(service: str, prompt: prompt_pb2.Prompt, random_: random.Random) -> list[Message]:
    """All requests of a valid call."""
    media_ = [(part.WhichOneof("content"), part) for message in prompt.messages for part in message.parts]
    media_ = [(kind, part) for kind, part in media_ if kind != "text"]
    pruning = prompt_pb2.Pruning(
        rate=random_.choice((0, 0.5, 0.75)), method=random_.choice(("evs", "evs_causal", "vidcom2", "vcast", "random"))
    )
    chosen = prompt_pb2.Pruning(
        rate=random_.choice((0, 0.5, 0.75)), method="pixel_change", threshold=random_.choice((None, None, 0, 0.05))
    )
    if random_.random() < 0.5 and not any(part.video.HasField("embeds") for _, part in media_):
        pruning = chosen
    if service == "generation":
        sampling = Sampling(max_new_tokens=3, temperature=0.7, top_p=0.9, top_k=20, seed=7, stop=["\n\n"], n=1)
        sampling.stop_token_ids.append(1)
        sampling.logprobs, sampling.top_logprobs, sampling.repetition_penalty = True, 2, 1.1
        return [GenerateRequest(prompt=prompt, pruning=pruning, sampling=sampling)]
    if service == EMBED:
        embed = EmbedRequest(prompt=prompt, pruning=pruning, dimensions=random_.choice((1, 24, TINY.hidden)))
        if random_.random() < 0.5:
            embed.instruction = embed.prompt.messages.pop(0).parts[0].text
        return [embed]
    if service == SCORE:
        *_, user = prompt.messages
        cut = random_.randrange(len(user.parts))
        query = [prompt_pb2.Part(text="What moves?"), *user.parts[:cut]]
        return [ScoreRequest(query=query, document=user.parts[cut:], pruning=pruning, instruction="Find it.")]
    items = len(media_)
    selects = [prompt_pb2.Select(media_index=index) for index in random_.sample(range(items), items)]
    if random_.random() < 0.5:
        selects = [prompt_pb2.Select(all=True)]
    if service == "encoder":
        first = EncodeRequest(prompt=EncodePrompt(prompt=prompt, pruning=pruning))
        return [first, *(EncodeRequest(select=select) for select in selects)]
    for select in [each for each in selects if not each.all]:
        kind, part = media_[select.media_index]
        if kind == "video" and not part.video.HasField("embeds") and random_.random() < 0.5:
            select.pruning.CopyFrom(chosen)
    return [PreprocessRequest(prompt=prompt), *(PreprocessRequest(select=select) for select in selects)]


def _live_session(number: int, random_: random.Random) -> Iterator[LiveRequest]:
    """All requests of a valid session, with pictures of its own."""
    opened = LiveOpen(fps=2, max_pixels=3136, window_tokens=96, answer_tokens=80, window_s=20)
    opened.messages.add(role=prompt_pb2.ROLE_SYSTEM).parts.add(text="Answer.")
    opened.pruning.CopyFrom(random_.choice(_LIVE_PRUNINGS))
    if opened.pruning.method == "pixel_change":
        opened.triggers.add(ask=_ask("seen", 2, transient=True), on_change=0.5)
    if random_.random() < 0.5:
        opened.triggers.add(ask=_ask("often", 2, transient=True), every_s=1.5)
    yield LiveRequest(open=opened)
    if random_.random() < 0.3:
        for piece in _pieces(random_):
            yield LiveRequest(clip=LiveClip(data=piece))
        yield LiveRequest(ask=_ask("last", 3))
        return
    time_s = random_.choice((0.0, 1e9, -3.5))
    for place in range(random_.randrange(2, 12)):
        time_s += random_.choice((0.0, 0.1, 0.5, 0.5, 0.5, 3.0))
        picture = media.picture(56, 56, place % 3) + struct.pack(">q", number)
        yield LiveRequest(frame=LiveFrame(picture=picture, time_s=time_s))
        if random_.random() < 0.2:
            yield LiveRequest(ask=_ask(f"question {place}", 3, transient=random_.random() < 0.5))
        if random_.random() < 0.05:
            yield LiveRequest(cancel=LiveCancel())
    yield LiveRequest(ask=_ask("last", 3))
    if random_.random() < 0.5:
        yield LiveRequest(close=LiveClose())


def _watched(random_: random.Random) -> Iterator[WatchRequest]:
    """All requests of a stream that is sent to its end."""
    yield WatchRequest(open=WatchOpen(fps=random_.choice((0.5, 2.0, 60.0))))
    for piece in _pieces(random_):
        yield WatchRequest(data=piece)


def _pieces(random_: random.Random) -> Iterator[bytes]:
    """Encoded video, cut anywhere."""
    data = _stream(random_.choice(("mpegts", "fmp4")))
    cuts = sorted(random_.sample(range(1, len(data)), random_.choice((0, 1, 5, 20))))
    for begin, end in pairwise((0, *cuts, len(data))):
        yield data[begin:end]


@cache
def _stream(form: str) -> bytes:
    """Three seconds of 56 × 56 pixels, as a camera sends them."""
    return media.stream(form, 30, width=56, height=56)


def _ask(name: str, max_new_tokens: int, transient: bool = False) -> LiveAsk:
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0.7, top_k=20, seed=7, stop=["\n\n"], logprobs=True)
    return LiveAsk(ask_id=name, parts=[prompt_pb2.Part(text="What moves?")], sampling=sampling, transient=transient)


def _prompt(service: str, number: int, random_: random.Random) -> prompt_pb2.Prompt:
    """Text and up to three media items with content of their own, so that no case hits a cache."""
    prompt = prompt_pb2.Prompt()
    prompt.messages.add(role=prompt_pb2.ROLE_SYSTEM).parts.add(text="Answer.")
    user = prompt.messages.add(role=prompt_pb2.ROLE_USER)
    for kind in random_.choices(("video", "image", "embeds", "path", "frames"), k=random_.randrange(4)):
        part = user.parts.add()
        if kind == "image":
            part.image.data = media.picture(56, 56) + struct.pack(">q", number)
            part.image.frame_sampling.max_pixels = _MAX_PIXELS
        elif kind == "frames":
            pictures = [media.picture(56, 56) + struct.pack(">q", number), media.picture(56, 56)]
            part.video.frames.CopyFrom(prompt_pb2.PictureFrames(pictures=pictures, timestamps_s=(0.5, 1.0)))
            part.video.frame_sampling.frame_indices.extend((0, 1))
            part.video.frame_sampling.max_pixels = _MAX_PIXELS
        elif kind == "embeds":
            part.video.embeds.CopyFrom(_embeds(number, _LEVELS if service in READERS else 0))
        else:
            sampling = prompt_pb2.FrameSampling(fps=2, min_frames=4, max_frames=8, start_s=0.0, max_pixels=_MAX_PIXELS)
            part.video.frame_sampling.CopyFrom(sampling)
            part.video.frame_sampling.mode = random_.choice(("", "uniform", "keyframes", "shots"))
            part.video.pruning.rate = 0.5
            if kind == "path":
                part.video.path = "clip.mp4"
            else:
                part.video.data = clip() + struct.pack(">I4sq", 16, b"free", number)
    user.parts.add(text="What moves?")
    return prompt


@cache
def clip() -> bytes:
    """Two seconds of 56 × 56 pixels."""
    return media.clip(8, fps=4, width=56, height=56)


def _embeds(number: int, levels: int) -> prompt_pb2.MediaEmbeds:
    """2 × 2 × 2 tokens of the width of all models here."""
    shape = [1 + levels, 8, TINY.hidden]
    data = struct.pack("<f", number) * math.prod(shape)
    return prompt_pb2.MediaEmbeds(
        tensor=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=shape, data=data),
        grid=prompt_pb2.Grid(t=2, h=2, w=2),
        seconds_per_grid=prompt_pb2.Rational(numerator=1, denominator=1),
    )
