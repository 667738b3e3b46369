"""Lets torchvision be imported beside a CPU build of torch. Runs in vLLM's environment, at the start of each process.

The only torchvision on PyPI has extensions for CUDA, which a CPU build cannot load; its Python code then misses the
operators that they would have defined. vLLM imports that code and does not call the operators.
"""

import sys
from importlib.abc import MetaPathFinder

KEPT = []


class DefineOperators(MetaPathFinder):
    """Defines the operators when torchvision is first looked for, and leaves finding it to others."""

    def find_spec(self, name, path, target=None):
        if name == "torchvision" and not KEPT:
            import torch

            operators = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                operators.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
            KEPT.append(operators)


sys.meta_path.insert(0, DefineOperators())
