"""transformers' own answers: by `generate`, and its logits of given tokens, in its dtype and in float32."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.gpu.device import wait
from benchmarks.timing import Clock


@dataclass(frozen=True, slots=True)
class Generated:
    """token_ids: int64 [R, N], on the host. first_token_s: to the first tokens of all. token_s: the median between two
    tokens."""

    token_ids: Tensor
    first_token_s: float
    token_s: float


@torch.inference_mode()
def generate(model: Any, prompts: NDArray[np.int32], new_tokens: int) -> Generated:
    """Greedy answers to prompts, int32 [R, T], of at least two tokens; end tokens are ignored."""
    ids = torch.from_numpy(prompts).long().to(model.device)
    wait(model.device)
    start_s, clock = time.perf_counter(), Clock()
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        eos_token_id=None,
        do_sample=False,
        streamer=clock,
    )
    times_s = clock.times[1:]  # the first is that of the prompts
    return Generated(
        found[:, ids.shape[1] :].cpu(),
        times_s[0] - start_s,
        median(np.diff(times_s).tolist()),
    )


@torch.inference_mode()
def logits_of(model: Any, ids: Tensor, count: int) -> Tensor:
    """Of the last `count` tokens of each row: float32 [R, count, V], on the device. ids: int64 [R, T]."""
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=count + 1).logits
    return logits[:, :-1].float()


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """transformers' model computes in float32 inside, a copy of one layer's weights at a time."""
    text = model.model.language_model
    with ExitStack() as stack:
        for module in (text.embed_tokens, *text.layers, text.norm, model.lm_head):
            stack.enter_context(patch.object(module, "forward", partial(_in_float32, module)))
        yield


def _in_float32(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    copied = deepcopy(module)
    del copied.forward  # this function
    return copied.float()(*arguments, **keywords)
