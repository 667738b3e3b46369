"""Applies the checkpoint's chat template and tokenizer such that user text can never become a control token.

    template over stand-ins:  <|im_start|>user\\n⟨1⟩<|vision_start|><|video_pad|><|vision_end|>⟨2⟩<|im_end|>\\n
    placeholders expanded:    … <|vision_start|><0.3 seconds><|vision_start|><|video_pad|><|vision_end|><1.3 seconds>…
    split at control tokens:  [<|im_start|>] [user\\n⟨1⟩] [<|vision_start|>] [<0.3 seconds>] [<|vision_start|>] (grid) …
    user text put back:       only into plain pieces, which a tokenizer without control tokens tokenises

The template renders random stand-ins instead of the user's text. Text that the template or a family puts directly
beside user text is tokenised together with it, so ordinary text gets the same ids as in transformers. Exception: a
template that inspects the text (some cut earlier answers at `</think>`) sees only the stand-in, so that text stays
whole. It knows no model family, and needs only `tokenizers` and jinja2.
Source: `apply_chat_template` and `get_text_with_replacements` of transformers 5.24, whose environment it rebuilds.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from common.checkpoint import Checkpoint
from common.contract.errors import InvalidRequest, StartupError
from common.contract.plan import Int32Array, Modality
from common.process import give_back_freed_memory
from services.preprocessing.prompt.layout import Expansion, MediaTokens
from services.preprocessing.prompt.positions import MediaSpan

_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
LARGE_TEXT_CHARS = 2**16
# How often a text that waits for the lock checks whether its request was cancelled.
_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: its role as chat templates name it, and its text and media in order."""

    role: str
    parts: tuple[str | Modality, ...]


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
        self._placeholders = placeholders
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
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        config = checkpoint.read_json("tokenizer_config.json")
        self._names = {name: _text_of(config[name]) for name in _TOKEN_NAMES if config.get(name)}
        self._options = options
        self._prefix = _prefix(Tokenizer.from_str(json.dumps(contents)), str(path))
        try:
            self._template = _environment().from_string(_template(checkpoint, config))
        except TemplateError as error:
            raise StartupError(f"the chat template of {checkpoint.folder} is invalid: {error}") from error

    def conversation(
        self, turns: Sequence[Turn], expansions: Sequence[Expansion], check_cancelled: Callable[[], None] = lambda: None
    ) -> list[Int32Array | MediaTokens]:
        """Ids (int32 [n]) of the rendered conversation, and between them the tokens of its media.

        expansions: of the media items in the order of the turns; no text in them may spell a placeholder.
        check_cancelled: called before each text and while a large one waits; an exception from it ends the call.
        Raises InvalidRequest if the template refuses the turns, or leaves out some of their text or media.
        """
        rendered, texts = self._render(turns)
        places = (place for place, turn in enumerate(turns) for part in turn.parts if not isinstance(part, Modality))
        for place, (stand_in, text) in zip(places, texts.items(), strict=True):
            if text and stand_in not in rendered:  # the text is not quoted, because error texts are logged
                raise InvalidRequest(
                    f"prompt.messages[{place}] holds text that the checkpoint's chat template leaves out (some take a "
                    f"system message only as the first)"
                )
        asked = [part for turn in turns for part in turn.parts if isinstance(part, Modality)]
        placed = [self._media[token] for token in self._control_pattern.findall(rendered) if token in self._media]
        if placed != asked:
            raise InvalidRequest(
                f"prompt.messages hold {len(asked)} media, the checkpoint's chat template places {len(placed)} of them"
            )
        spans = [(item, part) for item, each in enumerate(expansions) for part in each if not isinstance(part, str)]
        return self._tokenise(self._expand(rendered, expansions), texts, spans, check_cancelled)

    def _expand(self, rendered: str, expansions: Sequence[Expansion]) -> str:
        """Replaces each placeholder by its item's expansion, with one placeholder for each part that is no text."""
        following = iter(expansions)

        def replaced(match: re.Match[str]) -> str:
            token = match[0]
            if token not in self._media:
                return token
            return "".join(part if isinstance(part, str) else token for part in next(following))

        return self._control_pattern.sub(replaced, rendered)

    def _tokenise(
        self,
        text: str,
        texts: Mapping[str, str],
        spans: Sequence[tuple[int, int | MediaSpan]],
        check_cancelled: Callable[[], None],
    ) -> list[Int32Array | MediaTokens]:
        following = iter(spans)
        pieces: list[Int32Array | MediaTokens] = []
        begins = text.startswith(self._names.get("bos_token", "\0"))
        ids: list[int] = [] if begins else list(self._prefix)
        for index, piece in enumerate(self._control_pattern.split(text)):
            if index % 2 == 0:
                tokenizer = self._plain_first if index == 0 else self._plain
                ids += self._ids(_put_back(piece, texts), check_cancelled, tokenizer)
            elif piece in self._media:
                item, span = next(following)
                if isinstance(span, int):
                    ids.append(span)
                    continue
                pieces += [np.array(ids, np.int32), MediaTokens(item, self._pad_ids[piece], span)]
                ids = []
            else:
                ids.append(self._control[piece])
        pieces.append(np.array(ids, np.int32))
        return [piece for piece in pieces if piece.size]

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

    def _render(self, turns: Sequence[Turn]) -> tuple[str, dict[str, str]]:
        """The template's output over stand-ins, and the text of each stand-in."""
        texts: dict[str, str] = {}
        messages: list[dict[str, Any]] = []
        for turn in turns:
            content: list[dict[str, str]] = []
            spelt: list[str] = []
            for part in turn.parts:
                if isinstance(part, Modality):
                    content.append({"type": part.value})
                    spelt.append(self._placeholders[part])
                else:
                    stand_in = f"⟨{secrets.token_hex(16)}⟩"
                    texts[stand_in] = part
                    content.append({"type": "text", "text": stand_in})
                    spelt.append(stand_in)
            joined = None if self._joins_parts is None else self._joins_parts.join(spelt)
            messages.append({"role": turn.role, "content": content if joined is None else joined})
        try:
            variables = {**self._names, **self._options}
            return self._template.render(messages=messages, add_generation_prompt=True, **variables), texts
        except TemplateError as error:
            raise InvalidRequest(f"prompt.messages: the checkpoint's chat template refuses them: {error}") from error


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


def _put_back(piece: str, texts: Mapping[str, str]) -> str:
    return re.sub(r"⟨[0-9a-f]{32}⟩", lambda match: texts.get(match[0], match[0]), piece)


def _control_tokens(contents: Mapping[str, Any], path: str) -> dict[str, int]:
    added = contents.get("added_tokens") or []
    for token in added:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise StartupError(f"{path}: the token {token['content']!r} strips or needs whole words: not supported")
    return {token["content"]: token["id"] for token in added}


def _template(checkpoint: Checkpoint, tokenizer_config: Mapping[str, Any]) -> str:
    """The chat template from the files that transformers reads, in its order."""
    path = checkpoint.folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for config in (checkpoint.read_json("chat_template.json"), tokenizer_config):
        template = config.get("chat_template")
        if isinstance(template, list):
            template = next((each["template"] for each in template if each["name"] == "default"), None)
        if template:
            return str(template)
    raise StartupError(f"{checkpoint.folder} has no chat template")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _text_of(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
