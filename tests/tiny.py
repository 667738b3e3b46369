"""A tiny model, an engine over it, and requests for that engine."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, PromptPlan, Run
from gridsieve.common.contract.tensors import DType
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.engine.payoff import Payoff
from gridsieve.services.generation.engine.stats import Step
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.memory.state_slots import StateSlots
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.runner import LaunchedStep, OtherRanks, Runner, SampledStep
from gridsieve.services.generation.model.states import RESERVED
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.pruned_prompt import MAX_VOCABULARY, PrunedPrompt
from gridsieve.services.generation.request.reader import Reader
from gridsieve.services.generation.request.request import Adapter, Delta, Event, Failed, Finished, Request
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.preprocessing.prompt.positions import (
    GridSpan,
    LinearSpan,
    MediaSpan,
    SharedSpan,
    Span,
    TextSpan,
    clip_parts,
    positions_of,
)
from tests.families import FAMILIES, FamilyUnderTest, load_reference, text_and_head
from tests.oracle import Clip, Item, Part, Text, items_of

PAD_ID = 3
BLOCK_TOKENS = 4


@dataclass(frozen=True)
class Models:
    """The same weights twice: as the engine runs them, and as transformers does.

    reference: its embeddings have a row for each stored vector.
    """

    folder: Path
    family: FamilyUnderTest
    engine: LanguageModel
    reference: Any


def load_models(family: str, folder: Path, write: Callable[[Path, int], object] | None = None) -> Models:
    """write: makes the checkpoint of the family; None: its own."""
    (write or FAMILIES[family].write)(folder, 7)
    engine = load_language_model(Checkpoint(folder), torch.float32, torch.device("cpu"))
    reference = load_reference(family, folder)
    if stored := FAMILIES[family].stored:
        text, _ = text_and_head(reference)
        vectors = [vector(reference)[None] for _, vector in sorted(stored.items())]
        table = torch.cat([text.get_input_embeddings().weight, *vectors])
        text.set_input_embeddings(nn.Embedding.from_pretrained(table))
    return Models(folder, FAMILIES[family], engine, reference)


class WholeWords:
    """A detokenizer whose text for a token is its number. stop: numbers that end the answer."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = stop

    def decode(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        (token_id,) = token_ids
        return ("", True) if str(token_id) in self._stop else (f"{token_id} ", False)

    def flush(self) -> str:
        return ""


class RecordingRunner(Runner):
    """Records the chunks of each step, and the logits that each request's tokens were sampled from."""

    def __init__(
        self,
        model: LanguageModel,
        blocks: int,
        block_tokens: int,
        workers: OtherRanks | None = None,
        state_slots: int = 0,
    ) -> None:
        super().__init__(model, blocks, block_tokens, workers, state_slots)
        self._requests: dict[str, Request] = {}
        self._logits: dict[str, list[Tensor]] = {}
        self.steps: list[list[tuple[str, int, int]]] = []
        self.early = False  # whether media rows were computed before their item was complete

    @property
    def logits(self) -> dict[str, list[Tensor]]:
        """For each request one row for each token of its answer; rows after a rejected draft token are left out."""
        sizes = {name: len(each.output_ids) + each.num_unread for name, each in self._requests.items()}
        return {name: rows[: sizes[name]] for name, rows in self._logits.items()}

    def launch(self, chunks: Sequence[Chunk], before: SampledStep | None = None) -> LaunchedStep:
        self.steps.append([(chunk.request.id, chunk.start, chunk.end) for chunk in chunks])
        for request, start, end in ((chunk.request, chunk.start, chunk.end) for chunk in chunks):
            arriving = [span for span in request.prompt.spans if request.prompt.missing(span.media_index)]
            self.early |= any(span.offset < end and span.end > start for span in arriving)
        return super().launch(chunks, before)

    def forward(self, chunks: Sequence[Chunk], unread: Tensor | None = None) -> Tensor:
        self._logits = self.logits
        logits = super().forward(chunks, unread)
        rows = iter(logits.clone())  # the next step may overwrite them
        for chunk in chunks:
            if chunk.samples:
                self._requests[chunk.request.id] = chunk.request
                self._logits.setdefault(chunk.request.id, []).extend(islice(rows, 1 + chunk.num_draft_tokens))
        return logits


@dataclass
class Asked:
    """A request and its events. spared: media items that the engine has cached; others: siblings."""

    request: Request
    events: list[Event]
    spared: tuple[int, ...] = ()
    others: list[Asked] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Delta) for token in event.token_ids]

    @property
    def finished(self) -> Finished | None:
        return next((event for event in self.events if isinstance(event, Finished)), None)

    @property
    def failed(self) -> Failed | None:
        return next((event for event in self.events if isinstance(event, Failed)), None)


@dataclass
class TinyEngine:
    """totals: the sums over all steps, by the names of `Step`."""

    model: LanguageModel
    blocks: int = 64
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    max_waiting: int = 64
    max_draft_tokens: int = 0
    on_step: Callable[[Step], None] = lambda _: None
    on_end: Callable[[], object] = lambda: None
    workers: OtherRanks | None = None
    overlap: bool = False
    payoff: Payoff | None = None
    snapshots: int = 16  # slots of recurrent states beside those of running sequences
    live_blocks: int = 0
    max_yielding: int | None = None
    runner: RecordingRunner = field(init=False)
    engine: Engine = field(init=False)
    totals: Counter[str] = field(init=False, default_factory=Counter)

    def __post_init__(self) -> None:
        slots = 2 * self.max_num_seqs + self.snapshots if self.model.states else 0
        self.runner = RecordingRunner(self.model, self.blocks, BLOCK_TOKENS, self.workers, slots)
        allocator = BlockAllocator(self.blocks, BLOCK_TOKENS)
        self.engine = Engine(
            self.runner,
            allocator,
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self.max_waiting,
            self.max_draft_tokens,
            self._count,
            self.on_end,
            self.overlap,
            StateSlots(slots, RESERVED) if slots else None,
            self.payoff,
            self.live_blocks,
            self.max_yielding,
        )

    def _count(self, step: Step) -> None:
        self.totals.update(asdict(step))
        self.on_step(step)

    def ask(
        self,
        name: str,
        parts: Sequence[Part],
        params: SamplingParams,
        others: Sequence[SamplingParams] = (),
        adapter: str | None = None,
        yields: bool = False,
    ) -> Asked:
        own = self.model.adapters.find(adapter) if adapter else None
        kind = Reader if self.model.reads else Request
        asked = make_request(name, parts, params, own, self.model.vocab_size, kind)
        asked.request.yields = yields
        for number, each in enumerate(others, 1):
            events: list[Event] = []
            words: Any = WholeWords(each.stop)
            sibling = asked.request.add_sibling(f"{name}#{number}", each, words, events.append)
            asked.others.append(Asked(sibling, events))
        self.engine.submit(asked.request)
        asked.spared = tuple(set(range(len(asked.request.encoded_media))) - set(asked.request.wanted_media))
        return asked

    def deliver(self, asked: Asked, index: int, item: Item, kept: Sequence[int], slices: int | None = None) -> None:
        """Delivers an item unless the engine has it cached. slices: only its first ones; None: all."""
        if index in asked.request.wanted_media:
            arrived = media_item(index, item, kept, slices)
            self.engine.deliver(asked.request, replace(arrived, embeds=arrived.embeds.to(self.model.dtype)))

    def drain(self) -> None:
        while self.engine.step():
            pass


def make_request(
    name: str,
    parts: Sequence[Part],
    params: SamplingParams,
    adapter: Adapter | None = None,
    vocab_size: int = MAX_VOCABULARY,
    kind: type[Request] = Request,
) -> Asked:
    items = items_of(parts)
    events: list[Event] = []
    num_kept, keys = [item.num_kept for item in items], [key_of(item) for item in items]
    prompt = PrunedPrompt(make_plan(parts), num_kept, vocab_size, bounded=[item.bounded for item in items])
    detokenizer: Any = WholeWords(params.stop)
    request = kind(name, prompt, keys, params, detokenizer, events.append, adapter)
    return Asked(request, events)


def key_of(item: Item) -> bytes:
    """The key of an item in the cache of encoded media: the item and its pruning, without its times."""
    pruned = repr((item.time_step is None, item.t, item.h, item.w, item.rate, item.method, item.bounded))
    return hashlib.sha256(pruned.encode() + item.embeds.tobytes()).digest()


def media_item(index: int, item: Item, kept: Sequence[int], slices: int | None = None) -> MediaItem:
    """An item as received from the encoder. slices: of which so many have arrived; None: all."""
    embeds = np.stack([item.embeds, *item.deepstack])
    rows, digest = embeds[:, list(kept)], hashlib.sha256(embeds.tobytes()).digest()
    if slices is None or slices == item.t:
        return MediaItem(index, np.array(kept, np.int32), torch.from_numpy(rows), 0, digest)
    tokens = slices * item.h * item.w
    arrived = [token for token in kept if token < tokens]
    room = np.full((len(rows), item.num_kept, rows.shape[2]), np.nan, np.float32)
    room[:, : len(arrived)] = rows[:, : len(arrived)]
    return MediaItem(index, np.array(arrived, np.int32), torch.from_numpy(room), 0, digest, tokens)


def make_plan(parts: Sequence[Part]) -> PromptPlan:
    """The plan of preprocessing, with positions by preprocessing's own code."""
    ids: list[int] = []
    spans: list[Span] = []
    media: list[MediaPlan] = []
    levels = max((len(item.deepstack) for item in items_of(parts)), default=0)
    for part in parts:
        if isinstance(part, Text):
            spans.append(TextSpan(len(part.ids)))
            ids += part.ids
            continue
        if isinstance(part, Clip):
            of_video, of_sound = list[Run](), list[Run]()
            ids.append(part.begin)
            pictures = GridSpan(Grid(part.video.t, part.video.h, part.video.w), part.video.time_step or Fraction(0))
            pieces = clip_parts(pictures, LinearSpan(part.sound.tokens), part.chunk)
            spans += [SharedSpan(before=True), *pieces, SharedSpan(before=False)]
            for span in pieces:
                (of_sound if span.of_sound else of_video).append(Run(len(ids), span.tokens))
                ids += [PAD_ID] * span.tokens
            ids.append(part.end)
            media += [_media_plan(part.video, of_video), _media_plan(part.sound, of_sound, is_sound=True)]
            continue
        runs: list[Run] = []
        for piece in _pieces(part):
            if isinstance(piece, Text):
                spans.append(TextSpan(len(piece.ids)))
                ids += piece.ids
            else:
                spans.append(piece)
                runs.append(Run(len(ids), piece.tokens))
                ids += [PAD_ID] * piece.tokens
        media.append(_media_plan(part, runs))
    return PromptPlan(np.array(ids, np.int32), positions_of(spans), tuple(media), levels, bytes(32))


def _pieces(item: Item) -> Iterator[Text | MediaSpan]:
    """The layout of an item: its runs, and its text around them."""
    grid = Grid(1 if item.linear else item.t // item.runs, item.h, item.w)
    run = LinearSpan(item.tokens // item.runs) if item.linear else GridSpan(grid, item.time_step or Fraction(0))
    for text in item.texts[:-1] or (Text(()),):
        if text.ids:
            yield text
        yield run
    yield from (text for text in item.texts[-1:] if text.ids)


def _media_plan(item: Item, runs: Sequence[Run], is_sound: bool = False) -> MediaPlan:
    if is_sound:
        frames = FrameShape(1, (16, 4 * item.tokens), dtype=DType.FLOAT32)
        grid = Grid(1, 1, item.tokens)
        return MediaPlan(Modality.AUDIO, grid, tuple(runs), frames, None, (), bytes(32), heard_s=item.tokens / 25)
    return MediaPlan(
        modality=Modality.IMAGE if item.time_step is None else Modality.VIDEO,
        grid=Grid(item.t, item.h, item.w),
        runs=tuple(runs),
        frames=FrameShape(item.t, (28 * item.h, 28 * item.w)),
        seconds_per_grid=item.time_step,
        timestamps_s=(),
        content_hash=bytes(32),
    )


def random_item(
    family: FamilyUnderTest,
    sides: tuple[int, int, int],
    time_step: Fraction | None,
    seed: int = 5,
    rate: float = 0.0,
    method: str = "evs",
) -> Item:
    """An item of random embeddings, with the deepstack levels, runs and texts that this family's items have."""
    random = np.random.default_rng(seed)
    shape = (math.prod(sides), family.hidden)
    levels = [random.normal(0, 0.3, shape).astype(np.float32) for _ in range(1 + family.levels)]
    texts = _texts(family, sides, time_step is not None, random)
    return Item(*sides, time_step, levels[0], rate, method, tuple(levels[1:]), texts, family.linear)


def _texts(
    family: FamilyUnderTest, sides: tuple[int, int, int], is_video: bool, random: np.random.Generator
) -> tuple[Text, ...]:
    runs = 1
    if is_video and family.slices_stand_alone:
        runs = sides[0]
    if not is_video and family.rows_stand_alone:
        runs = sides[1]
    if family.stored:  # the first run is the whole of an image, which its first row follows at once
        bare, ids = min(2, runs), cycle(family.stored)
        return (Text(()),) * bare + tuple(Text((next(ids),)) for _ in range(1 + runs - bare))
    if not (family.slices_stand_alone if is_video else family.rows_stand_alone):
        return ()
    return tuple(Text(tuple(random.integers(10, 300, random.integers(1, 5)).tolist())) for _ in range(runs + 1))
