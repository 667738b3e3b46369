"""Layers of a model, compiled for the CPU by torch's compiler: norms, rotary embeddings and activations become a few
loops instead of an operator each. Products and attention stay the operators that they are.

All layers of a model share one piece of code, which is kept on disk, so a first start takes some seconds longer and the
next ones less. Nothing is compiled afterwards: what the code does not fit runs as if it had not been compiled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import structlog
import torch
import torch._inductor.config
from torch import nn

log = structlog.get_logger()


def compile_layers(layers: Iterable[nn.Module], warm_up: Callable[[], object]) -> bool:
    """Compiles layers of one class for what they meet in `warm_up`.

    Returns False, and leaves them as they were, if that fails, as it does without a C++ compiler.
    """
    log.info("compiling layers", cache=os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
    start = time.perf_counter()
    torch._inductor.config.compile_threads = 1  # others would be processes that stay
    layers = list(layers)
    torch.compiler.set_stance("default")
    for layer in layers:
        layer.compile(dynamic=True, fullgraph=True)
    try:
        warm_up()
    except Exception as error:
        for layer in layers:
            layer._compiled_call_impl = None
        reason = str(getattr(error, "inner_exception", error)).strip().partition("\n")[0]
        log.warning("layers are not compiled, forwards take longer", reason=reason)
        return False
    finally:
        torch.compiler.set_stance("eager_on_recompile")
    log.info("layers compiled", seconds=round(time.perf_counter() - start, 1))
    return True
