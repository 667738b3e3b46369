"""Layers of a model, or all of it, compiled by torch's compiler: norms, rotary embeddings and activations become a few
loops, or kernels of Triton on CUDA, instead of an operator each. Products and attention stay the operators that they
are.

The code is kept on disk, so a first start takes longer than the next ones. Nothing is compiled after the start.

    layers   share one piece of code, whose guards take some 100 µs a layer: for large layers, called seldom
    whole    a few seconds of compiling a layer, and no guards: for small layers, called for every token
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import structlog
import torch
import torch._inductor.config
from torch import nn

log = structlog.get_logger()


def compile_layers(layers: Iterable[nn.Module], warm_up: Callable[[], object]) -> bool:
    """Compiles layers of one class for the arguments that they meet in `warm_up`. Calls with others run uncompiled.

    Returns False, and leaves them as they were, if that fails, as it does without a C++ compiler.
    """
    layers = list(layers)
    for layer in layers:
        layer.compile(dynamic=True, fullgraph=True)
    if compiles(warm_up):
        return True
    for layer in layers:
        layer._compiled_call_impl = None
    return False


def compiled_whole(model: nn.Module) -> Callable[..., Any]:
    """`model`, compiled by its first call, which should be made in `compiles`.

    No guards: later calls must have the same arguments, of the same dtypes and ranks. Sizes may differ where they were
    neither 0 nor 1, nor equal to another one, in the first call.
    """

    def call(**arguments: Any) -> Any:
        return model(**arguments)

    # torch finds compiled code by the code object that it was made of. Without guards another model's would be run.
    call.__code__ = call.__code__.replace()
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled: Callable[..., Any] = torch.compile(call, dynamic=True, fullgraph=True, options=options)
    return compiled


def compiles(warm_up: Callable[[], object]) -> bool:
    """Runs what compiles in its first call. Returns False, and logs why, if that fails."""
    log.info("compiling", cache=os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
    start = time.perf_counter()
    torch._inductor.config.compile_threads = 1  # others would be processes that stay
    torch.compiler.set_stance("default")
    try:
        warm_up()
    except Exception as error:
        reason = str(getattr(error, "inner_exception", error)).strip().partition("\n")[0]
        log.warning("not compiled, forwards take longer", reason=reason)
        return False
    finally:
        torch.compiler.set_stance("eager_on_recompile")
    log.info("compiled", seconds=round(time.perf_counter() - start, 1))
    return True
