"""A layer with recurrent states as the text model calls it: for the whole packed batch, whose sequences may be at any
place. And the choice of its kernels.

Compiled forwards cannot pass the slots on. An operator of its own, which is opaque to the compiler, finds them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import structlog
import torch
from torch import Tensor, nn

from gridsieve.services.compute.kernels import check_result
from gridsieve.services.generation.model.attention.running import RUNNING
from gridsieve.services.generation.model.slot_steps import SlotKernels, SlotSteps
from gridsieve.services.generation.model.states import Convolution, StateBatch

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Kernels:
    """transformers' functions: for chunks of several sequences, for one token after the other of each.

    On a card with a package that has kernels, they are these, else torch's operators.
    """

    chunk: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., Any]

    def by_torch(self) -> Kernels:
        return Kernels(inspect.unwrap(self.chunk), inspect.unwrap(self.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedKernels:
    """A `Recurrence` with the kernels of `package`, and with those of Triton that advance states within their slots.

    Both are used once they have passed their checks.
    """

    package: ClassVar[str]
    installed: ClassVar[Kernels]
    kernels: Kernels
    slot_kernels: SlotKernels | None = None

    @torch.inference_mode()
    def fastest(self, like: Tensor) -> Self:
        """See `Recurrence`. Cards have run only torch's own kernels here."""
        if like.device.type != "cuda":
            return self
        draw = torch.Generator(like.device).manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.rand(shape, generator=draw, device=like.device).mul(2).sub(1)

        found = self
        try:
            found = replace(self, kernels=self.installed)
            found.check(self, like, drawn)
        except Exception as error:  # a kernel that is compiled for the card may fail in any way
            log.warning(f"recurrent states are computed by torch: {self.package} does not work", error=str(error))
            found = self
        try:
            library = importlib.import_module("gridsieve.services.generation.model.state_kernels")
            in_slots = replace(found, slot_kernels=library.TritonStates())
            in_slots.check_slots(self, like, drawn)
        except Exception as error:
            log.warning("recurrent states are copied in each step: Triton does not work", error=str(error))
            return found
        return in_slots

    def advance_slots(
        self,
        convolved: Tensor,
        gates: Sequence[Tensor],
        weights: Sequence[Tensor],
        matrices: Tensor,
        ends: Sequence[int],
        slots: Sequence[Tensor],
    ) -> Tensor | None:
        """See `Recurrence`."""
        if self.slot_kernels is None:
            return None
        rows = [each.contiguous() for each in (convolved, *gates)]
        heads, head_dim = self.output
        out, start = convolved.new_empty(*convolved.shape[:2], heads, head_dim), 0
        for end, read, write in zip(ends, slots, slots[1:], strict=False):
            tokens = (start, end, ends[-1])
            steps = SlotSteps(matrices, (read, write), (*rows, *weights, out), tokens)
            self.step_slots(self.slot_kernels, steps)
            start = end
        return out

    @property
    def matrices(self) -> tuple[int, int, int]:
        """See `Recurrence`, and `advance`, too."""
        raise NotImplementedError

    def advance(
        self, convolved: Tensor, gates: Sequence[Tensor], weights: Sequence[Tensor], matrices: Tensor
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    @property
    def output(self) -> tuple[int, int]:
        """Heads, and head_dim."""
        raise NotImplementedError

    def step_slots(self, kernels: SlotKernels, steps: SlotSteps) -> None:
        raise NotImplementedError

    def check_slots(self, exact: Self, like: Tensor, drawn: Callable[..., Tensor]) -> None:
        """Compares `advance_slots` with `exact.advance`, as `check`, over states after 1 and after 3 tokens."""
        convolved, gates, weights = self.sample(3, drawn)
        matrices = drawn(8, *self.matrices)
        slots = [torch.tensor(each, device=like.device) for each in ((2, 0), (5, 4), (3, 6))]
        expected = list[Tensor]()
        state = matrices[slots[0]]
        for begin, end in ((0, 1), (1, 3)):
            part = slice(begin, end)
            rows = convolved.to(like.dtype).float()[:, part]
            out, state = exact.advance(rows, [gate[:, part] for gate in gates], weights, state)
            expected += [out, state.clone()]
        found = self.advance_slots(convolved.to(like.dtype), gates, weights, matrices, (1, 3), slots)
        assert found is not None
        computed = (found[:, :1], matrices[slots[1]], found[:, 1:], matrices[slots[2]])
        for one, other in zip(computed, expected, strict=True):
            largest = other.abs().max()
            check_result(one / largest, other / largest)

    def sample(self, tokens: int, drawn: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]]:
        """Channels, gates and weights as `advance` takes them, of two sequences, of values that `drawn` makes."""
        raise NotImplementedError

    def check(self, exact: Self, like: Tensor, drawn: Callable[..., Tensor]) -> None:
        """Compares the kernels with those of `exact`, on two sequences. drawn: values in [-1, 1) of a shape.

        Raises AssertionError, and whatever the kernels raise.
        """
        raise NotImplementedError


class RecurrentLayer(nn.Module):
    """layer_idx: its number among the layers with states."""

    layer_idx: int
    conv1d: nn.Conv1d

    def advance(
        self,
        states: StateBatch | None,
        inputs: Tensor,
        gates: Sequence[Tensor],
        weights: Sequence[Tensor],
        head_dim: int,
    ) -> Tensor:
        """states: None in a compiled forward, which has them from `running`.

        inputs: [1, T, channels]. gates: [1, T, heads] each. weights, head_dim: see `StateBatch.advance`.
        Returns [1, T, heads, head_dim].
        """
        taps, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        if states is None:
            found: Tensor = torch.ops.gridsieve.advance_states(
                inputs, taps, bias, list(gates), list(weights), self.layer_idx, head_dim
            )
            return found
        rows = [gate[0] for gate in gates]
        return states.advance(self.layer_idx, inputs[0], Convolution(taps, bias), rows, weights, head_dim)[None]


def _advance(
    inputs: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    gates: list[Tensor],
    weights: list[Tensor],
    layer: int,
    head_dim: int,
) -> Tensor:
    assert RUNNING.states is not None
    rows = [gate[0] for gate in gates]
    return RUNNING.states.advance(layer, inputs[0], Convolution(taps, bias), rows, weights, head_dim)[None]


_library = torch.library.Library("gridsieve", "FRAGMENT")
_library.define(
    "advance_states(Tensor inputs, Tensor taps, Tensor? bias, Tensor[] gates, Tensor[] weights, int layer, "
    "int head_dim) -> Tensor"
)
_library.impl("advance_states", _advance, "CPU")
_library.impl(
    "advance_states",
    lambda inputs, taps, bias, gates, weights, layer, head_dim: inputs.new_empty((*gates[0].shape, head_dim)),
    "Meta",
)
