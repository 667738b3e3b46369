"""The control tokens of a checkpoint: the added tokens that no text of a caller may become.

    special                    by the tokenizer's files, or named there:  "eos_token", "additional_special_tokens"
    known by its id            to config.json or generation_config.json:  "eos_token_id", "vision_start_token_id"
    written around media       by the family:                             <img>, </image>
    written by chat templates  around turns:                              <|im_start|>
    of the form of one         templates may compose it:                  <|user|>

All other added tokens are text that callers may write, as in transformers: <loc_1>, and such tags of chat templates as
<think> and </think>, but for those of roles. A model writes these in its answers, which callers send back.
Source: `_get_control_tokens` of transformers 5.24 looks for the tokens in templates, too, but also takes tags;
`_set_model_specific_special_tokens`, for the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.preprocessing.prompt.template import Marks

_LISTS = ("additional_special_tokens", "extra_special_tokens", "chat_control_tokens")
_DICTS = ("extra_special_tokens", "model_specific_special_tokens")
_NAMES_OF_IDS = re.compile(r".*_token_(id|index)")
_TAG = re.compile(r"</?(\w+)>")
_ROLES = ("assistant", "developer", "model", "system", "tool", "user")
_OF_A_TEMPLATE = re.compile(r"<[|｜].*[|｜]>")


def named_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """The tokens that the tokenizer's files name, by name: "image_token" and others."""
    settings = _settings(checkpoint)
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    for each in (settings.get(name) for name in _DICTS):
        named |= each if isinstance(each, dict) else {}
    return {name: _text(token) for name, token in named.items() if isinstance(token, str | dict)}


def control_tokens(checkpoint: Checkpoint, templates: Iterable[str], markers: Iterable[str]) -> dict[str, int]:
    """The ids of the control tokens. templates: texts of the chat templates. markers: what the family writes."""
    settings = _settings(checkpoint)
    added = {each["content"]: each for each in checkpoint.read_json("tokenizer.json").get("added_tokens", [])}
    marks = Marks(added)
    listed = (settings[name] for name in _LISTS if isinstance(settings.get(name), list))
    described = [*added.values(), *settings.get("added_tokens_decoder", {}).values()]
    configs = (checkpoint.config, checkpoint.text_config, checkpoint.read_json("generation_config.json"))
    ids = [token_id for config in configs for token_id in _ids(config)]
    control = {
        *(each["content"] for each in described if each.get("special")),
        *named_tokens(checkpoint).values(),
        *(_text(token) for tokens in listed for token in tokens),
        *(token for token, each in added.items() if each["id"] in ids or _OF_A_TEMPLATE.fullmatch(token)),
        *(token for text in markers for token in marks.spelt(text)),
        *(token for text in templates for token in marks.spelt(text) if not (token.isspace() or _is_tag(token, added))),
    }
    return {token: each["id"] for token, each in added.items() if token in control}


def _settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Of the tokenizer. Transformers reads special_tokens_map.json only of old checkpoints, and then before others."""
    settings = checkpoint.read_json("tokenizer_config.json")
    older = {} if "added_tokens_decoder" in settings else checkpoint.read_json("special_tokens_map.json")
    return settings | older


def _ids(config: Mapping[str, Any]) -> Iterator[Any]:
    """The ids of tokens that a config file names."""
    for name, value in config.items():
        if _NAMES_OF_IDS.fullmatch(name):
            yield from value if isinstance(value, list) else (value,)


def _is_tag(token: str, added: Mapping[str, Any]) -> bool:
    """Whether it is one of <name> and </name>, which both are tokens, and name no role."""
    found = _TAG.fullmatch(token)
    return found is not None and found[1] not in _ROLES and {f"<{found[1]}>", f"</{found[1]}>"} <= added.keys()


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
