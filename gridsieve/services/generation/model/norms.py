"""RMS norms by torch's own kernel on CUDA: one instead of the six operators that transformers writes out.

The kernel multiplies by the weight in float32 and rounds once; transformers rounds before and after. It needs no
compiling, which FlashInfer's norms do.
Source: RMSNorm, arXiv 1910.07467; `torch.nn.functional.rms_norm`.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

FUSING_DEVICES = ("cuda",)


class FusedNorm(nn.Module):
    """The class that a norm of transformers takes on: its state stays as it is."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [.., D]. Returns the same shape and dtype."""
        return F.rms_norm(rows, self.weight.shape, self.weight, self.variance_epsilon)


def fuse_norms(text: nn.Module) -> None:
    """Makes the RMS norms of a text model on CUDA fused ones. Those that add 1 to their weight have another field."""
    for module in text.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            weight = module.weight
            assert isinstance(weight, Tensor)
            if weight.device.type in FUSING_DEVICES:
                module.__class__ = FusedNorm
