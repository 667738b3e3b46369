"""The engine on a device: decode and prefill against the roofline, the longest kernels, and `generate`.

Weights are drawn on the device, and prompts are text. The engine is stepped in this thread, so a step's time is all
that the service's engine thread would take for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.call import GENERATE, ROOFLINE, Call, Part, longest_kernels
from benchmarks.gpu.device import give_back, wait
from benchmarks.gpu.generated import Generated, generate, in_float32, logits_of
from benchmarks.gpu.operations import decode_operations, prefill_operations, weights
from benchmarks.gpu.stand_ins import capture_on, plain_kernels
from benchmarks.gpu.stepping import BLOCK_TOKENS, Answer, SteppedEngine, Steps, TimedRunner
from benchmarks.prompts import text_prompt
from benchmarks.table import Row
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.services.generation.loading.text_model import assemble, make_text
from gridsieve.services.generation.loading.weights import fill
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.sampling.sampler import SamplingParams

# Of what is free beside the weights; the rest is for activations, graphs and the profiler.
CACHE_FRACTION = 0.8
ROOM_TOKENS = 512  # of each answer: all steps until it is cancelled
# Time that a step is expected to need on a card at most, so that what cannot be done in time is not begun.
PREFILL_TOKENS_PER_S, STEP_S = 5000, 0.1
SMALL_PROMPTS, SMALL_TOKENS = 4, 64
SAMPLED = SamplingParams(ROOM_TOKENS, 0.7, top_p=0.8, top_k=20)  # as Qwen3-VL's generation_config.json says


def parts(call: Call) -> dict[str, Part]:
    """In the order in which they are measured: what matters most comes first."""
    engine = DrawnEngine(call)
    short, *long = call.target.contexts
    return {
        "generate": engine.generate,
        "decode": lambda: engine.decode((short,)),
        "prefill": engine.prefill,
        "kernels": engine.kernels,
        "long": lambda: engine.decode(long),
    }


class DrawnEngine:
    """The engine over a model that is drawn on the device."""

    def __init__(self, call: Call) -> None:
        self._call, self._target, self._device = call, call.target, call.device
        self._peaks = call.peaks  # measured before the cache fills the memory
        self._random = np.random.default_rng(0)
        self._whole: Any = None
        self._profiled_steps = self._target.steps // 4

    @cached_property
    def runner(self) -> TimedRunner:
        """Its cache fills the device, and its decode steps are captured. Draws the weights."""
        self._whole = self._target.layout.drawn(self._device, self._call.dtype)
        model, most = language_model(self._whole), max(self._target.sequences)
        give_back(self._device)
        blocks = self._target.blocks
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            blocks = int(CACHE_FRACTION * free / (model.token_bytes * BLOCK_TOKENS))
        with plain_kernels(self._device):
            runner = TimedRunner(model, blocks)
        tokens = max(*self._target.contexts, *self._target.prompts) + ROOM_TOKENS
        runner.capture_decoding(most, tokens, capture_on(self._device))  # rows say how many steps are replayed
        return runner

    def _engine(self, chunk_tokens: int) -> SteppedEngine:
        overlap, most = self._device.type != "cpu", max(self._target.sequences)
        return SteppedEngine(self.runner, chunk_tokens, most, overlap)

    def _ask(self, engine: SteppedEngine, tokens: int, params: SamplingParams) -> Answer:
        return engine.ask(text_prompt(tokens, self._random), params)

    def generate(self) -> Iterator[Row]:
        """Greedy tokens, and the time of a few short prompts, by the engine and by transformers, with equal weights."""
        engine = self._engine(max(self._target.chunks))
        prompts = [text_prompt(SMALL_TOKENS, self._random) for _ in range(SMALL_PROMPTS)]
        for _ in ("warm-up", "measured"):
            engine = self._engine(max(self._target.chunks))  # whose prefix cache is empty
            start_s = time.perf_counter()
            answers = [engine.ask(each, SamplingParams(self._target.steps)) for each in prompts]
            engine.drain()
            theirs = generate(self._whole, np.stack([each.input_ids for each in prompts]), self._target.steps)
        what = f"greedy answers to {SMALL_PROMPTS} × {SMALL_TOKENS} tokens"
        yield self._best(f"{what}: the best up to rounding", prompts, answers, theirs)
        first_s = median(each.times_s[0] - start_s for each in answers)
        token_s = median(median(np.diff(each.times_s).tolist()) for each in answers)
        yield Row(f"{what}: first token", GENERATE, first_s, theirs.first_token_s, "s")
        yield Row(f"{what}: a token of each", GENERATE, token_s, theirs.token_s, "s")
        self._whole = None

    def _best(self, what: str, prompts: Sequence[PromptPlan], answers: Sequence[Answer], theirs: Generated) -> Row:
        """Tokens whose exact logits are below the highest by at most twice what transformers' are off at that place."""
        ids = torch.tensor(
            [[*each.input_ids.tolist(), *answer.token_ids] for each, answer in zip(prompts, answers, strict=True)],
            device=self._device,
        )
        rounded = logits_of(self._whole, ids, self._target.steps)
        with in_float32(self._whole):
            exact = logits_of(self._whole, ids, self._target.steps)
        off = 2 * (rounded - exact).abs().amax(dim=-1)
        chosen = exact.gather(-1, ids[:, -self._target.steps :, None])[..., 0]
        best = int((exact.amax(dim=-1) - chosen <= off).sum())
        highest = int((exact.amax(dim=-1) == chosen).sum())
        equal = int((ids[:, -self._target.steps :].cpu() == theirs.token_ids).sum())
        note = f"{highest} have the highest exact logit, {equal} are those of `generate`"
        return Row(what, "its tokens", best, off.numel(), "tokens", at_least=1, note=note)

    def decode(self, contexts: Sequence[int]) -> Iterator[Row]:
        """Steps of one token of every sequence, more and more of them."""
        capacity = self.runner.blocks * BLOCK_TOKENS
        for context in contexts:
            engine, running = self._engine(max(self._target.chunks)), list[Answer]()
            for count in self._target.sequences:
                what, more = f"decode of {count} × {context} tokens", count - len(running)
                if count * (context + ROOM_TOKENS) > capacity:
                    self._call.skip(what, f"the cache holds {capacity} tokens")
                    continue
                if not self._call.fits(what, more * context / PREFILL_TOKENS_PER_S + 2 * self._target.steps * STEP_S):
                    continue
                running += self._prefilled(engine, more, context, SamplingParams(ROOM_TOKENS))
                yield from self._rows(what, count, context, engine.measure(self._target.steps))
            engine.cancel(running)

    def _prefilled(self, engine: SteppedEngine, count: int, context: int, params: SamplingParams) -> list[Answer]:
        """New answers, once each has its first token."""
        answers = [self._ask(engine, context, params) for _ in range(count)]
        while not all(each.times_s for each in answers):
            engine.step()
        return answers

    def _rows(self, what: str, count: int, context: int, steps: Steps) -> Iterator[Row]:
        model = self.runner.model
        size_bytes = weights(model) * self._call.dtype.itemsize + count * context * model.token_bytes
        least_s = self._peaks.least_s(decode_operations(model, count, context), size_bytes)
        note = f"idle {steps.idle:.1%} of the time, {steps.replayed:.0%} of steps replayed"
        yield Row(what, ROOFLINE, count / steps.seconds, count / least_s, "tokens/s", note=note)
        yield Row(f"{what}: on the device", "the step", steps.device_s, steps.seconds, "s")
        yield Row(f"{what}: launch on the host", "the step", steps.launch_s, steps.seconds, "s")

    def prefill(self) -> Iterator[Row]:
        """One prompt up to its first token."""
        model = self.runner.model
        for chunk in self._target.chunks:
            engine = self._engine(chunk)
            for tokens in self._target.prompts:
                what = f"prefill of {tokens} tokens in chunks of {chunk}"
                if not self._call.fits(what, 3 * tokens / PREFILL_TOKENS_PER_S):
                    continue
                taken_s, device_s, launch_s = [], [], []
                for _ in range(3):
                    self.runner.launches.clear()
                    answer = self._ask(engine, tokens, SamplingParams(1))
                    engine.drain()
                    wait(self._device)
                    taken_s.append(answer.times_s[0] - answer.asked_s)
                    device_s.append(sum(each.device_s for each in self.runner.launches))
                    launch_s.append(sum(each.host_s for each in self.runner.launches))
                seconds, computed_s, launched_s = (median(each[1:]) for each in (taken_s, device_s, launch_s))
                size_bytes = weights(model) * self._call.dtype.itemsize + tokens * model.token_bytes
                least_s = self._peaks.least_s(prefill_operations(model, tokens), size_bytes)
                idle = f"idle {max(0, 1 - computed_s / seconds):.1%} of the time"
                yield Row(what, ROOFLINE, tokens / seconds, tokens / least_s, "tokens/s", note=idle)
                yield Row(f"{what}: on the device", "the prompt", computed_s, seconds, "s")
                yield Row(f"{what}: launches on the host", "the prompt", launched_s, seconds, "s")

    def kernels(self) -> Iterator[Row]:
        """The longest kernels of steps that decode, and of steps that compute a prompt beside; and what drawing tokens
        costs a step."""
        chunk, context = min(self._target.chunks), min(self._target.contexts)
        count = min(64, max(self._target.sequences))
        if not self._call.fits("kernels", 2 * count * context / PREFILL_TOKENS_PER_S + 8 * self._target.steps * STEP_S):
            return
        engine = self._engine(chunk)
        running = self._prefilled(engine, count, context, SamplingParams(ROOM_TOKENS))
        greedy = engine.measure(self._target.steps)
        yield from self._profiled(engine, f"decode of {count} × {context}")
        self._ask(engine, (self._profiled_steps + 2) * chunk, SamplingParams(1))
        yield from self._profiled(engine, f"decode of {count} × {context} beside a prompt")
        engine.cancel(running)
        running = self._prefilled(engine, count, context, SAMPLED)
        drawn_s = engine.measure(self._target.steps).seconds
        yield Row(f"a step of {count} tokens, drawn with top-k and top-p", "greedy", drawn_s, greedy.seconds, "s")
        engine.cancel(running)

    def _profiled(self, engine: SteppedEngine, what: str) -> Iterator[Row]:
        yield from longest_kernels(what, engine.step, self._device, self._profiled_steps)


def language_model(whole: Any) -> LanguageModel:
    """The engine's model with the weights of transformers', of which it keeps copies only where it rearranges them."""
    theirs, config = whole.model.language_model, deepcopy(whole.config)
    text = make_text(type(theirs), type(theirs.rotary_emb), config.text_config, whole.device)
    fill(text, theirs.state_dict(), "")
    with torch.device("meta"):
        lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
    fill(lm_head, whole.lm_head.state_dict(), "")
    return assemble(config, text, lm_head, embed_levels=0)
