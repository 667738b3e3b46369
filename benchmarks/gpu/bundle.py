"""`make gpu-bundle`: one file that makes a bare machine with a card run tests/gpu and the benchmark, without an index.

    here                                   there: Python 3.12, torch 2.11 or later with CUDA 13, a Hopper card
    build/gpu-bundle.tar.xz    ─────────▶  tar -xf build/gpu-bundle.tar.xz  in this folder
                                             .gpu/           packages, FlashInfer's kernels among them
                                             gridsieve/v1/   generated code
                                           make test-gpu, make bench-gpu

Packages are those of this environment, in the same versions, built for Python 3.12; torch and what comes with it are
left out. FlashInfer comes without its sources and with its kernels, which `deploy/flash_infer_kernels.py` compiles
here, with the compiler of CUDA_HOME, or else pip's. That takes an hour or more on one core for each head size; what is
compiled is kept in the user's cache ($XDG_CACHE_HOME/gridsieve/gpu-bundle), and an interrupted run goes on there.
`--media` adds PyAV, for measurements that decode videos.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "build" / "gpu-bundle.tar.xz"
MAX_BYTES = 60 * 2**20
SITE = ".gpu"
ARCHITECTURES = "9.0a"
GENERATED = "gridsieve/v1"
# What the tests, the benchmark and the services import.
ROOTS = ("gridsieve[encoder,generation]", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
MEDIA_ROOTS = ("gridsieve[preprocessing,client]",)
# What comes with torch, computes on CPUs, downloads checkpoints, or is not imported by FlashInfer's attention.
LEFT_OUT = {
    "torch",
    "intel-openmp",
    "hf-xet",
    *("cuda-python", "cuda-tile", "nccl-extensions", "nccl4py", "ninja", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl"),
}
FLASH_INFER_VERSION = "0.7.2"
FLASH_INFER = f"flashinfer-python=={FLASH_INFER_VERSION}"
# Of FlashInfer's folder `data`: its kernels, and the templates that name them.
KEPT_DATA = ("aot/*/*.so", "csrc/batch_*")
# Large, and not imported with attention.
UNUSED = (
    "b12x",
    "flashinfer/data",
    "flashinfer/experimental/b12x",
    "flashinfer/experimental/cake_vsa_sm90_cute",
    "flashinfer/fused_moe/backends/cudnn_frost/artifacts",
    "flashinfer/moe_ep",
)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34, 35)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs what a machine with a card and without an index needs.")
    parser.add_argument("--media", action="store_true", help="with PyAV, for measurements that decode videos")
    media = parser.parse_args().media
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gridsieve" / "gpu-bundle"
    tools, site = cache / FLASH_INFER_VERSION / "tools", BUNDLE.with_name("gpu-bundle")
    install_flash_infer(tools)
    compile_kernels(tools, cuda_home(cache / "cuda"))
    install(site, versions(tools, (*ROOTS, *MEDIA_ROOTS) if media else ROOTS))
    strip_flash_infer(site, tools)
    name_gridsieve(site)
    pack(site)
    size = BUNDLE.stat().st_size
    print(f"{BUNDLE.relative_to(ROOT)}: {size / 2**20:.1f} MiB. There, in this folder:")
    print(f"  tar -xf {BUNDLE.relative_to(ROOT)}")
    print("  make test-gpu")
    print("  make bench-gpu")
    if size > MAX_BYTES:
        sys.exit(f"it should have at most {MAX_BYTES / 2**20:.0f} MiB")


def install_flash_infer(tools: Path) -> None:
    """Into a folder, for this interpreter: FlashInfer with its sources, and what it imports."""
    if not (tools / "tvm_ffi").exists():
        pip("--target", tools, "--no-deps", FLASH_INFER)
        here = installed(tools)
        needed = (each for each in requirements(here["flashinfer-python"]) if canonical(each.name) not in LEFT_OUT)
        pip("--target", tools, *(str(each) for each in needed if canonical(each.name) not in here))


def cuda_home(folder: Path) -> Path:
    """The CUDA toolkit of CUDA_HOME, or that of pip, with the names that a linker looks for."""
    if given := os.environ.get("CUDA_HOME"):
        return Path(given)
    home = folder / "nvidia" / "cu13"
    stub = home / "lib64" / "stubs" / "libcuda.so"
    if not stub.exists():
        pip("--target", folder, "cuda-toolkit[nvcc,crt,cccl,cudart,curand]==13.0.*")
        stub.parent.mkdir(parents=True, exist_ok=True)
        library = home / "lib64" / "libcudart.so"
        library.unlink(missing_ok=True)
        library.symlink_to(home / "lib" / "libcudart.so.13")
        # The linker needs the driver's library, which only a host with a card has.
        # An empty library of that name is enough.
        run("cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", stub)
    return home


def compile_kernels(tools: Path, cuda: Path) -> None:
    """Compiles what is not compiled yet."""
    environment = {
        "CUDA_HOME": str(cuda),
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURES,
        "FLASHINFER_WORKSPACE_BASE": str(tools.parent),
        "MAX_JOBS": os.environ.get("MAX_JOBS", "1"),
        "PYTHONPATH": str(tools),
    }
    run(sys.executable, ROOT / "deploy" / "flash_infer_kernels.py", **environment)


def versions(tools: Path, roots: Iterable[str]) -> list[str]:
    """name==version of all packages that these and FlashInfer need, as installed here."""
    here = installed(tools)
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(each) for each in (*roots, FLASH_INFER)]
    found: dict[str, str] = {}
    while waiting:
        wanted = waiting.pop()
        name = canonical(wanted.name)
        if name in LEFT_OUT or (key := (name, frozenset(wanted.extras))) in seen:
            continue
        seen.add(key)
        if name not in here:
            sys.exit(f"the package {name} is not installed: make setup")
        found[name] = here[name].version
        waiting += requirements(here[name], wanted.extras)
    del found["gridsieve"]
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def installed(tools: Path) -> dict[str, Distribution]:
    """The packages of this environment and of the folder tools, by name."""
    return {canonical(each.metadata["Name"]): each for each in distributions(path=[str(tools), *sys.path])}


def requirements(package: Distribution, extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """Of a package with extras, on Python 3.12."""
    for each in map(Requirement, package.requires or ()):
        there = ({"python_version": "3.12", "python_full_version": "3.12.0", "extra": extra} for extra in ("", *extras))
        if each.marker is None or any(map(each.marker.evaluate, there)):
            yield each


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def install(site: Path, packages: Iterable[str]) -> None:
    """Into a folder, for Python 3.12 on x86-64 Linux."""
    shutil.rmtree(site, ignore_errors=True)
    abis = ("--implementation", "cp", *(flag for abi in ("cp312", "abi3", "none") for flag in ("--abi", abi)))
    platforms = (flag for platform in PLATFORMS for flag in ("--platform", platform))
    there = ("--python-version", "3.12", *abis, *platforms, "--only-binary", ":all:")
    pip("--target", site, "--no-deps", "--no-compile", *there, *packages)


def strip_flash_infer(site: Path, tools: Path) -> None:
    """Takes FlashInfer's sources away, and brings in the kernels."""
    for each in UNUSED:
        shutil.rmtree(site / each)
    data = Path("flashinfer", "data")
    for path in (path for pattern in KEPT_DATA for path in (tools / data).glob(pattern)):
        copy = site / path.relative_to(tools)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


def name_gridsieve(site: Path) -> None:
    """Services report the version of the package, which is not installed there."""
    ours = distribution("gridsieve")
    folder = site / f"gridsieve-{ours.version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(ours.read_text("METADATA") or "")


def pack(site: Path) -> None:
    with tarfile.open(BUNDLE, "w:xz", preset=3) as archive:
        archive.add(site, SITE)
        for path in sorted((ROOT / GENERATED).glob("*.py")):
            archive.add(path, f"{GENERATED}/{path.name}")


def pip(*arguments: str | Path) -> None:
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def run(*command: str | Path, **environment: str) -> None:
    subprocess.run(command, env=os.environ | environment, check=True)


if __name__ == "__main__":
    main()
