"""The chat templates of a checkpoint, from the files that transformers reads, in its order.

    processor    processor_config.json, else chat_template.json, else chat_template.jinja
    tokenizer    chat_template.jinja, else tokenizer_config.json

Beside chat_template.jinja, `additional_chat_templates/` has templates of other names; the JSON files may have several
by name. One for tools is called `tool_use`. A processor's template takes messages whose content is a list of parts. The
tokenizer's is the same one, or that of the language model, which takes text: Qwen2.5-VL is published with both, and
only the tokenizer's shows tools to the model.
Source: `ProcessorMixin.get_processor_dict` and `PreTrainedTokenizerBase._from_pretrained` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gridsieve.common.checkpoint import TEMPLATES, Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import Fields

_DEFAULT, _TOOL_USE = "default", "tool_use"


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """takes_parts: whether content may be a list of parts; else it is text."""

    text: str = field(repr=False)
    takes_parts: bool


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """conversation: of prompts without tools. for_tools: those among which the first that shows tools is of prompts
    with them; the one of conversations is among them."""

    conversation: TemplateSource
    for_tools: tuple[TemplateSource, ...]


def chat_templates(checkpoint: Checkpoint) -> ChatTemplates:
    """Raises StartupError if there is no template of conversations, and for files that transformers refuses."""
    files = {name: path.read_text(encoding="utf-8") for name, path in checkpoint.templates.items()}
    single, legacy = checkpoint.folder / "chat_template.jinja", checkpoint.read_json("chat_template.json")
    if files and legacy:
        raise StartupError(
            f"{checkpoint.folder}: chat_template.json beside {TEMPLATES}/ is not supported, as in transformers: rename "
            f"its template to chat_template.jinja"
        )
    if single.is_file():
        files[_DEFAULT] = single.read_text(encoding="utf-8")
    of_processor = _named(checkpoint.read_json("processor_config.json")) or _named(legacy) or files
    of_tokenizer = files or _named(checkpoint.read_json("tokenizer_config.json"))
    conversation = (of_processor or of_tokenizer).get(_DEFAULT)
    if not conversation:
        named = f", only {', '.join(sorted(of_processor or of_tokenizer))}" if of_processor or of_tokenizer else ""
        raise StartupError(f"{checkpoint.folder} has no chat template{named}")
    order = (
        *((of_processor, name) for name in (_DEFAULT, _TOOL_USE)),
        *((of_tokenizer, name) for name in (_TOOL_USE, _DEFAULT)),
    )
    found: dict[str, TemplateSource] = {}
    for templates, name in order:
        if text := templates.get(name):
            found.setdefault(text, TemplateSource(text, takes_parts=not of_processor or templates is of_processor))
    return ChatTemplates(found[conversation], tuple(found.values()))


def _named(config: Fields) -> Mapping[str, str]:
    """The templates of a file by name; none if it has none."""
    template = config.get("chat_template", {})
    if isinstance(template, list) and all(isinstance(each, dict) for each in template):
        template = {each.get("name"): each.get("template") for each in template}
    named = {_DEFAULT: template} if isinstance(template, str) else template
    if not isinstance(named, dict) or not all(isinstance(each, str) for pair in named.items() for each in pair):
        raise config.refusal("chat_template", "a template, or templates by name")
    return named
