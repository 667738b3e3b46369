"""The chat templates of a checkpoint, from the files that transformers reads, in its order.

A processor's template (chat_template.jinja, chat_template.json) takes messages whose content is a list of parts. The
tokenizer's own (tokenizer_config.json) is the same one, or that of the language model, which takes text: Qwen2.5-VL is
published with both, and only the tokenizer's shows tools to the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """takes_parts: whether content may be a list of parts; else it is text."""

    text: str = field(repr=False)
    takes_parts: bool


def chat_templates(checkpoint: Checkpoint) -> tuple[TemplateSource, ...]:
    """The template of conversations first, then others. Raises StartupError if there is none."""
    found: list[TemplateSource] = []
    path = checkpoint.folder / "chat_template.jinja"
    if path.is_file():
        found.append(TemplateSource(path.read_text(encoding="utf-8"), takes_parts=True))
    for file in ("chat_template.json", "tokenizer_config.json"):
        template = checkpoint.read_json(file).get("chat_template")
        named = {each["name"]: each["template"] for each in template} if isinstance(template, list) else {}
        takes_parts = not found or file == "chat_template.json"
        for text in (named.get("default"), named.get("tool_use")) if named else (template,):
            if text and all(text != other.text for other in found):
                found.append(TemplateSource(str(text), takes_parts))
    if not found:
        raise StartupError(f"{checkpoint.folder} has no chat template")
    return tuple(found)
