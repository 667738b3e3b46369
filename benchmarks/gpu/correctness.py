"""Whether a card computes what it should: the engine's log-probabilities, waits of the host, frames that come late.

A model of two layers with heads of 128, 28 query heads and 4 KV heads, which FlashInfer has kernels for, answers in
bfloat16: prompts of many lengths and pruned videos, in chunks beside decoding rows, with overlap. Each answer is forced
on transformers' own model of the same weights, in one forward: in float32 on the CPU, which is right, and in bfloat16
on the device. The latter is off by what bfloat16 rounds; ours may be off by AT_MOST times that, since it rounds as
often in another order. Where keys and values are stored in fp8, transformers' are rounded to it, too.

On the CPU, FlashInfer's kernels and CUDA graphs are replaced by plain functions.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen2_5_VLForConditionalGeneration

from benchmarks.engine.questions import Question, question, text_question
from benchmarks.gpu.call import Call, Part
from benchmarks.gpu.stand_ins import capture_on, plain_kernels
from benchmarks.gpu.stepping import Answer, SteppedEngine, TimedRunner, no_waits
from benchmarks.table import Row
from demo.checkpoint import write_checkpoint
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import GridsieveError
from gridsieve.common.process import keep_freed_memory
from gridsieve.services.encoder.tower.loading import load_tower
from gridsieve.services.generation.loading import load_language_model
from gridsieve.services.generation.model import attention
from gridsieve.services.generation.model.attention import flash_infer
from gridsieve.services.generation.model.attention.cache import FP8, CacheSizes
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.sampling.sampler import SamplingParams

AT_MOST = 2.0
BLOCKS, MOST_RUNNING, MOST_TOKENS = 1024, 8, 2048
COMPARED = 20
ROUNDED = "benchmarks_fp8_keys"

# How answers are sampled without a word of the caller, by the generation_config.json of published checkpoints; the
# target says of how many tokens.
PUBLISHED_SAMPLING: Mapping[str, SamplingParams] = {
    "Qwen/Qwen2-VL-7B-Instruct": SamplingParams(1, 0.01, top_p=0.001, top_k=1),
    "Qwen/Qwen2.5-VL-7B-Instruct": SamplingParams(1, 1e-6, repetition_penalty=1.05),
    "Qwen/Qwen3-VL-8B-Instruct": SamplingParams(1, 0.7, top_p=0.8, top_k=20),
    "openbmb/MiniCPM-V-4_5": SamplingParams(1, 0.7, top_p=0.8, top_k=100, repetition_penalty=1.05),
    "top-p alone": SamplingParams(1, 0.6, top_p=0.9),
    "every rule": SamplingParams(
        1,
        0.7,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.1,
        logprobs=True,
        top_logprobs=5,
        min_new_tokens=3,
        eos_ids=(7,),
        logit_bias=((5, 1.5), (6, -100)),
        bad_words=((9, 11), (12,)),
    ),
}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute. backend: FlashInfer's of prefill."""

    name: str
    backend: str
    fp8: bool = False


WAYS = (Way("FA3", "fa3"), Way("FA2", "fa2"), Way("FA2 with fp8 keys", "fa2", fp8=True))


def parts(call: Call) -> dict[str, Part]:
    """In the order in which they are measured."""
    keep_freed_memory()
    law = Law(call)
    return {
        "law": law.holds,
        "waits": law.waits,
        "frames": law.late_frames,
        "tests": partial(tests, call),
    }


class Law:
    """The model and its references. Greedy and sampled answers are compared in the same way."""

    def __init__(self, call: Call) -> None:
        self._call, self._device = call, call.device

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        """In bfloat16, so that float32 and bfloat16 begin with equal weights."""
        folder = Path(self._call.made.enter_context(tempfile.TemporaryDirectory()))
        return Checkpoint(write_checkpoint(folder, self._call.target.law, dtype=torch.bfloat16))

    @cached_property
    def _model(self) -> LanguageModel:
        return load_language_model(self._checkpoint, torch.bfloat16, self._device)

    @cached_property
    def _exact(self) -> Any:
        return self._theirs(torch.float32, torch.device("cpu"))

    @cached_property
    def _rounding(self) -> Any:
        return self._theirs(torch.bfloat16, self._device)

    def _theirs(self, dtype: torch.dtype, device: torch.device) -> Any:
        model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(self._checkpoint.folder, dtype=dtype)
        return model.to(device).eval()

    @cached_property
    def _questions(self) -> list[Question]:
        random = np.random.default_rng(0)
        target = self._call.target
        texts = [text_question(tokens, random) for tokens in target.law_prompts]
        return [*texts, *(question(self._checkpoint, rate, seed) for seed, rate in enumerate(target.law_rates))]

    def holds(self) -> Iterator[Row]:
        """The greatest difference of log-probabilities by every way, with and without graphs."""
        for way in WAYS:
            for graphs in (False, True):
                what = f"{way.name}, decoding {'by graphs' if graphs else 'eagerly'}"
                if self._call.fits(what, 30):
                    yield self._compare(what, way, graphs)

    def _compare(self, what: str, way: Way, graphs: bool) -> Row:
        engine = self._engine(self._runner(way, graphs))
        ways = [SamplingParams(1), replace(PUBLISHED_SAMPLING["Qwen/Qwen3-VL-8B-Instruct"], seed=1)]
        new_tokens = self._call.target.law_tokens
        answers = [
            engine.ask(each, replace(ways[number % 2], max_new_tokens=new_tokens, logprobs=True, top_logprobs=COMPARED))
            for number, each in enumerate(self._questions)
        ]
        engine.drain()
        mixed = sum(each.prompt_tokens > 0 and each.answer_tokens > 0 for each in engine.steps)
        replayed = sum(each.replayed for each in engine.steps)
        assert mixed, "no step computed prompts beside answers"
        assert bool(replayed) == graphs, f"{replayed} of {len(engine.steps)} steps replayed a graph"
        ours, plain = [], []
        for asked, answer in zip(self._questions, answers, strict=True):
            exact = forced(self._exact, asked, answer)
            rounding = forced(self._rounding, asked, answer, ROUNDED if way.fp8 else "sdpa")
            at, found = named(answer)
            ours.append((found - exact.gather(1, at)).abs().flatten())
            plain.append((rounding - exact).gather(1, at).abs().flatten())
        off, rounded = torch.cat(ours), torch.cat(plain)
        note = (
            f"on average {float(off.mean()):.2g} and {float(rounded.mean()):.2g} over {len(off)} log-probabilities; "
            f"{mixed} of {len(engine.steps)} steps compute prompts beside answers, {replayed} replay a graph"
        )
        against = "transformers' bfloat16" + ", fp8 keys" * way.fp8
        return Row(what, against, float(off.max()), float(rounded.max()), "nats off", at_most=AT_MOST, note=note)

    def _runner(self, way: Way, graphs: bool) -> TimedRunner:
        find = partial(by_backend, way.backend)
        with patch.object(attention, "find_kernels", find), plain_kernels(self._device):
            runner = TimedRunner(replace(self._model, fp8_cache=way.fp8), BLOCKS)
        if graphs:
            captured = runner.capture_decoding(MOST_RUNNING, MOST_TOKENS, capture_on(self._device))
            assert captured, "decode steps were not captured: see the warning above"
        return runner

    def _engine(self, runner: TimedRunner) -> SteppedEngine:
        chunk_tokens = self._call.target.law_chunk
        return SteppedEngine(runner, chunk_tokens, MOST_RUNNING, overlap=True)

    def waits(self) -> Iterator[Row]:
        """Launches of steps in which the host does not wait for the device, with the sampling of every family."""
        runner = self._runner(WAYS[1], graphs=True)
        for name, params in PUBLISHED_SAMPLING.items():
            self._answer(runner, params)  # a first run, which allocates
            runner.launches.clear()
            runner.failures.clear()
            runner.watch = no_waits if self._device.type == "cuda" else nullcontext
            with suppress(GridsieveError):  # of a launch that waited, see `failures`
                self._answer(runner, params)
            runner.watch = nullcontext
            launched, waited = len(runner.launches), len(runner.failures)
            note = "; ".join(dict.fromkeys(runner.failures))
            what = f"launches without a wait, sampling as {name}"
            yield Row(what, "launches", launched, launched + waited, "launches", at_least=1, note=note)

    def _answer(self, runner: TimedRunner, params: SamplingParams) -> None:
        engine = self._engine(runner)
        for number, each in enumerate(self._questions):
            engine.ask(each, replace(params, seed=number, max_new_tokens=self._call.target.law_tokens))
        engine.drain()

    def late_frames(self) -> Iterator[Row]:
        """Embeddings of frames that another stream writes late, as NCCL's do, against those of frames on the host."""
        tower = load_tower(self._checkpoint, "bfloat16", self._device)
        side = 4 * tower.patches.token_px
        draw = torch.Generator().manual_seed(0)
        frames = torch.randint(0, 256, (2, side, side, 3), dtype=torch.uint8, generator=draw)
        expected = tower.encode([frames])[0]
        late = torch.zeros_like(frames, device=self._device)
        tower.encode([late])  # a first run, which allocates
        if self._device.type == "cuda":
            current, other = torch.cuda.current_stream(), torch.cuda.Stream(self._device)
            sent = frames.to(self._device)
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(other):
                torch.cuda._sleep(2**28)  # about 0.1 s
                late.copy_(sent)
            current.wait_stream(other)
        else:
            late.copy_(frames)
        found = tower.encode([late])[0]
        off = float((found - expected).abs().max())
        yield Row("late frames", "frames on the host", off, float(expected.abs().max()), "off", at_most=1e-2)


# --- the reference ----------------------------------------------------------------------------------------------


@torch.inference_mode()
def forced(model: Any, asked: Question, answer: Answer, implementation: str = "sdpa") -> Tensor:
    """transformers' log-probabilities of each token of an answer, in one forward: float32 [tokens, V], on the CPU."""
    assert answer.request is not None
    prompt, token_ids = answer.request.prompt, answer.token_ids
    ids = torch.tensor([*prompt.ids.tolist(), *token_ids[:-1]], device=model.device)
    embeds = model.get_input_embeddings()(ids)
    for span in prompt.spans:
        rows = asked.embeds[0, span.first_row : span.first_row + span.length]
        embeds[span.offset : span.end] = rows.to(embeds)
    later = np.arange(prompt.tokens, len(ids)) + prompt.delta
    positions = np.concatenate([prompt.positions, np.tile(later, (3, 1))], axis=1)
    text = model.model.language_model
    text.config._attn_implementation = implementation
    hidden = text(
        inputs_embeds=embeds[None],
        attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
        position_ids=torch.from_numpy(positions).long().to(model.device)[:, None],
        use_cache=False,
    ).last_hidden_state[0]
    logits: Tensor = model.lm_head(hidden[prompt.tokens - 1 :])
    return logits.float().log_softmax(-1).cpu()


def named(answer: Answer) -> tuple[Tensor, Tensor]:
    """The most likely tokens of each place of an answer, int64 [tokens, COMPARED], and their log-probabilities."""
    tops = [top for event in answer.events for top in event.top_logprobs]
    pairs = torch.tensor(tops, dtype=torch.float64)  # [tokens, COMPARED, 2]
    return pairs[..., 0].long(), pairs[..., 1].float()


def attention_over_fp8(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Attention of transformers over keys and values that are rounded to e4m3. [1, heads, T, head_dim] each."""
    most = torch.finfo(FP8).max
    key, value = (each.clamp(-most, most).to(FP8).to(query.dtype) for each in (key, value))
    gqa = query.shape[1] != key.shape[1]
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)
    return found.transpose(1, 2), None


AttentionInterface.register(ROUNDED, attention_over_fp8)


# --- kernels ----------------------------------------------------------------------------------------------------


def by_backend(backend: str, sizes: CacheSizes, like: Tensor) -> flash_infer.Kernels:
    """FlashInfer's kernels, checked as at the start of generation, and no others."""
    with patch.object(flash_infer, "BACKENDS", (backend,)):
        kernels = flash_infer.find_kernels(sizes, like)
    assert kernels is not None, f"FlashInfer does not work here with {backend}: see the warning above"
    return kernels


# --- the tests --------------------------------------------------------------------------------------------------

TEST_S = 20
# The project's options name plugins that may be missing here.
PYTEST = [
    "-c",
    "/dev/null",
    "--rootdir",
    ".",
    "-o",
    "pythonpath=.",
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
]


def tests(call: Call) -> Iterator[Row]:
    """tests/gpu, a process for each file: an error of a kernel makes a device unusable for its process."""
    root = Path(__file__).parents[2]
    for file in sorted((root / "tests" / "gpu").glob("test_*.py")):
        name = str(file.relative_to(root))
        if not call.fits(name, TEST_S):
            continue
        log = call.file.with_name(f"{call.file.name}-{file.stem}.log")
        command = [sys.executable, "-m", "pytest", *PYTEST, "-m", "not deep", "-v", "-rfE", "--tb=short", name]
        with log.open("w") as output:
            try:
                subprocess.run(
                    command, cwd=root, stdout=output, stderr=output, timeout=call.left_s - TEST_S / 2, check=False
                )
            except subprocess.TimeoutExpired:
                call.skip(f"the rest of {name}", "the time is over")
        yield from of_log(name, log.read_text(errors="replace").splitlines(), call)


def of_log(name: str, lines: Sequence[str], call: Call) -> Iterator[Row]:
    """A row of how many tests passed, of those that were not skipped, read from the output of pytest."""
    passed, skipped = (sum(f" {word}" in line for line in lines) for word in ("PASSED", "SKIPPED"))
    failed = [line.split()[0] for line in lines if " FAILED" in line or " ERROR" in line]
    if skipped:
        call.skip(f"{name}, {skipped} tests", "skipped")
    if not passed + skipped + len(failed):
        failed = [*lines[-3:], "no test ran"]
    if passed or failed:
        note = "; ".join(failed)
        yield Row(name, "its tests", passed, passed + len(failed), "tests", at_least=1, note=note)
