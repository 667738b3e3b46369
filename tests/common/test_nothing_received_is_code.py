"""No service and no client deserialises code: their sources use no module or call that could."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCES = list((ROOT / "gridsieve").rglob("*.py"))

# Modules that read objects of any class from bytes. The queues, pipes and managers of multiprocessing pickle.
MODULES = frozenset(
    {
        *("pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "copyreg"),
        *("multiprocessing", "ProcessPoolExecutor"),
    }
)
# As written in the source.
CALLS = frozenset(
    {
        *("eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load"),
        *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
        *("os.system", "os.popen", "subprocess.getoutput", "asyncio.create_subprocess_shell"),
        *("futures.ProcessPoolExecutor", "concurrent.futures.ProcessPoolExecutor"),
    }
)
KEYWORDS = frozenset({"shell", "allow_pickle", "trust_remote_code", "weights_only"})
# Other formats of checkpoints are pickles, so no source names their extensions.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npy", ".npz")


def found_in(source: str) -> Iterator[str]:
    """Forbidden names in the source, with their lines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = [name.name for name in names if MODULES & {*name.name.split(".")}]
            case ast.ImportFrom(module=str(module), names=names):
                each = [f"{module}.{name.name}" for name in names]
                found = [name for name in each if MODULES & {*name.split(".")} or name in CALLS]
            case ast.Call(func=function, keywords=keywords):
                found = [name for name in [ast.unparse(function)] if name in CALLS]
                found += [keyword.arg for keyword in keywords if keyword.arg in KEYWORDS]
            case ast.Constant(value=str(text)) if text.endswith(PICKLES):
                found = [text]
            case _:
                found = []
        yield from (f"line {getattr(node, 'lineno', 0)}: {name}" for name in found)


def test_no_source_uses_what_turns_data_into_code() -> None:
    # The search itself finds each kind.
    for source in ("import os, marshal", "from torch import load", "eval(text)", "run(it, shell=True)", "'model.bin'"):
        assert list(found_in(source))
    assert len(SOURCES) > 100
    found = {str(path.relative_to(ROOT)): list(found_in(path.read_text())) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}
