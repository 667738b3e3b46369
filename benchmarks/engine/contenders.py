"""The contenders of the engine benchmark: the engine alone, in this process, and transformers' `generate`."""

from __future__ import annotations

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

from benchmarks.engine.questions import GRID, Question, submit
from benchmarks.timing import Timed
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.process import keep_freed_memory
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.engine.stats import Step
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.request.request import Delta, Event, Failed, Finished
from gridsieve.services.generation.sampling.detokenizer import Detokenizer, load_tokenizer
from gridsieve.services.generation.sampling.sampler import SamplingParams

NEW_TOKENS = 64
BLOCK_TOKENS, BLOCKS = 16, 2048  # the service's defaults
CHUNK_TOKENS = 2048
MAX_RUNNING = MAX_WAITING = 64
CPU = torch.device("cpu")


class EngineContender:
    """The engine with one checkpoint, built as in the service. A context manager; greedy, end tokens ignored."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        keep_freed_memory()
        self.runner = Runner(load_language_model(Checkpoint(folder), dtype, CPU), BLOCKS, BLOCK_TOKENS)
        allocator = BlockAllocator(BLOCKS, BLOCK_TOKENS)
        self.steps: list[Step] = []
        self.engine = Engine(self.runner, allocator, CHUNK_TOKENS, MAX_RUNNING, MAX_WAITING, on_step=self.steps.append)
        self._dtype = dtype
        self._tokenizer = load_tokenizer(folder)

    def __enter__(self) -> Self:
        self.engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.stop()

    def answer(self, questions: Sequence[Question], clients: int) -> list[Timed]:
        """Answers all questions in a closed loop of `clients`. Returns times in order of completion."""
        events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        left = iter(enumerate(questions))
        started: dict[int, float] = {}
        first: dict[int, float] = {}
        timed: list[Timed] = []

        def ask_next() -> None:
            if (found := next(left, None)) is not None:
                index, question = found
                started[index] = time.perf_counter()
                self.submit(question, lambda event: events.put((index, event)))

        for _ in range(clients):
            ask_next()
        while len(timed) < len(questions):
            index, event = events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                first.setdefault(index, time.perf_counter() - started[index])
            if isinstance(event, Finished):
                timed.append(Timed(first[index], time.perf_counter() - started[index], event.completion_tokens))
                ask_next()
        return timed

    def requests_per_s(self, questions: Sequence[Question], clients: int) -> float:
        """Answers all questions in a closed loop of `clients`; returns requests per second."""
        start = time.perf_counter()
        self.answer(questions, clients)
        return len(questions) / (time.perf_counter() - start)

    def submit(self, question: Question, on_event: Callable[[Event], None]) -> None:
        submit(self.engine, question, SamplingParams(NEW_TOKENS), Detokenizer(self._tokenizer), self._dtype, on_event)


class Generate:
    """transformers' `generate` with the same checkpoint and embeddings, one question after another."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self._model.eval()

    def answer(self, question: Question) -> Timed:
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
        total_s = time.perf_counter() - start
        return Timed(streamer.times[1] - start, total_s, generated.shape[1] - ids.shape[1])


class GenerateText:
    """transformers' `generate` over prompts of text, one after another. model: a whole model of transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    def answer(self, question: Question) -> Timed:
        ids = torch.from_numpy(question.plan.input_ids).long()[None]
        streamer, start = Clock(), time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                do_sample=False,
                streamer=streamer,
            )
        return Timed(streamer.times[1] - start, time.perf_counter() - start, NEW_TOKENS)


class Clock(BaseStreamer):
    """Records the time of each token; `generate` first passes the prompt, which is skipped."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
