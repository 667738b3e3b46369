"""The three services on a device, from the file's bytes to the tokens, at several rates, for one client and many.

Every question is about another file, and the encoder's cache is off, so that no question hits a cache. Clients form a
closed loop: each asks again when it is answered. transformers' `generate` answers one question after another, unpruned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.clips import RATE, another_file, clip
from benchmarks.gpu.call import GENERATE, Call, Part
from benchmarks.gpu.device import give_back, wait
from benchmarks.table import Row
from benchmarks.timing import Clock, Summary, Timed
from gridsieve.bench.load import closed_loop
from gridsieve.bench.measure import Record, timed
from gridsieve.bench.metrics import Samples, read_metrics
from gridsieve.bench.workload import Workload
from gridsieve.cli.launcher import LocalStack
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Options, Pruning, Text, Video
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Modality
from gridsieve.common.contract.retention import EVS, PIXEL_CHANGE
from gridsieve.services.preprocessing.conversation import Conversation, MediaRequest
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.prompt.turns import Turn
from gridsieve.services.preprocessing.video.sampling import FrameSampling

PRUNINGS = (Pruning(0.0, EVS), Pruning(0.75, EVS), Pruning(0.75, PIXEL_CHANGE), Pruning(0.9, PIXEL_CHANGE))
HEIGHT_PX, WIDTH_PX, KEYFRAME_EVERY = 360, 640, 60
QUESTION = "What happens in the video?"
NEW_TOKENS = 64
OPTIONS: Options = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0}
REQUESTS_PER_CLIENT, LEAST_REQUESTS = 2, 4
GENERATE_ROUNDS = 3
# Time that each may need at most.
GENERATE_S, START_S, REQUEST_S = 120, 120, 2
STEPS, REPLAYED = "gridsieve_generation_step_seconds_count", "gridsieve_generation_replayed_steps_total"


def parts(call: Call) -> dict[str, Part]:
    return {"stack": partial(stack, call)}


def stack(call: Call) -> Iterator[Row]:
    """Time to first token, tokens/s and the share of replayed steps, by pruning rate and number of clients."""
    target, device = call.target, call.device
    if not call.fits("the stack", GENERATE_S + START_S):
        return
    data = clip(target.clip_s * RATE, HEIGHT_PX, WIDTH_PX, KEYFRAME_EVERY)
    whole = target.layout.drawn(device, call.dtype)
    with TemporaryDirectory() as name:
        folder = target.layout.save(whole, Path(name))
        generate = Generate(whole, folder)
        times = [generate.ask(another_file(data), QUESTION, NEW_TOKENS) for _ in range(GENERATE_ROUNDS + 1)]
        theirs = Summary.of(times[1:])
        del generate, whole
        give_back(device)
        flags = {name: ["--device", str(device)] for name in ("encoder", "generation")}
        flags["encoder"] += ["--cache-bytes", "0"]
        with LocalStack(folder, flags=flags, ready_timeout_s=max(1, call.left_s)) as started:
            most = max(target.clients)
            asyncio.run(_measured(started, data, PRUNINGS[0], most, most))  # a warm-up
            for clients in target.clients:
                for pruning in PRUNINGS:
                    by = f" by {pruning.method}" if pruning.rate else ""
                    what = f"rate {pruning.rate:g}{by}, {clients} clients"
                    requests = max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * clients)
                    if call.fits(what, requests * REQUEST_S):
                        records, wall_s, replayed, steps = asyncio.run(
                            _measured(started, data, pruning, clients, requests)
                        )
                        yield from _rows(what, records, wall_s, theirs)
                        yield Row(f"{what}: steps replayed", "all steps", replayed, steps, "steps")


async def _measured(
    started: LocalStack, data: bytes, pruning: Pruning, clients: int, requests: int
) -> tuple[list[Record], float, float, float]:
    """The records of all requests, the seconds that they took together, and the steps replayed and in all."""
    metrics = [f"127.0.0.1:{started.metrics_ports['generation']}"]
    async with GridsieveClient(started.address) as client:
        before = await read_metrics(metrics)
        records, wall_s = await _ask(client, data, pruning, clients, requests)
        after = await read_metrics(metrics)
    steps, replayed = (_sum(after, name) - _sum(before, name) for name in (STEPS, REPLAYED))
    return records, wall_s, replayed, steps


async def _ask(
    client: GridsieveClient, data: bytes, pruning: Pruning, clients: int, requests: int
) -> tuple[list[Record], float]:
    """The records of all requests, and the seconds that they took together."""
    workload = Workload(((Video(data=data), Text(QUESTION)),), has_new_bytes=True)
    clock = asyncio.get_running_loop().time
    records: list[Record] = []
    began_s = clock()

    async def ask(number: int, due_s: float) -> None:
        records.append(await timed(client, number, workload, pruning, due_s, began_s, OPTIONS))

    await closed_loop(ask, clients, requests)
    return records, clock() - began_s


def _rows(what: str, records: Sequence[Record], wall_s: float, theirs: Summary) -> list[Row]:
    """Of the answered requests. Raises RuntimeError if none was answered."""
    failures = [record.failure for record in records if record.failure]
    first = [record.first_token_s for record in records if record.first_token_s is not None]
    if not first:
        raise RuntimeError(f"{what}: all {len(records)} requests failed: {failures[0]}")
    usages = [record.usage for record in records if record.usage]
    note = f"{usages[0].prompt_tokens} tokens of prompt; {_stages(records)}"
    if failures:
        note += f"; {len(failures)} of {len(records)} requests failed, {failures[0]}"
    tokens_per_s = sum(usage.completion_tokens for usage in usages) / wall_s
    return [
        Row(f"{what}: first token", GENERATE, median(first), theirs.first_token_s, "s", note=note),
        Row(f"{what}: tokens", GENERATE, tokens_per_s, NEW_TOKENS / theirs.total_s, "tokens/s"),
    ]


def _stages(records: Sequence[Record]) -> str:
    """The median of each stage before the first token."""
    stages = [record.timings.stages_s for record in records if record.timings]
    return ", ".join(f"{name} {median(each[name] for each in stages) * 1e3:.0f} ms" for name in stages[0])


def _sum(samples: Sequence[Samples], name: str) -> float:
    return sum(value for each in samples for (found, _), value in each.items() if found == name)


class Generate:
    """transformers' `generate`. Prompts and frames of clips come from Gridsieve's preprocessing, in this process."""

    def __init__(self, whole: Any, folder: Path) -> None:
        """folder: the checkpoint of `whole`, a model of transformers."""
        checkpoint = Checkpoint(folder)
        self._planner = Planner(checkpoint, None)
        self._video = checkpoint.read_json("video_preprocessor_config.json")
        self._model, self._device, self._dtype = whole, whole.device, whole.dtype

    def ask(self, clip: bytes, question: str, new_tokens: int) -> Timed:
        """Answers a question about a clip."""
        start, clock = time.perf_counter(), Clock()
        turn = Turn("user", (Modality.VIDEO, question))
        planned = self._planner.plan(
            Conversation((turn,), (MediaRequest("video", Modality.VIDEO, clip, FrameSampling()),))
        )
        with planned.files:
            frames = torch.from_numpy(np.concatenate([each.pixels for each in planned.media[0].slices()]))
        patches, grid = self._patches(frames.to(self._device))
        ids = torch.from_numpy(planned.plan.input_ids).long().to(self._device)[None]
        config, timed = self._model.config, {}
        if config.model_type == "qwen2_5_vl":  # Qwen3-VL's prompt has timestamps instead
            timed["second_per_grid_ts"] = torch.tensor([float(planned.plan.media[0].seconds_per_grid or 0)])
        self._generate(
            clock,
            new_tokens,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == config.video_token_id).int() * 2,
            pixel_values_videos=patches,
            video_grid_thw=torch.tensor([grid], device=self._device),
            **timed,
        )
        return Timed(clock.times[1] - start, time.perf_counter() - start, new_tokens)

    @torch.inference_mode()
    def _generate(self, clock: Clock, new_tokens: int, **inputs: Tensor) -> None:
        self._model.generate(**inputs, max_new_tokens=new_tokens, eos_token_id=None, do_sample=False, streamer=clock)
        wait(self._device)

    def _patches(self, frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches as transformers takes them, and their grid. frames: uint8 [F, H, W, 3]."""
        config = self._video
        patch, merge, temporal = (config[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
        mean, std = (torch.tensor(config[name], device=frames.device) for name in ("image_mean", "image_std"))
        t, h, w = len(frames) // temporal, frames.shape[1] // patch, frames.shape[2] // patch
        pixels = ((frames / 255 - mean) / std).to(self._dtype)
        grid = pixels.view(t, temporal, h // merge, merge, patch, w // merge, merge, patch, 3)
        return grid.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, -1), (t, h, w)
