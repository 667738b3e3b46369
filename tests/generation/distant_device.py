"""Stands in for a device that computes beside the host: values are computed at once, but asking for one is an error.

    with DistantDevice() as device:
        far = device.put(torch.ones(3))      its device is DISTANT
        far + 1                              computed
        if far.any(): …                      raises HostWaits, as does whatever else makes a host wait for a card

What waits on a card: reading a value; operations whose result has as many elements as values say; indices that are
masks or not on the device; copies that are not asked to be asynchronous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DISTANT = torch.device("meta")  # the one type that every build of torch knows, and that computes nothing itself

aten = torch.ops.aten
_BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_COPIES = {aten._to_copy.default, aten.copy_.default}
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class HostWaits(Exception):
    """The host asked for a value that a device would still be computing."""


class _Far(Tensor):
    """A tensor on the distant device. held: its values, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> _Far:
        far: _Far = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DISTANT
        )
        far.held = held
        return far

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise HostWaits(f"{func} outside of the device")


class DistantDevice(TorchDispatchMode):
    def put(self, tensor: Tensor) -> Tensor:
        return _Far(tensor)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Its values, as once a copy to the host has been waited for."""
        assert isinstance(tensor, _Far)
        return tensor.held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        far = {id(each.held): each for each in given if isinstance(each, _Far)}
        if not far and kwargs.get("device") != DISTANT:
            return func(*args, **kwargs)
        with self:  # in inference mode, operations arrive that are made of others
            if (found := func.decompose(*args, **kwargs)) is not NotImplemented:
                return found
        _check(func, args, kwargs, [each for each in given if not isinstance(each, _Far)])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        args, kwargs = tree_map(lambda each: each.held if isinstance(each, _Far) else each, (args, kwargs))
        found = func(*args, **kwargs)
        return tree_map(lambda each: far.get(id(each), _Far(each)) if isinstance(each, Tensor) else each, found)


def _check(func: Any, args: Any, kwargs: dict[str, Any], near: list[Tensor]) -> None:
    if func in _COPIES:
        target = kwargs.get("device", DISTANT) if func is aten._to_copy.default else args[0].device
        crosses = bool(near) or target != DISTANT
        if crosses and (target != DISTANT or not (kwargs.get("non_blocking") or args[2:])):
            raise HostWaits(f"{func} to {target}")
        return
    if func in _BY_INDEX:
        indices = [each for each in args[1] if each is not None]
        if any(not isinstance(each, _Far) or each.dtype != torch.int64 for each in indices):
            raise HostWaits(f"{func} by {[each.dtype for each in indices]}")
    elif _WAITING & set(func.tags):
        raise HostWaits(str(func))
    if any(each.dim() for each in near):
        raise HostWaits(f"{func} of a tensor on the host")
