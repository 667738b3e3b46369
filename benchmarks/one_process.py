"""The parts of the services called one after another in this process, to measure what the split costs.

Decoding, tower, pruning and engine are the services' code, in the same order, without gRPC, protobuf or processes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from benchmarks.timing import Timed
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import MediaPlan, Modality
from gridsieve.common.contract.retention import ItemPruning, num_kept
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt
from gridsieve.services.generation.request.request import Delta, Event, Failed, Finished, Request
from gridsieve.services.generation.sampling.defaults import sampling_defaults
from gridsieve.services.generation.sampling.detokenizer import Detokenizer, load_tokenizer
from gridsieve.services.generation.sampling.params import SamplingRequest
from gridsieve.services.preprocessing.conversation import Conversation, MediaRequest
from gridsieve.services.preprocessing.items.item import PlannedMedia
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.prompt.turns import Turn
from gridsieve.services.preprocessing.video.sampling import FrameSampling

CPU = torch.device("cpu")
BLOCK_TOKENS, BLOCKS = 16, 2048
CHUNK_TOKENS = 2048


class OneProcess:
    """Answers one question at a time, in float32. A context manager."""

    def __init__(self, folder: Path) -> None:
        checkpoint = Checkpoint(folder)
        self._planner = Planner(checkpoint, None)
        self._tower = load_tower(checkpoint, "float32", CPU)
        self._tokenizer = load_tokenizer(folder)
        self._defaults = sampling_defaults(checkpoint)
        runner = Runner(load_language_model(checkpoint, torch.float32, CPU), BLOCKS, BLOCK_TOKENS)
        self._engine = Engine(runner, BlockAllocator(BLOCKS, BLOCK_TOKENS), CHUNK_TOKENS, 64, 64)

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.stop()

    def ask(self, clip: bytes, question: str, pruning: ItemPruning, max_new_tokens: int) -> Timed:
        start = time.perf_counter()
        turn = Turn("user", (Modality.VIDEO, question))
        media = MediaRequest("video", Modality.VIDEO, clip, FrameSampling())
        planned = self._planner.plan(Conversation((turn,), (media,)))
        events: SimpleQueue[Event] = SimpleQueue()
        [sampling] = SamplingRequest(max_new_tokens=max_new_tokens).resolve(self._defaults, max_new_tokens)
        detokenizer = Detokenizer(self._tokenizer, sampling.stop)
        keeps = [num_kept(planned.plan.media[0].grid, pruning)]
        key = os.urandom(32)  # unique, so that no question hits the prefix cache
        request = Request("bench", PrunedPrompt(planned.plan, keeps), [key], sampling, detokenizer, events.put)
        self._engine.submit(request)
        with planned.files:
            kept, embeds = self._encode(planned.media[0], planned.plan.media[0], pruning)
        self._engine.deliver(request, MediaItem(0, kept.numpy(), embeds, 0, key))
        times: list[float] = []
        while not isinstance(event := events.get(), Finished):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                times.append(time.perf_counter() - start)
        return Timed(times[0], time.perf_counter() - start, event.completion_tokens)

    def _encode(self, media: PlannedMedia, plan: MediaPlan, pruning: ItemPruning) -> tuple[Tensor, Tensor]:
        """The kept indices, int32 [K], and the embeddings [1, K, D] of one item."""
        embeds = torch.cat(self._tower.encode([torch.from_numpy(each.pixels) for each in media.slices()]), dim=1)
        kept = keep_tokens(embeds[0], plan.grid, pruning)
        return kept, embeds[:, kept]
