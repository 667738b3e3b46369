"""A stage of a training in one process: steps by the wall clock, so that it ends on time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from demo.train import Schedule

SHOWN_EVERY_S, VALIDATED_EVERY_S = 30, 300


def steps(
    name: str,
    schedule: Schedule,
    parameters: Sequence[nn.Parameter],
    optimisers: Sequence[Any],
    loss_of: Callable[[float], Tensor],
) -> Iterator[int]:
    """Trains for `schedule.minutes`, and yields the number of steps when it is time to validate, and at the end.

    optimisers: with the highest rate of each group as `peak`. loss_of: the loss of a step, at a share of the time.
    """
    began = shown = validated = time.monotonic()
    losses: list[float] = []
    step, progress = 0, 0.0
    while progress < 1:
        loss = loss_of(progress)
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * schedule.learning_share(progress)
            optimiser.step()
        now = time.monotonic()
        progress = (now - began) / (60 * schedule.minutes)
        step += 1
        losses.append(loss.item())
        if now - shown > SHOWN_EVERY_S:
            mean, each_s = sum(losses) / len(losses), (now - began) / step
            print(f"{name} {progress:.1%} step {step} loss {mean:.4f} {each_s:.2f} s/step", flush=True)
            shown = now
            losses.clear()
        if progress >= 1 or now - validated > VALIDATED_EVERY_S:
            yield step
            validated = time.monotonic()
