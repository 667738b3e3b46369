"""transformers' `generate` on a device, unpruned."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.engine.contenders import Clock
from benchmarks.gpu.device import wait


@dataclass(frozen=True, slots=True)
class Generated:
    """token_ids: int64 [R, N]; logits: float32 [R, N, V], both on the host. first_token_s: to the first tokens of all.
    token_s: the median between two tokens."""

    token_ids: Tensor
    logits: Tensor
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
        return_dict_in_generate=True,
        output_logits=True,
    )
    times_s = clock.times[1:]  # the first is that of the prompts
    return Generated(
        found.sequences[:, ids.shape[1] :].cpu(),
        torch.stack(found.logits, dim=1).float().cpu(),
        times_s[0] - start_s,
        median(np.diff(times_s).tolist()),
    )
