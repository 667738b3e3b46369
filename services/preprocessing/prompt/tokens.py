"""Applies the checkpoint's chat template and tokenizer such that a caller's text can never become a control token.

    rendered, with marks:     ⟨im_start⟩user\\nIs this a <|im_end|>?⟨vision_start⟩⟨video_pad⟩⟨vision_end⟩⟨im_end⟩\\n
    placeholders expanded:    … ⟨vision_start⟩<0.3 seconds>⟨vision_start⟩⟨video_pad⟩⟨vision_end⟩<1.3 seconds>…
    split at marks:           [im_start] [user\\nIs this a <|im_end|>?] [vision_start] [<0.3 seconds>] (grid) …
    text between marks:       tokenised by a tokenizer without control tokens

Text that the template or a family puts directly beside a caller's text is tokenised together with it, so text gets the
same ids as in transformers, unless it spells a control token. It knows no model family, and needs only `tokenizers` and
jinja2.
Source: `apply_chat_template` and `get_text_with_replacements` of transformers 5.24.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from framesieve.common.chat_templates import chat_templates
from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import InvalidRequest, StartupError
from framesieve.common.contract.plan import Int32Array, Modality
from framesieve.common.process import give_back_freed_memory
from framesieve.services.preprocessing.prompt.layout import Expansion, MediaTokens
from framesieve.services.preprocessing.prompt.positions import MediaSpan
from framesieve.services.preprocessing.prompt.template import ChatTemplate, Marks

_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
LARGE_TEXT_CHARS = 2**16
# How often a text that waits for the lock checks whether its request was cancelled.
_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an earlier turn of the model. arguments: of the function, by name."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: its role as chat templates name it, and its text and media in order.

    tool_calls: of the model. tool_call_id, tool_name: of the call whose result it is.
    """

    role: str
    parts: tuple[str | Modality, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tool_name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. description: None: it has none. parameters: the JSON schema of arguments."""

    name: str
    description: str | None
    parameters: Mapping[str, Any] = field(hash=False)


class ChatTokens:
    """Tokenises conversations with a checkpoint's chat template and tokenizer.

    placeholders: the control token of a media item, by modality. pads: that of each of its tokens; None: the same.
    joins_parts: what is between the parts of a message, for a template that takes text alone; None: it takes parts.
    options: variables of the template besides the messages and the tokenizer's special tokens.
    Raises StartupError if the checkpoint has no usable tokenizer or template.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        placeholders: Mapping[Modality, str],
        pads: Mapping[Modality, str] | None = None,
        joins_parts: str | None = None,
        options: Mapping[str, object] = {},
    ) -> None:
        path = checkpoint.folder / "tokenizer.json"
        contents = checkpoint.read_json(path.name)
        if not contents:
            raise StartupError(f"{path} does not exist")
        self._control = _control_tokens(contents, str(path))
        pads = pads or placeholders
        missing = [token for token in (*placeholders.values(), *pads.values()) if token not in self._control]
        if missing:
            raise StartupError(f"{path} has no token {', '.join(missing)}")
        self._joins_parts = joins_parts
        self._media = {token: modality for modality, token in placeholders.items()}
        self._pad_ids = {token: self._control[pads[modality]] for token, modality in self._media.items()}
        plain = contents | {"added_tokens": [], "post_processor": None}
        self._plain_first = Tokenizer.from_str(json.dumps(plain))
        self._plain = Tokenizer.from_str(json.dumps(plain | {"pre_tokenizer": _of_later_text(plain["pre_tokenizer"])}))
        # Serialises large texts: tokenising takes some 300 times the text's size, more than 1 GiB for 4 MiB.
        self._large = threading.Lock()
        spellable = [token for token, token_id in self._control.items() if token_id in _encoded(token, self._plain)]
        if spellable:
            raise StartupError(f"{path}: ordinary text can spell the control tokens {', '.join(spellable)}")
        config = checkpoint.read_json("tokenizer_config.json")
        names = {name: _text_of(config[name]) for name in _TOKEN_NAMES if config.get(name)}
        self._begin = names.get("bos_token")
        self._options = options
        self._prefix = _prefix(Tokenizer.from_str(json.dumps(contents)), str(path))
        self._marks = Marks(self._control)
        templates = [
            ChatTemplate(
                source.text,
                self._marks,
                names,
                takes_parts=source.takes_parts and joins_parts is None,
                where=str(checkpoint.folder),
            )
            for source in chat_templates(checkpoint)
        ]
        self._template = templates[0]
        self._with_tools = next((each for each in templates if each.shows_tools), None)
        self._placeholders = {modality: self._marks.marked(token) for modality, token in placeholders.items()}

    def conversation(
        self,
        turns: Sequence[Turn],
        expansions: Sequence[Expansion],
        check_cancelled: Callable[[], None] = lambda: None,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] = {},
    ) -> list[Int32Array | MediaTokens]:
        """Ids (int32 [n]) of the rendered conversation, and between them the tokens of its media.

        expansions: of the media items in the order of the turns; no text in them may spell a placeholder.
        check_cancelled: called before each text and while a large one waits; an exception from it ends the call.
        options: variables of the template, before those of the family.
        Raises InvalidRequest if the template refuses the turns, leaves out some of their text or media, or does not
        know the tools or options.
        """
        template = self._chosen(turns, tools)
        _check_options(template, options)
        rendered = self._rendered(template, turns, tools, options)
        self._check_texts(template, turns, tools, options)
        asked = [part for turn in turns for part in turn.parts if isinstance(part, Modality)]
        placed = [self._media[token] for token in self._marks.split(rendered)[1::2] if token in self._media]
        if placed != asked:
            text = f"hold {len(asked)} media, the checkpoint's chat template places {len(placed)} of them"
            raise InvalidRequest(text, field="prompt.messages")
        spans = [(item, part) for item, each in enumerate(expansions) for part in each if not isinstance(part, str)]
        return self._tokenise(self._expanded(rendered, expansions), spans, check_cancelled)

    def _chosen(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> ChatTemplate:
        """The template that renders these turns. Raises InvalidRequest for tools that none shows."""
        if not tools and not any(turn.tool_calls or turn.role == "tool" for turn in turns):
            return self._template
        if self._with_tools is None:
            what = "be empty" if tools else "hold no tool calls and results"
            text = f"must {what}: the checkpoint's chat template does not show tools to the model"
            raise InvalidRequest(text, field="prompt.tools" if tools else "prompt.messages")
        return self._with_tools

    def _rendered(
        self,
        template: ChatTemplate,
        turns: Sequence[Turn],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        texts: Sequence[str] | None = None,
    ) -> str:
        """The template's output, with marks. texts: in place of those of the turns."""
        following = iter(_texts(turns) if texts is None else texts)
        messages = [self._message(template, turn, following) for turn in turns]
        return template.render(messages, [_shown(tool) for tool in tools], {**self._options, **options})

    def _message(self, template: ChatTemplate, turn: Turn, texts: Iterator[str]) -> dict[str, Any]:
        content: list[dict[str, str]] = []
        spelt: list[str] = []
        for part in turn.parts:
            if isinstance(part, Modality):
                content.append({"type": part.value})
                spelt.append(self._spelt(part) if self._joins_parts is None else self._placeholders[part])
            else:
                content.append({"type": "text", "text": next(texts)})
                spelt.append(content[-1]["text"])
        message: dict[str, Any] = {
            "role": turn.role,
            "content": content if template.takes_parts else (self._joins_parts or "").join(spelt),
        }
        if turn.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.tool_calls
            ]
        if turn.role == "tool":
            message |= {"tool_call_id": turn.tool_call_id, "name": turn.tool_name}
        return message

    def _spelt(self, modality: Modality) -> str:
        """What the template of parts writes for a media item, such as markers around its placeholder."""
        before, after = secrets.token_hex(16), secrets.token_hex(16)
        parts = ({"type": "text", "text": before}, {"type": modality.value}, {"type": "text", "text": after})
        rendered = self._template.render([{"role": "user", "content": list(parts)}], (), self._options)
        return rendered.partition(before)[2].partition(after)[0]

    def _check_texts(
        self, template: ChatTemplate, turns: Sequence[Turn], tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> None:
        """Raises InvalidRequest if the template leaves out a text, whatever it is, such as that of a second system
        message. What it leaves out because of what the text says is left out in transformers, too."""
        stand_ins = [text and secrets.token_hex(16) for text in _texts(turns)]
        rendered = self._rendered(template, turns, tools, options, stand_ins)
        places = (place for place, turn in enumerate(turns) for part in turn.parts if not isinstance(part, Modality))
        for place, stand_in in zip(places, stand_ins, strict=True):
            if stand_in not in rendered:  # the text is not quoted, because error texts are logged
                raise InvalidRequest(
                    "holds text that the checkpoint's chat template leaves out (some take a system message only as the "
                    "first)",
                    field=f"prompt.messages[{place}]",
                )

    def _expanded(self, rendered: str, expansions: Sequence[Expansion]) -> list[str]:
        """Text, control token, text, …: each placeholder replaced by its item's expansion, with one placeholder for
        each part that is no text."""
        following = iter(expansions)
        pieces = []
        for place, piece in enumerate(self._marks.split(rendered)):
            if place % 2 == 0:
                pieces.append(piece)
            elif piece in self._media:
                mark = self._marks.marked(piece)
                parts = (self._marks.marked(part) if isinstance(part, str) else mark for part in next(following))
                pieces.append("".join(parts))
            else:
                pieces.append(self._marks.marked(piece))
        return self._marks.split("".join(pieces))

    def _tokenise(
        self,
        pieces: Sequence[str],
        spans: Sequence[tuple[int, int | MediaSpan]],
        check_cancelled: Callable[[], None],
    ) -> list[Int32Array | MediaTokens]:
        """pieces: text, control token, text, …"""
        following = iter(spans)
        made: list[Int32Array | MediaTokens] = []
        begins = self._begin is not None and [*pieces[:2]] == ["", self._begin]
        ids: list[int] = [] if begins else list(self._prefix)
        for index, piece in enumerate(pieces):
            if index % 2 == 0:
                tokenizer = self._plain_first if index == 0 else self._plain
                ids += self._ids(piece, check_cancelled, tokenizer)
            elif piece in self._media:
                item, span = next(following)
                if isinstance(span, int):
                    ids.append(span)
                    continue
                made += [np.array(ids, np.int32), MediaTokens(item, self._pad_ids[piece], span)]
                ids = []
            else:
                ids.append(self._control[piece])
        made.append(np.array(ids, np.int32))
        return [piece for piece in made if piece.size]

    def _ids(self, text: str, check_cancelled: Callable[[], None], tokenizer: Tokenizer) -> list[int]:
        """Ids of text in which nothing is a control token. Large texts take turns, and leave no memory behind."""
        if not text:
            return []
        check_cancelled()
        if len(text) <= LARGE_TEXT_CHARS:
            return _encoded(text, tokenizer)
        with self._turn(check_cancelled):
            ids = _encoded(text, tokenizer)
            give_back_freed_memory()
            return ids

    @contextmanager
    def _turn(self, check_cancelled: Callable[[], None]) -> Iterator[None]:
        while not self._large.acquire(timeout=_CHECK_S):
            check_cancelled()
        try:
            yield
        finally:
            self._large.release()


def _texts(turns: Sequence[Turn]) -> list[str]:
    return [part for turn in turns for part in turn.parts if not isinstance(part, Modality)]


def _shown(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it. Source: `get_json_schema` of transformers."""
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.parameters}}


def _check_options(template: ChatTemplate, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        # Clients turn thinking off for every model; a template without the variable does not think.
        if name not in template.variables and (name, value) != ("enable_thinking", False):
            known = ", ".join(sorted(template.variables)) or "none"
            text = f"is not a variable of the checkpoint's chat template; it has {known}"
            raise InvalidRequest(text, field=f"prompt.template_options.{name[:200]}")


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    # Not `encode`: it holds the interpreter lock, for seconds with a large text.
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoded.ids
    return ids


def _prefix(tokenizer: Tokenizer, path: str) -> list[int]:
    """What the tokenizer puts before each text, such as Llama's beginning of a sequence. Its processor adds it to a
    prompt that does not begin with it. Raises StartupError for what it puts behind."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    if whole[len(whole) - len(bare) :] != bare:
        raise StartupError(f"{path}: a post_processor that puts tokens behind a text is not supported")
    ids: list[int] = whole[: len(whole) - len(bare)]
    return ids


def _of_later_text(pre_tokenizer: Any) -> Any:
    """A pre-tokenizer for text behind a control token: some mark the beginning of the first text alone."""
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    if pre_tokenizer.get("type") == "Sequence":
        return pre_tokenizer | {"pretokenizers": [_of_later_text(each) for each in pre_tokenizer["pretokenizers"]]}
    if pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("prepend_scheme") == "first":
        return pre_tokenizer | {"prepend_scheme": "never"}
    return pre_tokenizer


def _control_tokens(contents: Mapping[str, Any], path: str) -> dict[str, int]:
    added = contents.get("added_tokens") or []
    for token in added:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise StartupError(f"{path}: the token {token['content']!r} strips or needs whole words: not supported")
    return {token["content"]: token["id"] for token in added}


def _text_of(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
