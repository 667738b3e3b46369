"""The build backend of pyproject.toml: setuptools, after it has generated gridsieve/v1 from these protos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc_tools
from grpc_tools import protoc
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that need no generated code)

_PROTOS = Path(__file__).parent
_ROOT = _PROTOS.parent


def generate() -> None:
    """Writes gridsieve/v1: messages, their types for mypy, and gRPC stubs. Raises RuntimeError if protoc fails."""
    package = _ROOT / "gridsieve" / "v1"
    package.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{_PROTOS}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    outputs = [f"--{kind}_out={_ROOT}" for kind in ("python", "pyi", "grpc_python")]
    files = sorted(map(str, _PROTOS.rglob("*.proto")))
    if protoc.main(["protoc", *includes, *outputs, *files]):
        raise RuntimeError("protoc failed; its output is above")
    (package / "__init__.py").touch()


def build_wheel(*arguments: Any) -> str:
    generate()
    return build_meta.build_wheel(*arguments)


def build_editable(*arguments: Any) -> str:
    generate()
    return build_meta.build_editable(*arguments)


def build_sdist(*arguments: Any) -> str:
    generate()
    return build_meta.build_sdist(*arguments)
