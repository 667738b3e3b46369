"""Checks of a call's answers: the plan that comes first, and the kept tokens of an item.

Services and the client call these functions for every plan and item that a peer sends. Violations raise PeerContract.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic_ns

import numpy as np

from gridsieve.common.contract.errors import PeerContract
from gridsieve.common.contract.plan import Grid, Int32Array, Modality, PromptPlan
from gridsieve.common.contract.retention import check_kept
from gridsieve.common.contract.wire import PlanReceiver, from_ago_s, grid_message, int32_array, named_items
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.encoder_pb2 import EmbedsChunk, EncodeResponse
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse


async def received_plan(
    read: Callable[[], Awaitable[EncodeResponse | PreprocessResponse | None]],
) -> tuple[PromptPlan, int | None]:
    """The plan that a call begins with, and when media given by URL had been fetched, in ns of this host's clock.

    read: returns the call's next response, None at its end. The time is None for a prompt without such media.
    """
    plans, fetched_ns = PlanReceiver(), None
    while (response := await read()) is not None:
        if not response.HasField("plan"):
            raise PeerContract(f"a stream begins with its plan, got {response.WhichOneof('response')}")
        if fetched_ns is None and response.HasField("fetched_ago_s"):
            fetched_ns = from_ago_s(response.fetched_ago_s, monotonic_ns())
        if (plan := plans.take_message(response.plan)) is not None:
            return plan, fetched_ns
    raise PeerContract("the stream ended before its plan was complete")


def check_plan(plan: PromptPlan, prompt: prompt_pb2.Prompt, fingerprint: bytes, embed_levels: int) -> None:
    """Raises PeerContract unless the plan is one of this prompt, and made with the receiver's checkpoint.

    fingerprint, embed_levels: of the receiver's checkpoint.
    """
    if plan.fingerprint != fingerprint:
        raise PeerContract(
            f"the plan was made with checkpoint {plan.fingerprint.hex()[:12]}, this is {fingerprint.hex()[:12]}: all "
            f"three services need the same --model"
        )
    if plan.embed_levels != embed_levels:
        raise PeerContract(f"the plan has embed_levels {plan.embed_levels}, the model {embed_levels}")
    check_media(plan, prompt)


def check_media(plan: PromptPlan, prompt: prompt_pb2.Prompt) -> None:
    """Raises PeerContract unless the plan has the prompt's media, and the grids of those that brought embeddings."""
    asked = list(named_items(prompt))
    if len(plan.media) != len(asked):
        raise PeerContract(f"the prompt has {len(asked)} media, the plan {len(plan.media)}")
    for (name, modality, media), item in zip(asked, plan.media, strict=True):
        source = media.WhichOneof("source")
        if (modality is Modality.AUDIO) != (item.modality is Modality.AUDIO):
            raise PeerContract(f"{name} is planned as {item.modality.value}, a sound must be one, and nothing else")
        if item.brings_embeds != (source == "embeds"):
            raise PeerContract(f"the source of {name} is {source}, the plan has {item.frames.count} frames for it")
        if item.brings_embeds and (item.modality, grid_message(item.grid)) != (modality, media.embeds.grid):
            raise PeerContract(
                f"the embeddings of {name} are not the {item.modality.value} of the grid {item.grid} that is planned"
            )


def received_part(first: EmbedsChunk, grid: Grid, start: int) -> tuple[int, Int32Array]:
    """What the first chunk of one of several parts decides about: the slice after it, and the kept tokens, int32 [K].

    start: the part's first slice. Of a last part K may be 0.
    """
    end = grid.t
    if first.HasField("slices"):
        end = start + first.slices
        if not start < end < grid.t:
            raise PeerContract(f"a part of {first.slices} slices after {start} of {grid.t} must leave some of them")
    tokens = range(start * grid.slice_tokens, end * grid.slice_tokens)
    if not first.HasField("kept"):
        return end, np.arange(tokens.start, tokens.stop, dtype=np.int32)
    kept = int32_array(first.kept)
    check_kept(kept, grid, len(tokens) - 1, least=int(end < grid.t), among=tokens)
    return end, kept


def received_kept(first: EmbedsChunk, grid: Grid, num_kept: int, least: int | None = None) -> Int32Array | None:
    """The indices of the kept tokens in the first chunk of a whole item, int32 [K]; None if all are kept.

    num_kept: K, by the item's grid and pruning. least: K is from this on.
    """
    has_kept = first.HasField("kept")
    if has_kept != (num_kept < grid.tokens) and not (has_kept and least is not None):
        raise PeerContract(
            f"{num_kept} of {grid.tokens} tokens are kept: `kept` must be sent if and only if tokens are dropped"
        )
    if not has_kept:
        return None
    kept = int32_array(first.kept)
    check_kept(kept, grid, min(num_kept, grid.tokens - 1), least)
    return kept
