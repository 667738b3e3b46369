"""Measurements of the engine: functions of a model and a number of rounds that return rows."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from benchmarks.engine.contenders import NEW_TOKENS, EngineContender, Generate, GenerateText
from benchmarks.engine.operations import prefill_operations
from benchmarks.engine.questions import Question, question, text_question
from benchmarks.models import Model
from benchmarks.table import Row, Timings
from gridsieve.common.checkpoint import Checkpoint

CLIENTS = (1, 2, 4, 8, 16, 32)
RATE = 0.75
TEXT_TOKENS = 512
GENERATED = 4  # questions that transformers answers per round
FLOAT32 = torch.float32


def throughput(model: Model, rounds: int) -> list[Row]:
    """Requests/s at 8 and 32 clients, unpruned, against `generate` and against ideal batching."""
    taken, questions = Timings(), _questions(model, 0.0, 32)
    generate = Generate(model.folder, FLOAT32)
    with EngineContender(model.folder, FLOAT32) as engine:
        for index in range(rounds + 1):
            timed = Timings()
            for each in questions[:GENERATED]:
                timed.add("generate", generate.answer(each).total_s)
            for alone in engine.answer(questions[:GENERATED], 1):
                timed.add("prefill", alone.first_token_s)
                timed.add("decode", alone.total_s - alone.first_token_s)
            for clients in (8, 32):
                timed.add(f"{clients} clients", engine.requests_per_s(questions[: max(16, clients)], clients))
            _progress("throughput", model, index, rounds)
            for name in ("generate", "prefill", "decode", "8 clients", "32 clients") if index else ():
                taken.add(name, timed.median(name))
    prefill, decode, generated = (taken.median(name) for name in ("prefill", "decode", "generate"))
    at_8, at_32 = (taken.median(f"{clients} clients") for clients in (8, 32))
    limit = 1 / (prefill + decode / 8)
    note = (
        f"P = {prefill * 1e3:.1f} ms, D = {decode * 1e3:.1f} ms, "
        f"(P + D) / (P + D/8) = {(prefill + decode) * limit:.2f}; "
        f"`generate` takes {generated / (prefill + decode):.2f} × (P + D)"
    )
    what, other = f"{model.name}: requests at", "`generate`, one after another"
    return [
        Row(f"{what} 8 clients", other, at_8, 1 / generated, "1/s", at_least=None if model.small else 3.3),
        Row(f"{what} 32 clients", other, at_32, 1 / generated, "1/s"),
        Row(f"{what} 8 clients", "1 / (P + D/8)", at_8, limit, "1/s", at_least=0.7, note=note),
    ]


def recurrent(model: Model, rounds: int) -> list[Row]:
    """Answers to prompts of text of 1 and 8 clients against `generate`, one after another."""
    taken, random = Timings(), np.random.default_rng(0)
    whole = AutoModelForImageTextToText.from_pretrained(model.folder, dtype=FLOAT32)
    generate = GenerateText(whole)
    with EngineContender(model.folder, FLOAT32) as engine:
        for index in range(rounds + 1):
            questions = [text_question(TEXT_TOKENS, random) for _ in range(16)]
            timed = [generate.answer(each) for each in questions[:2]]
            alone = engine.answer(questions[2:4], 1)
            per_s = engine.requests_per_s(questions[4:], 8)
            _progress("recurrent", model, index, rounds)
            if index:
                taken.add("8 clients", per_s)
                for name, found in (("theirs", timed), ("ours", alone)):
                    taken.add(f"{name} first", statistics.median(each.first_token_s for each in found))
                    taken.add(f"{name} total", statistics.median(each.total_s for each in found))
    what, other = f"{model.name}: {TEXT_TOKENS} tokens of text", "`generate`"
    ours, theirs = taken.median("ours total"), taken.median("theirs total")
    return [
        Row(f"{what}, first token", other, taken.median("ours first"), taken.median("theirs first"), "s"),
        Row(f"{what}, {NEW_TOKENS} new tokens", other, ours, theirs, "s"),
        Row(f"{what}, 8 clients", f"{other}, one after another", taken.median("8 clients"), 1 / theirs, "requests/s"),
    ]


def pruning(model: Model, rounds: int) -> list[Row]:
    """Requests/s at rate 0.75 against rate 0."""
    taken = Timings()
    kept = {rate: _questions(model, rate, max(CLIENTS)) for rate in (0.0, RATE)}
    with EngineContender(model.folder, FLOAT32) as engine:
        for rate in kept:
            engine.answer(kept[rate][:2], 2)
        for index in range(1, rounds + 1):
            for clients in CLIENTS:
                for rate, questions in kept.items():
                    found = engine.requests_per_s(questions[: max(8, clients)], clients)
                    taken.add(f"{clients} {rate}", found)
            _progress("pruning", model, index, rounds)
    rows = []
    for clients in CLIENTS:
        # From 8 clients on, decode steps are shared by many requests and prefill dominates.
        what, goal = f"{model.name}: requests at rate {RATE}, {clients} clients", 1.5 if clients >= 8 else 1.0
        ours, theirs = (taken.median(f"{clients} {rate}") for rate in (RATE, 0.0))
        rows.append(Row(what, "rate 0", ours, theirs, "1/s", at_least=goal))
    return rows


def prefill(model: Model, rounds: int) -> list[Row]:
    """Speed-up of the first token at rate 0.75, against the ratio of arithmetic operations."""
    taken = Timings()
    kept = {rate: _questions(model, rate, GENERATED) for rate in (0.0, RATE)}
    with EngineContender(model.folder, FLOAT32) as engine:
        for index in range(rounds + 1):
            for number in range(GENERATED):
                for rate, questions in kept.items():
                    timed = engine.answer([questions[number]], 1)[0].first_token_s
                    if index:
                        taken.add(str(rate), timed)
            _progress("prefill", model, index, rounds)
        full, less = (prefill_operations(engine.runner.model, kept[rate][0].tokens) for rate in (0.0, RATE))
    full_s, less_s = taken.median("0.0"), taken.median(str(RATE))
    what, other = (
        f"{model.name}: prefill's speed-up at rate {RATE}",
        "2·T·weights + 2·T²·heads·head_dim·layers, as a ratio",
    )
    note = f"{full / 1e9:.2f} and {less / 1e9:.2f} billion operations, {full_s * 1e3:.1f} and {less_s * 1e3:.1f} ms"
    return [Row(what, other, full_s / less_s, full / less, "×", at_least=0.85, note=note)]


def step(model: Model, rounds: int) -> list[Row]:
    """Wall time of a decode step outside the model's forward, with 8 running requests."""
    taken = Timings()
    contender = EngineContender(model.folder, FLOAT32)  # the benchmark calls step() itself
    spent, began = [0.0], [0.0]

    def begin(*_: object) -> None:
        began[0] = time.perf_counter()

    def end(*_: object) -> None:
        spent[0] += time.perf_counter() - began[0]

    for part in (contender.runner.model.text, contender.runner.model.lm_head):
        part.register_forward_pre_hook(begin)
        part.register_forward_hook(end)
    for index in range(rounds):
        for each in _questions(model, 0.0, 8):
            contender.submit(each, lambda event: None)
        running = True
        while running:
            spent[0], start = 0.0, time.perf_counter()
            contender.steps.clear()
            running = contender.engine.step()
            if sum(each.prompt_tokens + each.answer_tokens for each in contender.steps) == 8:
                total = time.perf_counter() - start
                taken.add("step", total)
                taken.add("outside", total - spent[0])
        _progress("step", model, index + 1, rounds)
    what, goal = f"{model.name}: outside the model's forward, 8 running", None if model.small else 0.1
    return [Row(what, "a decode step", taken.median("outside"), taken.median("step"), "s", at_most=goal)]


def bfloat16(model: Model, rounds: int) -> list[Row]:
    """Requests/s in bfloat16 against float32, on processors with bfloat16 arithmetic."""
    flags = Path("/proc/cpuinfo")
    if not flags.exists() or not {"avx512_bf16", "amx_bf16"} & set(flags.read_text().split()):
        print("bfloat16: this processor does not multiply it", file=sys.stderr)
        return []
    taken, questions = Timings(), _questions(model, 0.0, 16)
    with EngineContender(model.folder, torch.bfloat16) as half, EngineContender(model.folder, FLOAT32) as full:
        for index in range(rounds + 1):
            for name, engine in (("bfloat16", half), ("float32", full)):
                found = engine.requests_per_s(questions, 8)
                if index:
                    taken.add(name, found)
            _progress("bfloat16", model, index, rounds)
    what = f"{model.name}: requests at 8 clients, bfloat16"
    return [Row(what, "float32", taken.median("bfloat16"), taken.median("float32"), "1/s")]


def _questions(model: Model, rate: float, count: int) -> list[Question]:
    checkpoint = Checkpoint(model.folder)
    return [question(checkpoint, rate, seed) for seed in range(count)]


def _progress(what: str, model: Model, index: int, rounds: int) -> None:
    print(f"{what}, {model.name}: round {index} of {rounds}{' (warm-up)' * (index == 0)}", file=sys.stderr)
