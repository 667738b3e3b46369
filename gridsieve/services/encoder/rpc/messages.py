"""Checks the parts of a request that concern the encoder, before its prompt is passed on: pruning, adapter, and
embeddings that it brings.

Embeddings stay here: preprocessing gets their grid, their time base and their digest. Preprocessing checks the rest of
the prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Grid, Modality
from gridsieve.common.contract.retention import AFTER_TOWER, BEFORE_TOWER, ItemPruning, method_of
from gridsieve.common.contract.tensors import MAX_AXES
from gridsieve.common.contract.wire import named_items, pruning_of, prunings_of, tensor_digest
from gridsieve.services.compute.adapters import named_adapter
from gridsieve.services.compute.device import name_of
from gridsieve.services.encoder.tower.tower import Tower
from gridsieve.v1 import prompt_pb2, tensor_pb2
from gridsieve.v1.encoder_pb2 import EncodePrompt, EncodeRequest

_DTYPES = {
    tensor_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DTYPE_FLOAT16: torch.float16,
    tensor_pb2.DTYPE_FLOAT32: torch.float32,
}


@dataclass(frozen=True, slots=True, eq=False)
class BroughtEmbeds:
    """Embeddings that came with a prompt: (1 + embed_levels, t·h·w, embed_dim), in the dtype sent."""

    grid: Grid
    tensor: Tensor


def checked_prunings(request: EncodePrompt, tower: Tower) -> tuple[ItemPruning, ...]:
    """How each item of the plan is pruned, by its index there.

    Raises InvalidRequest for a rate out of range, where tokens are dropped for a method that the tower does not take,
    and for one that ranks pixels of a video that brings its embeddings.
    """
    prunings = prunings_of(request.prompt, request.pruning, tower.usual_method)
    _check_method("pruning", pruning_of(request.pruning, tower.usual_method), tower)
    for (name, modality, media), pruning in zip(named_items(request.prompt), prunings, strict=True):
        if media.HasField("pruning"):
            _check_method(f"{name}.pruning", pruning, tower)
        if media.WhichOneof("source") == "embeds" and method_of(pruning, modality) in BEFORE_TOWER:
            text = f"must be one of {', '.join(AFTER_TOWER)} for embeds, which have no pixels, got {pruning.method!r}"
            raise InvalidRequest(text, field=f"{name}.pruning.method", value=pruning.method)
    return prunings


def adapter_of(request: EncodeRequest, tower: Tower) -> bytes:
    """The digest of the adapter that media are encoded with; empty: none that changes the tower.

    Raises InvalidRequest for one that is not loaded, or was loaded from other files than the caller's.
    """
    if not request.HasField("adapter"):
        return b""
    digest = named_adapter(request.adapter, tower.adapters, "the encoder")
    if request.adapter_digest not in (b"", digest):
        text = f"{request.adapter!r} was loaded by the encoder from other files than by its caller"
        raise InvalidRequest(text, field="adapter", value=request.adapter)
    return digest if digest in tower.adapted else b""


def take_embeds(prompt: prompt_pb2.Prompt, tower: Tower) -> dict[int, BroughtEmbeds]:
    """Moves embeddings out of the prompt, leaving their digests; returns them by media index.

    Reads and converts all values, so call it in a thread, not on the event loop.
    Raises InvalidRequest, naming the field, for a dtype, shape, size or value that the tower could not have produced.
    """
    return {
        index: _take(media.embeds, tower, f"{name}.embeds")
        for index, (name, modality, media) in enumerate(named_items(prompt))
        if media.WhichOneof("source") == "embeds" and modality is not Modality.AUDIO
    }


def _take(embeds: prompt_pb2.MediaEmbeds, tower: Tower, name: str) -> BroughtEmbeds:
    try:
        grid = Grid(embeds.grid.t, embeds.grid.h, embeds.grid.w)
    except ValueError as error:
        raise InvalidRequest(f"is out of range: {error}", field=f"{name}.grid") from error
    shape = (1 + tower.embed_levels, grid.tokens, tower.embed_dim)
    data = bytearray(embeds.tensor.data)
    tensor = _tensor(embeds.tensor, data, shape, f"{name}.tensor")
    _check_finite(tensor, tower.dtype, f"{name}.tensor")
    embeds.digest = tensor_digest(embeds.tensor)
    embeds.ClearField("tensor")
    return BroughtEmbeds(grid, tensor)


def _tensor(message: tensor_pb2.Tensor, data: bytearray, shape: tuple[int, ...], name: str) -> Tensor:
    """A view of `data`, after checking dtype, shape and size."""
    if message.dtype not in _DTYPES:
        raise InvalidRequest(field=f"{name}.dtype", limit="BFLOAT16, FLOAT16 or FLOAT32", value=message.dtype)
    if tuple(message.shape) != shape:
        limit = f"{list(shape)}, for the embedding and {shape[0] - 1} more levels of the grid's tokens"
        raise InvalidRequest(field=f"{name}.shape", limit=limit, value=list(message.shape[:MAX_AXES]))
    dtype = _DTYPES[message.dtype]
    size_bytes = math.prod(shape) * dtype.itemsize
    if len(data) != size_bytes:
        raise InvalidRequest(f"must have {size_bytes} bytes, got {len(data)}", field=f"{name}.data")
    return torch.frombuffer(data, dtype=dtype).view(shape)


def _check_finite(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    """Checks the values converted to `dtype`: what is finite in float32 may overflow in float16."""
    for level, values in enumerate(tensor):
        finite = values.to(dtype).isfinite()
        if not bool(finite.all()):
            token, channel = (~finite).nonzero()[0].tolist()
            wanted, value = name_of(dtype), values[token, channel].item()
            text = f"must be finite in {wanted}, got {value:g} at {[level, token, channel]}"
            raise InvalidRequest(text, field=name, value=value)


def _check_method(name: str, pruning: ItemPruning, tower: Tower) -> None:
    method = pruning.method
    if pruning.drops and method not in tower.pruning_methods:
        limit = f"one of {', '.join(tower.pruning_methods)} for this model"
        text = f"must be {limit}, got {method!r}: {tower.why_not_all}"
        raise InvalidRequest(text, field=f"{name}.method", value=method, limit=limit)
