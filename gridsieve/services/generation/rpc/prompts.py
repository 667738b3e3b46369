"""The prompts of embedders and rerankers, as their published scripts write them.

    embedder    system: the instruction            user: what is embedded
    reranker    system: what it has to judge       user: <Instruct>: …<Query>:…\\n<Document>:…

Source: `format_model_input` and `format_mm_instruction` of QwenLM/Qwen3-VL-Embedding.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, path_of, steps_of
from gridsieve.services.generation.model.reading import Reading
from gridsieve.v1 import generation_pb2, prompt_pb2

# In place of what is empty.
_NOTHING = "NULL"


NameOf: TypeAlias = Callable[[str], str]
"""The caller's name of a field of the prompt that was made."""


@contextmanager
def callers_fields(name_of: NameOf) -> Iterator[None]:
    """Errors inside name the caller's fields."""
    try:
        yield
    except GridsieveError as error:
        error.rename(name_of, {})
        raise


def embed_prompt(request: generation_pb2.EmbedRequest, reading: Reading) -> tuple[prompt_pb2.Prompt, NameOf]:
    """Raises InvalidRequest for a prompt without messages, and for an instruction beside a system message."""
    prompt = request.prompt
    if not prompt.messages:
        raise InvalidRequest("must hold at least one message, it is empty", field="prompt.messages")
    if prompt.messages[0].role == prompt_pb2.ROLE_SYSTEM:
        if request.HasField("instruction"):
            raise InvalidRequest("must not be set: the prompt begins with a system message", field="instruction")
        return prompt, str
    instruction = request.instruction.strip()
    if instruction and not unicodedata.category(instruction[-1]).startswith("P"):
        instruction += "."
    made = prompt_pb2.Prompt()
    _add(made, prompt_pb2.ROLE_SYSTEM, instruction or reading.instruction)
    made.MergeFrom(prompt)
    if len(prompt.messages) == 1 and _is_nothing(prompt.messages[0].parts):
        made.messages[1].parts[-1].text = _NOTHING

    def name_of(field: str) -> str:
        match steps_of(field):
            case "prompt", "messages", int(index), *rest if index:
                return path_of("prompt", "messages", index - 1, *rest)
        return field

    return made, name_of


def score_prompt(request: generation_pb2.ScoreRequest, reading: Reading) -> tuple[prompt_pb2.Prompt, NameOf]:
    """Raises InvalidRequest for a query or a document without parts."""
    prompt = prompt_pb2.Prompt(cache_salt=request.cache_salt, yields=request.yields)
    instruction = request.instruction if request.HasField("instruction") else reading.instruction
    _add(prompt, prompt_pb2.ROLE_SYSTEM, reading.system)
    user = _add(prompt, prompt_pb2.ROLE_USER, f"<Instruct>: {instruction}")
    names = ["instruction"]
    for name, before, parts in (("query", "<Query>:", request.query), ("document", "\n<Document>:", request.document)):
        if not parts:
            raise InvalidRequest("must hold at least one part, it is empty", field=name)
        user.parts.add(text=before)
        user.parts.extend(parts)
        names += [name, *(f"{name}[{number}]" for number in range(len(parts)))]
        if _is_nothing(parts):
            user.parts[-1].text = _NOTHING

    def name_of(field: str) -> str:
        match steps_of(field):
            case "prompt", "messages", 1, "parts", int(number), *rest if number < len(names):
                return path_of(names[number], *rest)
            case "prompt", "cache_salt":
                return "cache_salt"
        return field

    return prompt, name_of


def _add(prompt: prompt_pb2.Prompt, role: prompt_pb2.Role, text: str) -> prompt_pb2.Message:
    return prompt.messages.add(role=role, parts=[prompt_pb2.Part(text=text)])


def _is_nothing(parts: Sequence[prompt_pb2.Part]) -> bool:
    return bool(parts) and all(part.WhichOneof("content") == "text" and not part.text for part in parts)
