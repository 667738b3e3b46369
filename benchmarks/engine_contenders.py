"""The contenders of the engine benchmark: the engine alone, in this process, and transformers' `generate`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import BaseModelOutputWithPooling

from benchmarks.engine_models import GRID, Question
from benchmarks.timing import Timed
from framesieve.common.checkpoint import Checkpoint
from framesieve.common.process import keep_freed_memory
from framesieve.services.compute.graphs import CudaCapture
from framesieve.services.generation.engine.engine import Engine
from framesieve.services.generation.engine.stats import Step
from framesieve.services.generation.families import load_language_model
from framesieve.services.generation.kv_cache.blocks import BlockAllocator
from framesieve.services.generation.model.runner import Runner
from framesieve.services.generation.request.encoded_media import MediaItem
from framesieve.services.generation.request.request import Event, Failed, Finished, Request, Tokens
from framesieve.services.generation.sampling.detokenizer import Detokenizer, load_tokenizer
from framesieve.services.generation.sampling.sampler import SamplingParams

NEW_TOKENS = 64
BLOCK_TOKENS, BLOCKS = 16, 2048  # the service's defaults
CHUNK_TOKENS = 2048
MAX_RUNNING = 64
CPU = torch.device("cpu")


class EngineContender:
    """The engine with one checkpoint, built as in the service. A context manager; greedy, end tokens ignored."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device = CPU,
        blocks: int = BLOCKS,
        max_running: int = MAX_RUNNING,
        on_step: Callable[[Step], None] = lambda _: None,
    ) -> None:
        keep_freed_memory()
        model = load_language_model(Checkpoint(folder), dtype, device)
        self.runner = Runner(model, blocks, BLOCK_TOKENS)
        if device.type == "cuda":
            self.runner.capture_decoding(max_running, blocks * BLOCK_TOKENS, CudaCapture(device))
        self.engine = Engine(
            self.runner,
            BlockAllocator(blocks, BLOCK_TOKENS),
            CHUNK_TOKENS,
            max_running,
            64,
            on_step=on_step,
            overlap=device.type != "cpu",
        )
        self._dtype = dtype
        self._tokenizer = load_tokenizer(folder)

    def __enter__(self) -> Self:
        self.engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.stop()

    def answer(
        self, questions: Sequence[Question], clients: int, new_tokens: int = NEW_TOKENS
    ) -> tuple[list[Timed], list[tuple[int, ...]]]:
        """Answers all questions in a closed loop of `clients`. Returns times and tokens in order of completion."""
        events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        left = iter(enumerate(questions))
        started: dict[int, float] = {}
        tokens: dict[int, list[int]] = {}
        first: dict[int, float] = {}
        timed: list[Timed] = []
        answers: list[tuple[int, ...]] = []

        def ask_next() -> None:
            if (found := next(left, None)) is not None:
                index, question = found
                started[index], tokens[index] = time.perf_counter(), []
                self.submit(question, lambda event: events.put((index, event)), new_tokens)

        for _ in range(clients):
            ask_next()
        while len(timed) < len(questions):
            index, event = events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Tokens):
                first.setdefault(index, time.perf_counter() - started[index])
                tokens[index] += event.token_ids
            if isinstance(event, Finished):
                timed.append(Timed(first[index], time.perf_counter() - started[index], len(tokens[index])))
                answers.append(tuple(tokens[index]))
                ask_next()
        return timed, answers

    def requests_per_s(self, questions: Sequence[Question], clients: int) -> float:
        """Answers all questions in a closed loop of `clients`; returns requests per second."""
        start = time.perf_counter()
        self.answer(questions, clients)
        return len(questions) / (time.perf_counter() - start)

    def submit(self, question: Question, on_event: Callable[[Event], None], new_tokens: int = NEW_TOKENS) -> None:
        """Submits one question with its media, if any, already encoded."""
        counts = [question.embeds.shape[1] for _ in question.plan.media]
        keys = [os.urandom(32) for _ in counts]  # unique, so that no question hits the prefix cache
        detokenizer = Detokenizer(self._tokenizer)
        request = Request("bench", question.plan, counts, keys, SamplingParams(new_tokens), detokenizer, on_event)
        self.engine.submit(request)
        for key in keys:
            self.engine.deliver(request, MediaItem(0, question.kept, question.embeds.to(self._dtype), 0, key))


class Generate:
    """transformers' `generate` with the same checkpoint and embeddings, one question after another."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self._model.eval()

    def answer(self, question: Question) -> tuple[Timed, tuple[int, ...]]:
        assert question.kept is None, "transformers knows no pruning"
        ids = torch.from_numpy(question.plan.input_ids).long()[None]
        encoded: Any = BaseModelOutputWithPooling()
        encoded.pooler_output = (question.embeds[0],)  # one tensor per video
        streamer = Clock()
        start = time.perf_counter()
        with torch.inference_mode():
            generated: Tensor = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == self._model.config.video_token_id).int() * 2,
                # In patches; 2 × 2 patches are one token.
                video_grid_thw=torch.tensor([(GRID.t, 2 * GRID.h, 2 * GRID.w)]),
                second_per_grid_ts=torch.tensor([0.5]),  # times 2 positions per second
                mm_encoder_outputs={"video": encoded},
                max_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                do_sample=False,
                streamer=streamer,
            )
        total = time.perf_counter() - start
        answer = tuple(generated[0, ids.shape[1] :].tolist())
        return Timed(streamer.times[1] - start, total, len(answer)), answer


class Clock(BaseStreamer):
    """Records the time of each token; `generate` first passes the prompt, which is skipped."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
