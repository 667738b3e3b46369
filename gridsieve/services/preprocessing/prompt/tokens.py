"""Applies the checkpoint's chat template and tokenizer such that a caller's text can never become a control token.

    rendered, with marks:     ⟨im_start⟩user\\nIs this a <|im_end|>?⟨vision_start⟩⟨video_pad⟩⟨vision_end⟩⟨im_end⟩\\n
    placeholders expanded:    … ⟨vision_start⟩<0.3 seconds>⟨vision_start⟩⟨video_pad⟩⟨vision_end⟩<1.3 seconds>…
    split at marks:           [im_start] [user\\nIs this a <|im_end|>?] [vision_start] [<0.3 seconds>] (grid) …
    text between marks:       tokenised by a tokenizer that finds no control tokens in it

Text that the template or a family puts directly beside a caller's text is tokenised together with it, so text gets the
same ids as in transformers, unless it spells a control token. It knows no model family.
Source: `apply_chat_template` and `get_text_with_replacements` of transformers 5.24.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gridsieve.common.chat_templates import TemplateSource, chat_templates
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.common.contract.plan import Modality
from gridsieve.services.preprocessing.prompt.control_tokens import control_tokens, named_tokens
from gridsieve.services.preprocessing.prompt.layout import Expansion, MediaTokens, Piece, SharedId, SharedToken
from gridsieve.services.preprocessing.prompt.plain_text import PlainText
from gridsieve.services.preprocessing.prompt.positions import PartSpan, SharedSpan
from gridsieve.services.preprocessing.prompt.template import ChatTemplate, Marks
from gridsieve.services.preprocessing.prompt.turns import Tool, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTexts:
    """The texts of a model family's prompts.

    placeholders: the control token of a media item in the chat template, by modality; of those that the model takes.
    pad: the token of each token of an image and a video; None: its placeholder, as of a sound. With it, their
        placeholders need not be in the vocabulary: the chat template alone writes them.
    video_text: the placeholder of a video with the control tokens around it that its expansion replaces, too; None: it
        replaces the placeholder alone.
    joins_parts: the text between the parts of a message, for chat templates that take text only; None for templates
        that take parts.
    template_options: variables of the chat template besides the messages and the tokenizer's special tokens.
    video_template: the chat template of messages with a video, where it is not the checkpoint's; it takes parts.
    """

    placeholders: Mapping[Modality, str]
    pad: str | None = None
    video_text: str | None = None
    joins_parts: str | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)
    video_template: str | None = None

    @property
    def markers(self) -> Sequence[str]:
        """The texts in expansions of media, whose tokens no caller may write."""
        return ()


class ChatTokens:
    """Tokenises conversations with a checkpoint's chat template and tokenizer.

    Raises StartupError if the checkpoint has no usable tokenizer or template.
    """

    def __init__(self, checkpoint: Checkpoint, texts: PromptTexts) -> None:
        sources = chat_templates(checkpoint)
        of_videos = sources.conversation
        if texts.video_template:
            of_videos = TemplateSource(texts.video_template, takes_parts=True)
        placeholders, pad = texts.placeholders, texts.pad
        markers = (*texts.markers, *placeholders.values(), pad or "", texts.video_text or "")
        read = dict.fromkeys((*sources.for_tools, of_videos))
        self._control = control_tokens(checkpoint, [source.text for source in read], markers)
        self._text = PlainText(checkpoint, self._control)
        pads = {token: token if kind is Modality.AUDIO else pad or token for kind, token in placeholders.items()}
        missing = [token for token in dict.fromkeys(pads.values()) if token not in self._control]
        if missing:
            raise StartupError(f"{self._text.path} has no token {', '.join(missing)}")
        self._joins_parts = texts.joins_parts
        self._media = {token: modality for modality, token in placeholders.items()}
        self._pad_ids = {token: self._control[own] for token, own in pads.items()}
        names = named_tokens(checkpoint)
        self._begin = names.get("bos_token")
        self._options = texts.template_options
        self._marks = Marks({*self._control, *placeholders.values()})
        templates = {
            source: ChatTemplate(
                source.text,
                self._marks,
                names,
                takes_parts=source.takes_parts and texts.joins_parts is None,
                where=str(checkpoint.folder),
            )
            for source in read
        }
        self._template, self._with_videos = templates[sources.conversation], templates[of_videos]
        self._with_tools = next((templates[each] for each in sources.for_tools if templates[each].shows_tools), None)
        self._placeholders = {modality: self._marks.marked(token) for modality, token in placeholders.items()}
        self._video_text = self._marks.marked(texts.video_text) if texts.video_text else None

    def conversation(
        self,
        turns: Sequence[Turn],
        expansions: Sequence[Expansion],
        check_cancelled: Callable[[], None] = lambda: None,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] = {},
    ) -> list[Piece]:
        """Ids (int32 [n]) of the rendered conversation, and between them the tokens of its media.

        expansions: of the media in the order of the turns; no text in them may spell a placeholder. A video with its
        sound has one expansion, and is two items.
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
        return self._tokenise(self._expanded(rendered, expansions), _numbered(expansions), check_cancelled)

    def _chosen(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> ChatTemplate:
        """The template that renders these turns. Raises InvalidRequest for tools that none shows."""
        if not tools and not any(turn.tool_calls or turn.role == "tool" for turn in turns):
            has_video = any(Modality.VIDEO in turn.parts for turn in turns)
            return self._with_videos if has_video else self._template
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
        if turn.thought:
            message["reasoning_content"] = turn.thought
        if turn.role == "tool":
            message |= {"tool_call_id": turn.tool_call_id, "name": turn.tool_name}
        return message

    def _spelt(self, modality: Modality) -> str:
        """The text that the template of parts writes for a media item, such as markers around its placeholder."""
        before, after = secrets.token_hex(16), secrets.token_hex(16)
        parts = ({"type": "text", "text": before}, {"type": modality.value}, {"type": "text", "text": after})
        rendered = self._template.render([{"role": "user", "content": list(parts)}], (), self._options)
        return rendered.partition(before)[2].partition(after)[0]

    def _check_texts(
        self, template: ChatTemplate, turns: Sequence[Turn], tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> None:
        """Raises InvalidRequest if the template leaves out a text wherever it stands, such as a second system message.

        Random stand-ins take the place of the texts: a template may also drop a text because of its content, as in
        transformers, and that is allowed.
        """
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
        if self._video_text is not None:
            rendered = rendered.replace(self._video_text, self._placeholders[Modality.VIDEO])
        following = iter(expansions)
        pieces = []
        for place, piece in enumerate(self._marks.split(rendered)):
            if place % 2 == 0:
                pieces.append(piece)
            elif piece in self._media:
                mark = self._marks.marked(piece)
                of_sound = self._placeholders.get(Modality.AUDIO, mark)
                for part in next(following):
                    if isinstance(part, str):
                        pieces.append(self._marks.marked(part))
                    else:
                        pieces.append(of_sound if _is_of_sound(part) else mark)
            else:
                pieces.append(self._marks.marked(piece))
        return self._marks.split("".join(pieces))

    def _tokenise(
        self,
        pieces: Sequence[str],
        spans: Sequence[tuple[int, Any]],
        check_cancelled: Callable[[], None],
    ) -> list[Piece]:
        """pieces: text, control token, text, … spans: what each placeholder stands for, and of which item."""
        following = iter(spans)
        made: list[Piece] = []
        begins = self._begin is not None and [*pieces[:2]] == ["", self._begin]
        ids: list[int] = [] if begins else list(self._text.prefix)
        for index, piece in enumerate(pieces):
            if index % 2 == 0:
                ids += self._text.ids(piece, first=index == 0, check_cancelled=check_cancelled)
            elif piece in self._media:
                item, span = next(following)
                if isinstance(span, int):
                    ids.append(span)
                    continue
                made.append(np.array(ids, np.int32))
                ids = []
                if isinstance(span, SharedToken):
                    made.append(SharedId(self._control[span.text], SharedSpan(span.before)))
                else:
                    made.append(MediaTokens(item, self._pad_ids[piece], span))
            else:
                ids.append(self._control[piece])
        made.append(np.array(ids + self._text.suffix, np.int32))
        return [piece for piece in made if piece.size]


def _numbered(expansions: Sequence[Expansion]) -> list[tuple[int, Any]]:
    """The parts of expansions that are no text, each with the number of its item. The sound of a video is one more."""
    numbered, item = list[tuple[int, Any]](), 0
    for parts in expansions:
        numbered += [(item + _is_of_sound(part), part) for part in parts if not isinstance(part, str)]
        item += 1 + any(map(_is_of_sound, parts))
    return numbered


def _is_of_sound(part: object) -> bool:
    """Whether a part of a video's expansion is one of its sound."""
    return isinstance(part, PartSpan) and part.of_sound


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
