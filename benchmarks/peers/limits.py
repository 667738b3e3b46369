"""What the machine can do at most, measured in the same run: bytes read per second, and products of a model's shapes.

    a decode step of one answer    reads every weight once
    the time to the first token    computes the products of tower and prompt

No contender can be faster than these, so the share of them that each reaches says what is left.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gridsieve.services.compute.packed_linear import packed

READ_BYTES = 2**30
PATCHES_PER_TOKEN = 4
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Product:
    """`count` products of [rows, k] and [k, n]."""

    count: int
    rows: int
    k: int
    n: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that the machine needs at least. first_token_s: for tower and prompt; decode_s: for one decode step."""

    read_bytes_per_s: float
    tower_s: float
    prompt_s: float
    decode_s: float

    @property
    def first_token_s(self) -> float:
        return self.tower_s + self.prompt_s


def limits(model: Path, dtype: torch.dtype, video_tokens: int, prompt_tokens: int) -> Limits:
    """For a prompt of `prompt_tokens` after pruning, with a video of `video_tokens` before it."""
    config = json.loads((model / "config.json").read_text())
    text, tower = config["text_config"], config["vision_config"]
    layer = list(_text_layer(text, 1))
    weights = text["num_hidden_layers"] * sum(each.count * each.k * each.n for each in layer)
    weights += text["vocab_size"] * text["hidden_size"]
    read = _read_bytes_per_s()
    prompt_s = text["num_hidden_layers"] * sum(_seconds(each, dtype) for each in _text_layer(text, prompt_tokens))
    rows = video_tokens * PATCHES_PER_TOKEN
    tower_s = tower["depth"] * sum(_seconds(each, dtype) for each in _tower_layer(tower, rows))
    return Limits(read, tower_s, prompt_s, weights * dtype.itemsize / read)


def _text_layer(text: dict[str, int], rows: int) -> Iterator[Product]:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    head = hidden // text["num_attention_heads"]
    yield Product(1, rows, hidden, hidden + 2 * text["num_key_value_heads"] * head)
    yield Product(1, rows, hidden, hidden)
    yield Product(2, rows, hidden, inner)
    yield Product(1, rows, inner, hidden)


def _tower_layer(tower: dict[str, int], rows: int) -> Iterator[Product]:
    hidden, inner = tower["hidden_size"], tower["intermediate_size"]
    yield Product(1, rows, hidden, 3 * hidden)
    yield Product(1, rows, hidden, hidden)
    yield Product(2, rows, hidden, inner)
    yield Product(1, rows, inner, hidden)


def _seconds(product: Product, dtype: torch.dtype) -> float:
    linear = torch.nn.Linear(product.k, product.n, bias=False, dtype=dtype)
    rows = torch.randn(product.rows, product.k, dtype=dtype)
    with torch.inference_mode():
        return product.count * min(_median_s(partial(layer, rows)) for layer in (linear, packed(linear)))


def _read_bytes_per_s() -> float:
    """A sum reads every byte once and writes nothing."""
    values = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _median_s(values.sum)


def _median_s(run: Callable[[], object]) -> float:
    run()
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
