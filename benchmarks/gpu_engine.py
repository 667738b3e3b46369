"""The engine on a device: prefill against peak arithmetic, decode against peak bandwidth, pruned against unpruned."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import torch

from benchmarks import gpu_device
from benchmarks.engine_contenders import EngineContender
from benchmarks.engine_models import Question, question
from benchmarks.gpu_run import Run
from benchmarks.operations import prefill_operations
from benchmarks.table import Row, Timings
from common.checkpoint import Checkpoint
from common.contract.plan import Grid

RATES = (0.0, 0.75)
CLIENTS = (1, 2, 4, 8, 16, 32)
ASKED = 4  # sequential questions per round


def prefill(run: Run) -> list[Row]:
    """Operations/s of an unpruned prefill, and the speed-up of the first token at rate 0.75."""
    rows = []
    best = gpu_device.operations_per_s(run.device, run.dtype, run.target.side)
    with _engine(run) as engine:
        for grid in run.target.grids:
            taken = Timings()
            kept = {rate: _questions(run, grid, rate, ASKED) for rate in RATES}
            for index in range(run.rounds + 1):
                for number in range(ASKED):
                    for rate, questions in kept.items():
                        first_token_s = engine.answer([questions[number]], 1)[0][0].first_token_s
                        if index:
                            taken.add(str(rate), first_token_s)
                _progress("prefill", index, run)
            tokens = {rate: questions[0].tokens for rate, questions in kept.items()}
            full, less = (prefill_operations(engine.runner.model, tokens[rate]) for rate in RATES)
            unpruned_s, pruned_s = (taken.median(str(rate)) for rate in RATES)
            note = f"{tokens[0.0]} and {tokens[0.75]} tokens, {unpruned_s * 1e3:.1f} and {pruned_s * 1e3:.1f} ms"
            rows += [
                Row(
                    f"prefill of {tokens[0.0]} tokens: operations",
                    f"one product of {run.target.side}² matrices",
                    full / unpruned_s,
                    best,
                    "1/s",
                ),
                Row(
                    f"prefill of {tokens[0.0]} tokens: speed-up at rate 0.75",
                    "operations less",
                    unpruned_s / pruned_s,
                    full / less,
                    "×",
                    at_least=0.85,
                    note=note,
                ),
            ]
    return rows


def decode(run: Run) -> list[Row]:
    """Bytes/s that decode steps must read (weights once, and the KV cache of each sequence) against those of a copy."""
    copied = gpu_device.copied_bytes_per_s(run.device, run.target.copied_bytes)
    engine = _engine(run)  # the benchmark calls step() itself
    model = engine.runner.model
    weights = sum(each.numel() * each.element_size() for part in (model.text, model.lm_head) for each in _unique(part))
    weights -= model.embed_tokens.weight.numel() * model.dtype.itemsize  # a step reads one row per sequence
    row_bytes = 2 * model.layers * model.kv_heads * model.head_dim * model.dtype.itemsize
    rows = []
    for running in (1, 8, 32):
        taken = Timings()
        for index in range(run.rounds + 1):
            for each in _questions(run, run.target.shared, 0.0, running):
                engine.submit(each, lambda event: None)
            going = True
            while going:
                gpu_device.wait(run.device)
                start, before = time.perf_counter(), engine.engine.stats()
                going = engine.engine.step()
                gpu_device.wait(run.device)
                if engine.engine.stats().totals.tokens - before.totals.tokens == running and index:
                    taken.add("step", time.perf_counter() - start)
            _progress(f"decode, {running} running", index, run)
        contexts = running * (_questions(run, run.target.shared, 0.0, 1)[0].tokens + 32) * row_bytes
        step_s = taken.median("step")
        rows.append(
            Row(
                f"decode steps of {running}: bytes read",
                "a copy on the device, read and written",
                (weights + contexts) / step_s,
                copied,
                "bytes/s",
                at_least=0.6 if running == 1 else None,
                note=f"{step_s * 1e3:.2f} ms a step, {weights / 1e9:.2f} GB of weights, {contexts / 1e9:.2f} of keys "
                "and values",
            )
        )
    return rows


def throughput(run: Run) -> list[Row]:
    """Requests/s at rate 0.75 against rate 0."""
    taken = Timings()
    kept = {rate: _questions(run, run.target.shared, rate, 2 * max(CLIENTS)) for rate in RATES}
    with _engine(run) as engine:
        for index in range(run.rounds + 1):
            for clients in CLIENTS:
                for rate, questions in kept.items():
                    found = engine.requests_per_s(questions[: max(8, 2 * clients)], clients)
                    if index:
                        taken.add(f"{clients} {rate}", found)
            _progress("throughput", index, run)
    return [
        Row(
            f"requests at rate 0.75, {clients} clients",
            "rate 0",
            taken.median(f"{clients} 0.75"),
            taken.median(f"{clients} 0.0"),
            "1/s",
            at_least=1.0,
        )
        for clients in CLIENTS
    ]


def _engine(run: Run) -> EngineContender:
    return EngineContender(run.folder, run.dtype, run.device, run.target.blocks)


def _questions(run: Run, grid: Grid, rate: float, count: int) -> list[Question]:
    checkpoint = Checkpoint(run.folder)
    return [question(checkpoint, rate, seed, grid) for seed in range(count)]


def _unique(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    return {each.data_ptr(): each for each in module.parameters()}.values()


def _progress(what: str, index: int, run: Run) -> None:
    print(f"{what}: round {index} of {run.rounds}{' (warm-up)' * (index == 0)}", file=sys.stderr)
