"""`make bench-peers`: the three services against vLLM and transformers' generate, as users run them.

The same checkpoint, clip (other bytes in every request) and question; answers of 64 tokens, end tokens ignored. For
each dtype and pruning rate, the contenders answer in turns: one client, then 8, then 32 at once. vLLM cannot change its
rate while it runs, so it is started again for each. transformers knows no pruning and one question at a time, and is
left out with the large checkpoint, of which three copies do not fit into memory. Where tokens are pruned, the three
services answer by EVS, as vLLM does, and by the method that chooses tokens before the tower. vLLM 0.32 ends its engine
when it prunes a Qwen3-VL or a Qwen3.5 (`recurrent`, which it computes in bfloat16 alone): there it keeps every token.

    python -m benchmarks.peers --model small --dtype bfloat16 --rate 0 --rate 0.75 --clients 1 --clients 8
    python -m benchmarks.peers --model 3b --dtype bfloat16 --rate 0 --rate 0.75 --clients 1 --clients 4
    python -m benchmarks.peers --offline --dtype float32 --rate 0 --rate 0.75

With --offline: `gridsieve batch` against vLLM's `LLM.chat`, in clips a second over a folder.

Prints Markdown or JSON to stdout and progress to stderr. Environment and checkpoints are kept in --folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.ask import ask
from benchmarks.clips import another_file, clip
from benchmarks.models import QWEN2_5_VL_3B, SMALL, SMALL_QWEN3_VL, SMALL_RECURRENT
from benchmarks.peers import offline
from benchmarks.peers.figures import Figures, Measured
from benchmarks.peers.generate import Peer
from benchmarks.peers.limits import limits
from benchmarks.peers.plot import draw
from benchmarks.peers.vllm import VllmServer, environment_of
from benchmarks.processes import peak_bytes, tree
from benchmarks.report import Beginning
from benchmarks.timing import Timed
from gridsieve.cli.launcher import LocalStack
from gridsieve.client.answer import Usage
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Options, Video
from gridsieve.common.contract.retention import EVS, PIXEL_CHANGE
from gridsieve.common.telemetry.logs import configure_logging

LAYOUTS = {"small": SMALL, "qwen3-vl": SMALL_QWEN3_VL, "recurrent": SMALL_RECURRENT, "3b": QWEN2_5_VL_3B}
UNPRUNED_BY_VLLM = ("qwen3-vl", "recurrent")
QUESTION = "Describe what happens."
NEW_TOKENS = 64
CLIP_S, CLIP_FPS, CLIP_SIZE = 8, 24, (240, 320)
OURS, BEFORE, VLLM, GENERATE = "gridsieve, evs", f"gridsieve, {PIXEL_CHANGE}", "vLLM", "transformers"

Ask = Callable[[bytes], Awaitable[Timed]]


class Contender:
    """Rounds of one contender: (median time to first token, median time between tokens, tokens/s) by clients."""

    def __init__(
        self,
        ask: Ask,
        peak: Callable[[], int],
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        most_clients: int | None = None,
    ) -> None:
        """turn: entered for as long as it is asked."""
        self.ask = ask
        self.peak = peak
        self.turn = turn
        self.most_clients = most_clients
        self.rounds: dict[int, list[tuple[float, float, float]]] = defaultdict(list)

    async def run(self, data: bytes, clients: int, count: bool) -> None:
        with self.turn():
            start = time.perf_counter()
            timed = await asyncio.gather(*(self.ask(another_file(data)) for _ in range(clients)))
            taken_s = time.perf_counter() - start
        if count:
            first = statistics.median(each.first_token_s for each in timed)
            between = statistics.median((each.total_s - each.first_token_s) / (each.tokens - 1) for each in timed)
            self.rounds[clients].append((first, between, sum(each.tokens for each in timed) / taken_s))

    def figures(self, name: str, dtype: str, rate: float) -> list[Figures]:
        found = []
        for clients, rounds in self.rounds.items():
            first_s, between_s, per_s = (statistics.median(values) for values in zip(*rounds, strict=True))
            found.append(Figures(name, dtype, rate, clients, first_s, between_s, per_s, self.peak()))
        return found


async def measure(
    model: Path, python: Path, data: bytes, dtype: str, rate: float, clients: Sequence[int], rounds: int, log: Path
) -> Measured:
    usages: dict[str, Usage] = {}
    flags = {"encoder": ["--dtype", dtype, "--cache-bytes", "0"], "generation": ["--dtype", dtype]}
    async with AsyncExitStack() as held:
        stack = await held.enter_async_context(LocalStack(model, flags=flags))
        their_rate = 0.0 if model.name.startswith(UNPRUNED_BY_VLLM) else rate
        vllm = held.enter_context(VllmServer(python, model, dtype, their_rate, log))
        client = await held.enter_async_context(GridsieveClient(stack.address))

        async def ours(method: str, clip: bytes) -> Timed:
            options = Options(pruning_method=method, pruning_rate=rate, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            timed, finished = await ask(client, Video(data=clip), QUESTION, **options)
            usages[method] = finished.usage
            return timed

        contenders = {
            OURS: Contender(partial(ours, EVS), lambda: _peak(stack)),
            BEFORE: Contender(partial(ours, PIXEL_CHANGE), lambda: _peak(stack)),
            VLLM: Contender(lambda clip: vllm.ask(clip, QUESTION, NEW_TOKENS), lambda: vllm.peak_bytes, vllm.turn),
        }
        if not rate:
            del contenders[BEFORE]
            if model.name.startswith("small"):
                contenders[GENERATE] = _generate(model, getattr(torch, dtype))
        for number in range(rounds + 1):
            for each in clients:
                for name, contender in contenders.items():
                    if each <= (contender.most_clients or each):
                        await contender.run(data, each, count=number > 0)
                        print(f"{dtype} {rate:g}: round {number}, {each} clients, {name}", file=sys.stderr)
        figures = [row for name, contender in contenders.items() for row in contender.figures(name, dtype, rate)]
    usage = usages[EVS]
    tokens = {method: each.prompt_tokens for method, each in usages.items()}
    least = limits(model, getattr(torch, dtype), usage.media[0].grid.tokens, usage.prompt_tokens)
    return Measured(dtype, rate, tokens, least, tuple(figures))


def _generate(model: Path, dtype: torch.dtype) -> Contender:
    peer = Peer(model, dtype)

    async def ask(clip: bytes) -> Timed:
        return await asyncio.to_thread(peer.ask, clip, QUESTION, NEW_TOKENS, NEW_TOKENS)

    return Contender(ask, lambda: 0, most_clients=1)


def _peak(stack: LocalStack) -> int:
    return sum(peak_bytes(pid) for process in stack.processes.values() for pid in tree(process.pid))


def checkpoint(folder: Path, name: str, dtype: str) -> Path:
    """The folder of a checkpoint, a name of LAYOUTS, stored in `dtype`; written if it is not there."""
    path = folder / f"{name}-{dtype}"
    if not (path / "config.json").exists():
        print(f"writing {path}", file=sys.stderr)
        layout = LAYOUTS[name]
        layout.save(layout.drawn(dtype=getattr(torch, dtype)), path)
    return path


def table(measured: Sequence[Measured]) -> list[str]:
    """Markdown. Shares are of the machine's limit: of the time to the first token and of a decode step."""
    lines = [
        "| dtype | rate | clients | contender | first token | of limit | between tokens | of limit | tokens/s | × vLLM "
        "| peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in measured:
        theirs = {row.clients: row for row in each.figures if row.contender == VLLM}
        for row in sorted(each.figures, key=lambda row: (row.clients, row.contender)):
            alone, other = row.clients == 1, theirs[row.clients]
            first = f"{each.limits.first_token_s / row.first_token_s:.2f}" if alone else ""
            between = f"{each.limits.decode_s / row.between_tokens_s:.2f}" if alone else ""
            memory = f"{row.peak_bytes / 2**30:.2f} GiB" if row.peak_bytes else ""
            cells = (
                *(each.dtype, f"{each.rate:g}", str(row.clients), row.contender),
                *(f"{row.first_token_s * 1e3:.0f} ms", first, f"{row.between_tokens_s * 1e3:.1f} ms", between),
                *(f"{row.tokens_per_s:.1f}", f"{row.tokens_per_s / other.tokens_per_s:.2f}", memory),
            )
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    lines += [
        f"- {each.dtype}, rate {each.rate:g}: {_tokens(each)}; the machine reads "
        f"{each.limits.read_bytes_per_s / 1e9:.1f} GB/s, needs {each.limits.decode_s * 1e3:.1f} ms for a decode step, "
        f"{each.limits.tower_s * 1e3:.0f} ms for the products of the tower and {each.limits.prompt_s * 1e3:.0f} ms for "
        f"those of the prompt"
        for each in measured
    ]
    return lines


def _tokens(measured: Measured) -> str:
    """Prompt tokens by method."""
    return ", ".join(f"{tokens} prompt tokens by {method}" for method, tokens in measured.prompt_tokens.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=LAYOUTS, default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append")
    parser.add_argument("--rate", type=float, action="append")
    parser.add_argument("--clients", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--offline", action="store_true", help="jobs over a folder, in place of clients")
    parser.add_argument("--clips", type=int, default=48, help="clips of a folder, with --offline")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gridsieve-peers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draws the figures, as a PNG")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    configure_logging("benchmarks", "auto", "warning")  # to stderr
    beginning = Beginning.of("peers")
    args.folder.mkdir(parents=True, exist_ok=True)
    python = environment_of(args.folder / "vllm")
    data = clip(CLIP_S * CLIP_FPS, *CLIP_SIZE, keyframe_every=2 * CLIP_FPS, fps=CLIP_FPS)
    if args.offline:
        jobs: list[offline.Job] = []
        for dtype in args.dtype or ("float32", "bfloat16"):
            model = checkpoint(args.folder, args.model, dtype)
            for rate in args.rate or (0.0, 0.75):
                log = args.folder / f"vllm-offline-{args.model}-{dtype}-{rate:g}.log"
                sizes = (args.clips, args.rounds, QUESTION, NEW_TOKENS)
                jobs += offline.measure(model, python, data, dtype, rate, *sizes, log)
        if args.json:
            print(json.dumps(asdict(beginning) | {"jobs": [asdict(each) for each in jobs]}, indent=2))
        else:
            print(beginning, *offline.table(jobs), sep="\n")
        return
    measured: list[Measured] = []
    try:
        for dtype in args.dtype or ("float32", "bfloat16"):
            model = checkpoint(args.folder, args.model, dtype)
            for rate in args.rate or (0.0, 0.5, 0.75, 0.9):
                log = args.folder / f"vllm-{args.model}-{dtype}-{rate:g}.log"
                run = measure(model, python, data, dtype, rate, args.clients or (1, 8, 32), args.rounds, log)
                measured.append(asyncio.run(run))
    finally:  # what was measured before a contender failed is not lost
        if args.plot:
            draw(measured, args.plot)
        if args.json:
            print(json.dumps(asdict(beginning) | {"measured": [asdict(each) for each in measured]}, indent=2))
        else:
            print(beginning, *table(measured), sep="\n")


if __name__ == "__main__":
    main()
