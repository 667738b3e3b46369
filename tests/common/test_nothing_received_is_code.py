"""No service and no client deserialises code: their sources use no module or call that could."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("services", "common", "framesieve")

# Modules that read objects of any class from bytes.
MODULES = frozenset(
    {
        *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "copyreg", "pty"),
        "multiprocessing",  # its queues, pipes and managers pickle
    }
)
# As written in the source.
CALLS = frozenset(
    {
        *("eval", "exec", "compile", "__import__", "execfile"),
        *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "torch.save"),
        *("numpy.load", "np.load", "numpy.save", "np.save", "numpy.fromfile", "np.fromfile"),
        *("yaml.load", "yaml.unsafe_load", "yaml.full_load"),
        *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
        *("asyncio.create_subprocess_shell", "pandas.read_pickle"),
        *("concurrent.futures.ProcessPoolExecutor", "futures.ProcessPoolExecutor"),
    }
)
KEYWORDS = frozenset({"shell", "allow_pickle", "trust_remote_code", "weights_only"})
METHODS = frozenset({"__reduce__", "__reduce_ex__", "__setstate__", "__getstate__"})


def found_in(source: str) -> Iterator[str]:
    """Forbidden names in the source, with their lines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                names_found = [name.name for name in names if MODULES & {*name.name.split(".")}]
            case ast.ImportFrom(module=str(module), names=names):
                each = [f"{module}.{name.name}" for name in names]
                names_found = [name for name in each if MODULES & {*name.split(".")} or name in CALLS]
            case ast.Call(func=function, keywords=keywords):
                names_found = [name for name in [ast.unparse(function)] if name in CALLS]
                names_found += [keyword.arg for keyword in keywords if keyword.arg in KEYWORDS]
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names_found = [name] if name in METHODS else []
            case _:
                names_found = []
        yield from (f"line {getattr(node, 'lineno', 0)}: {name}" for name in names_found)


def test_no_source_uses_what_turns_data_into_code() -> None:
    # The search itself finds each kind.
    for source in ("import os, marshal", "from torch import load", "eval(text)", "run(it, shell=True)"):
        assert list(found_in(source))
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): list(found_in(path.read_text())) for path in files}
    assert {path: names_found for path, names_found in found.items() if names_found} == {}


def test_weights_come_as_safetensors_alone() -> None:
    """Other formats of checkpoints are pickles, so no source names their extensions."""
    sources = [path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    strings = [
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert any(text.endswith(".safetensors") for text in strings)
    assert not [text for text in strings if text.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npy", ".npz"))]
