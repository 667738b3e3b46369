"""CUDA graphs of decode steps: captured at startup, one for each shape, and replayed for every step that fits.

    one row per sequence:  [ id | t h w | tokens | block block block … ]      int32, copied to the device in one piece
    rows beyond those of a step hold a sequence of one token in the cache's padding block

These rows are the only input of a replay: slots to write, contexts and positions follow from them. `DecodeGraphs`
itself is independent of CUDA, which `CudaCapture` implements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from services.generation.model.attention.cache import PagedCache
from services.generation.model.language_model import LanguageModel
from services.generation.request.batch import Packed

# Columns of a row: token id, positions, length of the sequence in tokens, and from FIRST_BLOCK on its block table.
ID, POSITIONS, TOKENS, FIRST_BLOCK = 0, slice(1, 4), 4, 5
# A gathering cache copies the whole block table of a graph in every layer, even for short sequences. For such caches
# tables of LEAST_BLOCKS, doubled repeatedly, are captured; steps whose tables would exceed MOST_GATHERED_BLOCKS blocks
# in total run without a graph.
LEAST_BLOCKS, MOST_GATHERED_BLOCKS = 16, 4096


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """rows: number of sequences; blocks: maximum number of blocks of each."""

    rows: int
    blocks: int

    def holds(self, rows: int, blocks: int) -> bool:
        return rows <= self.rows and blocks <= self.blocks


@dataclass(frozen=True, slots=True)
class Captured:
    """output: the result of the last `replay`, valid until the next one."""

    replay: Callable[[], None]
    output: Tensor


class Capture(Protocol):
    def __call__(self, inputs: Tensor, compute: Callable[[], Tensor]) -> Captured:
        """Captures `compute`, which reads `inputs`; the content of `inputs` is written before each replay.

        Raises RuntimeError if `compute` cannot be captured.
        """


def decode_shapes(most_rows: int, most_blocks: int, gathers: bool) -> tuple[Shape, ...]:
    """The shapes to capture, smallest first: powers of two and the maximum of rows; likewise of blocks if gathered."""
    rows = _doubling(1, most_rows)
    if not gathers:
        return tuple(Shape(each, most_blocks) for each in rows)
    shapes = (Shape(each, blocks) for each in rows for blocks in _doubling(LEAST_BLOCKS, most_blocks))
    return tuple(shape for shape in shapes if shape.rows * shape.blocks <= MOST_GATHERED_BLOCKS)


class DecodeGraphs:
    """Graphs for steps in which every window is a single text token."""

    def __init__(
        self, model: LanguageModel, cache: PagedCache, most_rows: int, most_blocks: int, capture: Capture
    ) -> None:
        """Captures the largest shape first: smaller graphs reuse its memory. Raises RuntimeError as `capture`."""
        shapes = decode_shapes(most_rows, most_blocks, cache.gathers)
        self._padding_block = cache.sizes.padding_block
        self._graphs = {shape: _Graph(model, cache, shape, capture) for shape in reversed(shapes)}
        self._shapes = shapes

    def __len__(self) -> int:
        return len(self._shapes)

    def replay(self, packed: Packed) -> Tensor | None:
        """Raw logits of every row, float32 [T, vocab_size], valid until the next replay; None if no graph fits.

        Steps with no sampled row are not replayed: nothing synchronises before the pinned input is reused.
        """
        if packed.media_rows.size or packed.num_decodes < len(packed.contexts) or not packed.last_rows.size:
            return None
        if packed.adapted:  # graphs are captured without adapters
            return None
        sequences = [context.blocks for context in packed.contexts]
        most_blocks = max(map(len, sequences))
        shape = next((each for each in self._shapes if each.holds(len(sequences), most_blocks)), None)
        if shape is None:
            return None
        graph = self._graphs[shape]
        rows, filled = graph.rows, len(sequences)
        rows[:filled, ID], rows[:filled, POSITIONS] = packed.ids, packed.positions.T
        rows[:filled, TOKENS] = [context.end for context in packed.contexts]
        for row, blocks in zip(rows, sequences, strict=False):
            row[FIRST_BLOCK : FIRST_BLOCK + len(blocks)] = blocks
        rows[filled:, :TOKENS], rows[filled:, TOKENS], rows[filled:, FIRST_BLOCK] = 0, 1, self._padding_block
        return graph.replay()[:filled]


class _Graph:
    """The graph of one shape.

    rows: int32 [rows, FIRST_BLOCK + blocks], pinned host memory. They are copied asynchronously: fill them before a
        replay, but only after the host has waited for the output of the previous one.
    """

    def __init__(self, model: LanguageModel, cache: PagedCache, shape: Shape, capture: Capture) -> None:
        on_cuda = model.device.type == "cuda"
        size = (shape.rows, FIRST_BLOCK + shape.blocks)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda)
        self.rows = self._host.numpy()
        self.rows[:, TOKENS], self.rows[:, FIRST_BLOCK:] = 1, cache.sizes.padding_block
        self._inputs = self._host.to(model.device, copy=True)
        self._captured = capture(self._inputs, partial(_decode, model, cache, self._inputs))

    def replay(self) -> Tensor:
        self._inputs.copy_(self._host, non_blocking=True)
        self._captured.replay()
        return self._captured.output


def _decode(model: LanguageModel, cache: PagedCache, inputs: Tensor) -> Tensor:
    """Raw next-token logits. inputs: int32 [R, FIRST_BLOCK + W]; returns float32 [R, vocab_size]."""
    embeds: Tensor = model.embed_tokens(inputs[:, ID])
    hidden = model.text(
        inputs_embeds=embeds[None],  # [1, R, D]
        position_ids=model.position_ids(inputs[:, POSITIONS].long().T),
        use_cache=False,
        batch=cache.decode_batch(inputs[:, FIRST_BLOCK:].contiguous(), inputs[:, TOKENS].contiguous()),
    ).last_hidden_state[0]
    logits: Tensor = model.lm_head(hidden)
    return logits.float()


class CudaCapture:
    """Captures CUDA graphs into one memory pool, on a stream of its device; torch's default stream may be another's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, inputs: Tensor, compute: Callable[[], Tensor]) -> Captured:
        """Implements `Capture`. Runs `compute` twice before capturing: once so that libraries initialise, once with
        synchronisation forbidden, because a failure there leaves less state behind than a failing capture.
        """
        # `torch.cuda.graph` leaves its stream current if the end of the capture fails.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
                with _forbid_synchronisation():
                    compute()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = compute()
            torch.cuda.current_stream().wait_stream(self._stream)
        return Captured(graph.replay, output)


@contextmanager
def _forbid_synchronisation() -> Iterator[None]:
    """Raises RuntimeError when the host waits for the device, which a graph cannot capture."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns that the mode is experimental
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _doubling(least: int, most: int) -> Sequence[int]:
    """least, 2 · least, 4 · least, … below `most`, then `most`."""
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return [*found, most]
