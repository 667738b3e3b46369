"""A checkpoint folder in transformers' format: its JSON files, and a fingerprint that all services must agree on.

The encoder and generation load the weights themselves; here only safetensors headers and samples are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import Fields, refusing

DEMO_MODEL = Path(__file__).parents[1] / "gridsieve-demo"
DEMO_DRAFT = Path(__file__).parents[1] / "gridsieve-demo-draft"  # the head that drafts for it
DEMO_EMBEDDER = Path(__file__).parents[1] / "gridsieve-demo-embedder"  # a model of its line that makes vectors
DEMO_TONES = Path(__file__).parents[1] / "gridsieve-demo-tones"  # a model of its line that hears

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
    "modules.json",
)
# Templates besides the default, by name: tool_use.jinja.
TEMPLATES = "additional_chat_templates"
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_DOWNLOADED = [*_TEXT_FILES, _INDEX, f"{TEMPLATES}/*.jinja", "*.safetensors"]
# Copies of the weights in the layout of other code.
_NOT_DOWNLOADED = ["consolidated*", "original/*"]
DRAFTS = "--draft-model"
_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)
# How Hugging Face's cache names the folders of a repository: its names hold no "--".
_SNAPSHOT = re.compile(r"models--(.+)/snapshots/[^/]+")
# What a checkpoint was trained for, by the last module that Sentence Transformers puts after the model, or by its name.
Task: TypeAlias = Literal["generate", "embed", "score"]
_TASKS_OF_MODULES: Mapping[str, Task] = {"Pooling": "embed", "LogitScore": "score"}
_TASKS_OF_NAMES: Mapping[str, Task] = {"-Embedding": "embed", "-Reranker": "score"}
_LFS_POINTER = b"version https://git-lfs"
_SAMPLE_BYTES = 64 * 1024
_MAX_HEADER_BYTES = 100 * 2**20

# Of checkpoints that came out before transformers had their class, which reads them; and of the parts that read of
# models that also speak.
_RENAMED = {
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h_omni",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
}
# The part of config.json of such a model's part that reads.
_THINKER = "thinker_config"

# Buffers that modules compute. Old files have them, and transformers ignores them.
_COMPUTED = re.compile(r"(^|\.)((original_)?inv_freq|position_ids)$")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json, safetensors files and a tokenizer. option: the flag that names it.

    Of the weights those are read that transformers reads; by DRAFTS all in the folder, whatever the files are called.
    Raises StartupError, with what to do, for a folder that is not a checkpoint or lacks a part of one: a file that its
    index names, the end of a file, or the content of a Git LFS pointer.
    """

    folder: Path
    option: str = "--model"

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            what = "is a file" if self.folder.exists() else "does not exist"
            raise StartupError(
                f"{self.option} {self.folder} {what}: pass a folder in transformers' format, or a Hugging Face "
                f"repository such as Qwen/Qwen2.5-VL-3B-Instruct"
            )
        if not (self.folder / "config.json").is_file():
            raise StartupError(f"{self.option} {self.folder} is not a checkpoint: it has no config.json")
        for path in self._text_files:
            _refuse_pointer(path, _read(path, len(_LFS_POINTER)))
        self._check_index()
        if not self.weight_files:
            raise StartupError(
                f"{self.option} {self.folder} is not a checkpoint: it has no .safetensors file that belongs to "
                f"it: {_WEIGHTS}, or one that {_INDEX} names"
            )
        for path in self.weight_files:
            _check_size(path)

    @classmethod
    def find(cls, model: Path, option: str = "--model") -> Checkpoint:
        """The checkpoint in a folder, or of a Hugging Face repository: from its cache, else downloaded into it."""
        if model.exists() or not _REPOSITORY.fullmatch(str(model)):
            return cls(model, option)
        return _cached(str(model), option) or cls(_downloaded(str(model), option), option)

    def _check_index(self) -> None:
        missing = [name for name in self._indexed if not (self.folder / name).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise StartupError(
                f"{self.option} {self.folder} lacks {missing[0]}{more}, which {_INDEX} names: download the checkpoint "
                f"again"
            )

    @property
    def _indexed(self) -> list[str]:
        """The files that the index names; none without one."""
        named = self.read_json(_INDEX).part("weight_map").values()
        return sorted(set(map(str, named)))

    @cached_property
    def config(self) -> Fields:
        """config.json. Of a model that also speaks, the fields of its part that reads go before those of the whole."""
        whole = self.read_json("config.json")
        return Fields(whole.file, {**whole.written, **whole.part(_THINKER).written})

    @property
    def name(self) -> str:
        """The repository's name for its snapshot in Hugging Face's cache, else the folder's own name, or the link's."""
        folder = Path(os.path.abspath(self.folder))  # noqa: PTH100  Path.resolve follows links
        of_repository = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
        return of_repository[1].replace("--", "/") if of_repository else folder.name

    @property
    def model_type(self) -> str:
        name = str(self.config.get("model_type", ""))
        return _RENAMED.get(name, name)

    @cached_property
    def task(self) -> Task:
        """What it was trained for. config.json does not tell: Qwen3-VL-Embedding has that of Qwen3-VL.

        Its modules.json, of Sentence Transformers, tells; without one, its name: Qwen3-VL-Embedding-2B.
        """
        path = self.folder / "modules.json"
        if not path.is_file():
            return next((task for part, task in _TASKS_OF_NAMES.items() if part in self.name), "generate")
        try:
            kinds = [str(each["type"]).rpartition(".")[2] for each in json.loads(path.read_text(encoding="utf-8"))]
        except (ValueError, TypeError, KeyError) as error:
            raise StartupError(f"{path} is no list of modules with a type each") from error
        return next((task for kind, task in _TASKS_OF_MODULES.items() if kind in kinds), "generate")

    @property
    def text_config(self) -> Fields:
        """The language model's part of config.json, which NVIDIA's own code names llm_config; empty if it has none."""
        return self.config.part("text_config") or self.config.part("llm_config")

    def config_as(self, config_class: Any, without: Sequence[str] = (), part: str | None = None) -> Any:
        """config.json, or an object in it, as transformers' config class. without: fields that are left out.

        Raises StartupError, with the field, for a value that the class refuses.
        """
        import transformers

        with refusing(f"{self.folder}/config.json"):
            try:
                if part is not None:
                    return config_class(**self.config.part(part).written)
                if not without:
                    return config_class.from_pretrained(self.folder)
                fields, _ = config_class.get_config_dict(self.folder)
                return config_class.from_dict({name: value for name, value in fields.items() if name not in without})
            except (KeyError, ValueError) as error:
                for each in filter(lambda value: isinstance(value, Fields), self.config.values()):
                    kind = str(each.get("model_type"))
                    if kind in str(error) and kind not in transformers.CONFIG_MAPPING:
                        raise each.refusal("model_type", "one that transformers knows") from error
                raise

    @property
    def _text_files(self) -> list[Path]:
        named = [path for name in (*_TEXT_FILES, _INDEX) if (path := self.folder / name).is_file()]
        return [*named, *self.templates.values()]

    @property
    def templates(self) -> Mapping[str, Path]:
        """The files of chat templates besides the default, by the template's name."""
        return {path.stem: path for path in sorted((self.folder / TEMPLATES).glob("*.jinja"))}

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that the index names or, without an index, model.safetensors. Of drafts all in the folder."""
        if self.option == DRAFTS:
            return tuple(sorted(self.folder.glob("*.safetensors")))
        return tuple(path for name in self._indexed or [_WEIGHTS] if (path := self.folder / name).is_file())

    def read_json(self, name: str) -> Fields:
        """Contents of one of its JSON files; empty if the file is missing. Raises StartupError for malformed JSON."""
        path = self.folder / name
        if not path.is_file():
            return Fields(name, {})
        try:
            contents = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StartupError(f"{path} is not JSON: {error}") from error
        if not isinstance(contents, dict):
            raise StartupError(f"{path} must hold a JSON object, it holds a {type(contents).__name__}")
        return Fields(name, contents)

    def processor(self, kind: Literal["image", "video"]) -> Fields:
        """Settings of its image or video processor, from the file that transformers would read; empty without one."""
        file = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}[kind]
        return self.read_json("processor_config.json").part(f"{kind}_processor") or self.read_json(file)

    @cached_property
    def fingerprint(self) -> bytes:
        """sha256 (32 bytes) over everything that affects outputs. Weights enter by their headers and samples."""
        digest = hashlib.sha256(b"gridsieve checkpoint v1")
        for path in self._text_files:
            _add(digest, path.name.encode())
            _add(digest, path.read_bytes())
        if self.task != "generate":  # its name may tell, and decides frames and prompts
            _add(digest, self.task.encode())
        for path in self.weight_files:
            _add(digest, path.name.encode())
            for sample in _weight_samples(path):
                _add(digest, sample)
        return digest.digest()


def is_computed(name: str) -> bool:
    """Whether a tensor of a file is no weight."""
    return bool(_COMPUTED.search(name))


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """Adds the length first, so that different lists of parts never hash the same bytes."""
    digest.update(struct.pack("<q", len(part)))
    digest.update(part)


def _weight_samples(path: Path) -> list[bytes]:
    """A safetensors file's size and header, and 64 KiB from the start, the middle and the end of its data."""
    size = path.stat().st_size
    header = _header(path)
    samples = [str(size).encode(), header]
    with path.open("rb") as file:
        for start in (8 + len(header), size // 2, size - _SAMPLE_BYTES):
            file.seek(max(0, start))
            samples.append(file.read(_SAMPLE_BYTES))
    return samples


def _check_size(path: Path) -> None:
    """Raises StartupError if a safetensors file is shorter or longer than its header says."""
    header = _header(path)
    try:
        tensors = [each for name, each in json.loads(header).items() if name != "__metadata__"]
        expected = 8 + len(header) + max((each["data_offsets"][1] for each in tensors), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise StartupError(f"{path} is not a safetensors file: its header is not valid") from error
    if path.stat().st_size != expected:
        raise StartupError(f"{path} has {path.stat().st_size} bytes, its header says {expected}: download it again")


def _header(path: Path) -> bytes:
    """The JSON header of a safetensors file. Raises StartupError for another file."""
    start = _read(path, len(_LFS_POINTER))
    _refuse_pointer(path, start)
    header_bytes = int.from_bytes(start[:8], "little")
    header = _read(path, 8 + min(header_bytes, _MAX_HEADER_BYTES))[8:]
    if not header or len(header) < header_bytes:
        raise StartupError(
            f"{path} is not a whole safetensors file, it has {path.stat().st_size} bytes: download it again"
        )
    return header


def _read(path: Path, size_bytes: int) -> bytes:
    """The first bytes of a file."""
    try:
        with path.open("rb") as file:
            return file.read(size_bytes)
    except OSError as error:
        raise StartupError(f"{path} cannot be read by user {os.getuid()}: {error.strerror}") from error


def _refuse_pointer(path: Path, start: bytes) -> None:
    if start == _LFS_POINTER:
        raise StartupError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in {path.parent}")


def _cached(repository: str, option: str) -> Checkpoint | None:
    """The checkpoint of a repository in Hugging Face's cache; None if the cache lacks a part of it."""
    from huggingface_hub import snapshot_download

    try:
        return Checkpoint(Path(snapshot_download(repository, local_files_only=True)), option)
    except (OSError, StartupError):
        return None


def _downloaded(repository: str, option: str) -> Path:
    """Downloads what is missing of a repository into Hugging Face's cache, with its progress bar."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=_DOWNLOADED, ignore_patterns=_NOT_DOWNLOADED))
    except RepositoryNotFoundError as error:
        raise StartupError(
            f"{option} {repository} is neither a folder nor a Hugging Face repository that this user may read"
        ) from error
    except Exception as error:
        # Connections, proxies, full disks, offline mode: each library below has errors of its own.
        reason = str(error).strip().partition("\n")[0]
        raise StartupError(
            f"{option} {repository} is not a folder, and could not be downloaded from Hugging Face: {reason}"
        ) from error
