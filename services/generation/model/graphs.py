"""Decode steps as graphs: captured at the start, one for each shape, and replayed for whatever fits into it.

    one row a sequence:  [ id | t h w | tokens | block block block … ]      int32, copied to the device in one piece
    rows beyond those of a step repeat a sequence of one token in the cache's padding block

What a replay computes follows from these rows alone: which slots are written, what is seen, everything. It knows
neither CUDA (`capture` does) nor which windows a step has.
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

from services.generation.model.attention import PagedCache
from services.generation.model.language_model import LanguageModel
from services.generation.request.batch import Packed

# Columns of a row: its token's id, its positions, the tokens of its sequence, and from FIRST_BLOCK on its blocks.
ID, POSITIONS, TOKENS, FIRST_BLOCK = 0, slice(1, 4), 4, 5
# A cache that gathers copies a graph's whole table a layer, however short its sequences are: tables begin at this many
# blocks and double, and beyond this many blocks in all rows a step is computed without a graph.
LEAST_BLOCKS, MOST_GATHERED_BLOCKS = 16, 4096


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """rows: sequences; blocks: of each, at most."""

    rows: int
    blocks: int

    def holds(self, rows: int, blocks: int) -> bool:
        return rows <= self.rows and blocks <= self.blocks


@dataclass(frozen=True, slots=True)
class Captured:
    """output: what the last `replay` computed, until the next one."""

    replay: Callable[[], None]
    output: Tensor


class Capture(Protocol):
    def __call__(self, inputs: Tensor, compute: Callable[[], Tensor]) -> Captured:
        """Makes a graph of what `compute` does, which reads `inputs`, whose content is written before each replay.

        Raises RuntimeError if it does what no graph can hold.
        """


def decode_shapes(most_rows: int, most_blocks: int, gathers: bool) -> tuple[Shape, ...]:
    """The shapes that are captured, smallest first: rows by powers of two and the most; blocks likewise if gathered."""
    rows = _doubling(1, most_rows)
    if not gathers:
        return tuple(Shape(each, most_blocks) for each in rows)
    shapes = (Shape(each, blocks) for each in rows for blocks in _doubling(LEAST_BLOCKS, most_blocks))
    return tuple(shape for shape in shapes if shape.rows * shape.blocks <= MOST_GATHERED_BLOCKS)


class DecodeGraphs:
    """Graphs of steps in which every window is one text token."""

    def __init__(
        self, model: LanguageModel, cache: PagedCache, most_rows: int, most_blocks: int, capture: Capture
    ) -> None:
        """Captures, largest first, so that smaller graphs find their memory in the pool. RuntimeError as `capture`."""
        shapes = decode_shapes(most_rows, most_blocks, cache.gathers)
        self._padding_block = cache.sizes.padding_block
        self._graphs = {shape: _Graph(model, cache, shape, capture) for shape in reversed(shapes)}
        self._shapes = shapes

    def __len__(self) -> int:
        return len(self._shapes)

    def replay(self, packed: Packed) -> Tensor | None:
        """Raw logits of every row, float32 [T, vocab_size], until the next replay; None if no graph holds the step.

        A step that nobody samples from is nobody's to wait for, and the next one would write over rows in use.
        """
        if packed.media_rows.size or packed.num_decodes < len(packed.contexts) or not packed.last_rows.size:
            return None
        if packed.adapted:  # graphs were captured without adapters
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
    """One shape's.

    rows: int32 [rows, FIRST_BLOCK + blocks], on the host, to be filled before each replay, and only once somebody has
        waited for the last one's output: they are copied while the host goes on.
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
    """Raw logits of the token after each row's. inputs: int32 [R, FIRST_BLOCK + W]; returns float32 [R, vocab_size]."""
    embeds: Tensor = model.embed_tokens(inputs[:, ID])
    hidden = model.text(
        inputs_embeds=embeds[None],  # [1, R, D]
        position_ids=inputs[:, POSITIONS].long().T[:, None],  # [3, 1, R]
        use_cache=False,
        batch=cache.decode_batch(inputs[:, FIRST_BLOCK:].contiguous(), inputs[:, TOKENS].contiguous()),
    ).last_hidden_state[0]
    logits: Tensor = model.lm_head(hidden)
    return logits.float()


class CudaCapture:
    """Captures CUDA graphs into one pool of memory, on a stream of the device's own: torch's might be another's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, inputs: Tensor, compute: Callable[[], Tensor]) -> Captured:
        """What `Capture` says. First without a graph, as libraries set themselves up, and then once more and watched:
        a capture that fails leaves more behind than what fails before it.
        """
        # `torch.cuda.graph` leaves its stream current if a capture cannot be ended.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
                with _waiting_fails():
                    compute()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = compute()
            torch.cuda.current_stream().wait_stream(self._stream)
        return Captured(graph.replay, output)


@contextmanager
def _waiting_fails() -> Iterator[None]:
    """Within, what has the host wait for the device raises RuntimeError: no graph can hold it."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that torch may yet change the mode
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _doubling(least: int, most: int) -> Sequence[int]:
    """least, 2 · least, … below `most`, then `most`."""
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return [*found, most]
