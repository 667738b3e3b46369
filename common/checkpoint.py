"""A checkpoint folder in transformers' format: its JSON files, and a fingerprint that all services must agree on.

The encoder and generation load the weights themselves; here only safetensors headers and samples are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from common.contract.errors import StartupError

DEMO_MODEL = Path(__file__).parent.parent / "demo" / "model"

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_SAMPLE_BYTES = 64 * 1024

T = TypeVar("T")
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json, safetensors files and a tokenizer. Raises StartupError for another folder."""

    folder: Path

    def __post_init__(self) -> None:
        if not (self.folder / "config.json").is_file():
            raise StartupError(f"--model {self.folder} is no checkpoint: it has no config.json")
        if not self.weight_files:
            raise StartupError(f"--model {self.folder} is no checkpoint: it has no .safetensors file")
        unreadable = next((path for path in self.weight_files if not os.access(path, os.R_OK)), None)
        if unreadable:
            raise StartupError(f"{unreadable} cannot be read by user {os.getuid()}")

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.read_json("config.json")

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    def pick(self, families: Mapping[str, T]) -> T:
        """The entry of its model type in a service's registry of families. Raises StartupError for an unknown type."""
        if self.model_type not in families:
            raise StartupError(f"{self.folder} is a {self.model_type!r}, supported are {', '.join(sorted(families))}")
        return families[self.model_type]

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        return tuple(sorted(self.folder.glob("*.safetensors")))

    def read_json(self, name: str) -> dict[str, Any]:
        """Contents of one of its JSON files; empty if the file is missing. Raises StartupError for malformed JSON."""
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            contents = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StartupError(f"{path} is not JSON: {error}") from error
        if not isinstance(contents, dict):
            raise StartupError(f"{path} must hold a JSON object, it holds a {type(contents).__name__}")
        return contents

    def processor(self, kind: Literal["image", "video"]) -> Mapping[str, Any]:
        """Settings of its image or video processor, from the file that transformers would read; empty without one."""
        file = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}[kind]
        own: Mapping[str, Any] | None = self.read_json("processor_config.json").get(f"{kind}_processor")
        return own or self.read_json(file)

    @cached_property
    def fingerprint(self) -> bytes:
        """sha256 (32 bytes) over everything that affects outputs. Weights enter by their headers and samples."""
        digest = hashlib.sha256(b"framesieve checkpoint v1")
        for path in [self.folder / name for name in _TEXT_FILES]:
            if path.is_file():
                _add(digest, path.name.encode())
                _add(digest, path.read_bytes())
        for path in self.weight_files:
            _add(digest, path.name.encode())
            for sample in _weight_samples(path):
                _add(digest, sample)
        return digest.digest()


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """Adds the length first, so that different lists of parts never hash the same bytes."""
    digest.update(struct.pack("<q", len(part)))
    digest.update(part)


def _weight_samples(path: Path) -> list[bytes]:
    """A safetensors file's size and header, and 64 KiB from the start, the middle and the end of its data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= min(size, _MAX_HEADER_BYTES):
            raise StartupError(f"{path} is no safetensors file: its header claims {header_bytes} of {size} bytes")
        samples = [str(size).encode(), file.read(header_bytes)]
        for start in (8 + header_bytes, size // 2, size - _SAMPLE_BYTES):
            file.seek(max(0, start))
            samples.append(file.read(_SAMPLE_BYTES))
    return samples
