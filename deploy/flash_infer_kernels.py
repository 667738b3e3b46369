"""Compiles the FlashInfer kernels that generation calls, into the FlashInfer that is installed.

    FLASHINFER_CUDA_ARCH_LIST="8.0 8.9 9.0a" MAX_JOBS=4 python deploy/flash_infer_kernels.py

The first variable names the cards, the second how many compilers run at a time, each with up to 4 GB. The script needs
the CUDA toolkit of CUDA_HOME, a C++ compiler and ninja. It needs no card and nothing of this project: images run it
before they hold any code of the project. FlashInfer finds the kernels in its folder `data/aot`, and compiles kernels
for other head sizes and dtypes on use. Kernels that are in the folder already are not compiled again.
Source: `flashinfer.aot` of flashinfer-python 0.7, which does this in a checkout of FlashInfer.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time

import torch

DTYPE, FP8 = torch.bfloat16, torch.float8_e4m3fn
# Of nearly every language model that Gridsieve serves: 256 of Qwen3.5, 128 of most others.
HEAD_DIMS = (128, 256)


def main() -> None:
    library = importlib.import_module("flashinfer.aot")
    jit = importlib.import_module("flashinfer.jit")
    specs = [library.gen_rope_module(), library.gen_act_and_mul_module("silu")]  # for all head sizes and both dtypes
    for size in HEAD_DIMS:
        for kv_dtype in (DTYPE, FP8):  # prefill, and decoding with and without tensor cores
            specs += library.gen_fa2(DTYPE, kv_dtype, size, size, False, False)
        if "9.0" in os.environ["FLASHINFER_CUDA_ARCH_LIST"]:  # Hopper's prefill; of keys in bf16 only
            specs += library.gen_fa3(DTYPE, DTYPE, DTYPE, size, size, False, False)
    for spec in specs:
        kernel = jit.env.FLASHINFER_AOT_DIR / spec.name / f"{spec.name}.so"
        if kernel.exists():
            continue
        began_s = time.monotonic()
        jit.build_jit_specs([spec], skip_prebuilt=False)
        kernel.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copy(jit.env.FLASHINFER_JIT_DIR / spec.name / kernel.name, kernel.with_suffix(".copied"))
        copy.replace(kernel)
        print(f"{spec.name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
