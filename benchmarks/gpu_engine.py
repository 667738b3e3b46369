"""The engine on a device: prefill and decode against the roofline and transformers' `generate`.

Prompts are text, so that both compute the same. The engine is measured first and then freed: weights and contexts of
both do not fit beside each other on every card.
"""

from __future__ import annotations

import sys
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks import gpu_device
from benchmarks.engine_contenders import CHUNK_TOKENS, EngineContender
from benchmarks.engine_models import text_question
from benchmarks.gpu_generate import Generate
from benchmarks.gpu_run import GENERATE, ROOFLINE, Run
from benchmarks.operations import decode_operations, prefill_operations, weights
from benchmarks.table import Row
from services.generation.engine.stats import Step
from services.generation.model.language_model import LanguageModel

SHARED_STEPS = 64  # decode steps in which all sequences run


def prefill(run: Run) -> list[Row]:
    """Tokens/s of one prompt up to its first token."""
    ours = _prefill_by_engine(run)
    gpu_device.give_back(run.device)
    generate, rows = Generate(run.folder, run.device, run.dtype), []
    for tokens, (taken_s, least_s) in ours.items():
        theirs = [generate.answer(_prompts(1, tokens), 1)[0] for _ in range(run.rounds + 1)]
        _progress(f"prefill, `generate`, {tokens} tokens")
        rows += _rows(f"prefill of {tokens} tokens", tokens, taken_s, least_s, median(theirs[1:]))
    return rows


def _prefill_by_engine(run: Run) -> dict[int, tuple[float, float]]:
    """By number of tokens the seconds to the first token, and those of the roofline."""
    found, random = {}, np.random.default_rng(0)
    with EngineContender(run.folder, run.dtype, run.device, run.target.blocks) as engine:
        for tokens in run.target.prompts:
            questions = [text_question(tokens, random) for _ in range(run.rounds + 1)]
            taken = [engine.answer([each], 1, new_tokens=1)[0][0].first_token_s for each in questions]
            found[tokens] = median(taken[1:]), _least_prefill_s(run, engine.runner.model, tokens)
            _progress(f"prefill, engine, {tokens} tokens")
    return found


def decode(run: Run) -> list[Row]:
    """Tokens/s of decode steps, each of one token of every sequence."""
    ours = _decode_by_engine(run)
    gpu_device.give_back(run.device)
    generate, rows = Generate(run.folder, run.device, run.dtype), []
    for sequences, (steps, least_s) in ours.items():
        theirs_s = generate.answer(_prompts(sequences, run.target.context_tokens), SHARED_STEPS)[1]
        _progress(f"decode, `generate`, {sequences} sequences")
        taken_s = median(each.seconds for each in steps)
        replayed = sum(each.replayed > 0 for each in steps) / len(steps)
        what = f"decode of {sequences} × {run.target.context_tokens} tokens"
        rows += _rows(what, sequences, taken_s, least_s, theirs_s, f", {replayed:.0%} of steps replayed")
    return rows


def _decode_by_engine(run: Run) -> dict[int, tuple[list[Step], float]]:
    """By number of sequences the steps that only decode all of them, and the seconds of the roofline for one."""
    found, steps, random = {}, list[Step](), np.random.default_rng(0)
    most, context_tokens = max(run.target.sequences), run.target.context_tokens
    with EngineContender(run.folder, run.dtype, run.device, run.target.blocks, most, steps.append) as engine:
        for sequences in run.target.sequences:
            # The first sequence decodes while the prompts of the others are computed.
            new_tokens = SHARED_STEPS + -(-sequences * context_tokens // CHUNK_TOKENS)
            for _ in ("warm-up", "measured"):
                steps.clear()
                questions = [text_question(context_tokens, random) for _ in range(sequences)]
                engine.answer(questions, sequences, new_tokens)
            decoding = [each for each in steps if each.sequences == sequences and not each.prompt_tokens]
            least_s = _least_decode_s(run, engine.runner.model, sequences, context_tokens + new_tokens / 2)
            found[sequences] = decoding, least_s
            _progress(f"decode, engine, {sequences} sequences")
    return found


def _rows(what: str, tokens: int, taken_s: float, least_s: float, theirs_s: float, note: str = "") -> list[Row]:
    note = f"{taken_s * 1e3:.2f} ms, {least_s * 1e3:.2f} at least, {theirs_s * 1e3:.2f} by `generate`{note}"
    ours = tokens / taken_s
    return [
        Row(what, ROOFLINE, ours, tokens / least_s, "tokens/s", note=note),
        Row(what, GENERATE, ours, tokens / theirs_s, "tokens/s"),
    ]


def _least_prefill_s(run: Run, model: LanguageModel, tokens: int) -> float:
    """All weights are read and all keys and values written once."""
    size_bytes = weights(model) * run.dtype.itemsize + tokens * model.token_bytes
    return run.peaks.least_s(prefill_operations(model, tokens), size_bytes)


def _least_decode_s(run: Run, model: LanguageModel, sequences: int, context: float) -> float:
    """All weights, and the keys and values of all sequences, are read once."""
    size_bytes = weights(model) * run.dtype.itemsize + sequences * context * model.token_bytes
    return run.peaks.least_s(decode_operations(model, sequences, context), size_bytes)


def _prompts(sequences: int, tokens: int) -> NDArray[np.int32]:
    """int32 [sequences, tokens]."""
    random = np.random.default_rng(0)
    return np.stack([text_question(tokens, random).plan.input_ids for _ in range(sequences)])


def _progress(what: str) -> None:
    print(what, file=sys.stderr)
