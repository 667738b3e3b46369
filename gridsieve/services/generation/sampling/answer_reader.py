"""Splits the text of one answer, as it arrives, into its thought, its text and its tool calls.

    <think>\\nKyoto?\\n</think>\\n\\nLet me look.\\n<tool_call>…</tool_call>
             thought             text             a call

A call may stand in the thought, which models forget to close. This module knows neither requests nor tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from gridsieve.services.generation.sampling.call_forms import FORMS, CallForm, NoCall
from gridsieve.services.generation.sampling.thoughts import CLOSE, OPEN, Thought
from gridsieve.services.generation.sampling.tool_calls import CallDelta, Calls, ToolUse
from gridsieve.services.generation.sampling.unread_text import CutOff, Steps, UnreadText

MARKS = frozenset({OPEN, CLOSE}).union(*(form.marks for _, form in FORMS))
"""All that is looked for in the text of answers."""
_PIECE_CHARACTERS = 512
_AFTER_THOUGHT = " \r\n\t\ufffd"
"""Blanks, and the part of a character that a budget cut off."""


class Part(NamedTuple):
    """What is certain of an answer since the last part."""

    thought: str
    text: str
    calls: list[CallDelta]


class AnswerReader:
    """Blanks around the thought, before a call, between calls and after the last belong to nothing. What begins as a
    call and is none stays text.

    use: the tools that the answer may call, in `form`; None: none. thought: None: it has none.
    may_think: whether what comes next may belong to the thought. thought_tokens: of the thought, with its marks.
    """

    def __init__(self, form: CallForm | None, use: ToolUse | None, thought: Thought | None) -> None:
        self._form = form if use else None
        self._unread = UnreadText()
        self._thought, self._text = _Said(_AFTER_THOUGHT), _Said()
        self._thought.drop_blanks()
        self._calls = Calls(use, self._unread, form.id_characters) if form and use else None
        self.may_think, self.thought_tokens = True, 0
        self._steps = self._read(thought)
        next(self._steps)

    @property
    def has_whole_calls(self) -> bool:
        """Whether it calls tools, and none of the calls was cut off."""
        return self._calls is not None and self._calls.begun > 0 and not self._calls.is_cut_off

    def read(self, text: str, tokens: int = 0) -> Part:
        """tokens: how many spell the text: one while `may_think`, or those around the end of a thought all count."""
        self.thought_tokens += tokens if self.may_think else 0
        # In pieces, because what follows a mark is copied.
        for begin in range(0, len(text), _PIECE_CHARACTERS):
            self._unread.text += text[begin : begin + _PIECE_CHARACTERS]
            next(self._steps)
        return self._part()

    def end(self, *, stopped: bool) -> Part:
        """What is left where the answer ends. stopped: by itself, so that a call which that cuts off is text, too."""
        self._unread.ended = True
        next(self._steps, None)
        if stopped and self._calls and self._calls.is_cut_off:
            self._text.add("".join(self._unread.taken))
        self._text.end()
        return self._part()

    def _part(self) -> Part:
        return Part(self._thought.take(), self._text.take(), self._calls.take() if self._calls else [])

    def _read(self, thought: Thought | None) -> Steps[None]:
        begins = [self._form.begin] if self._form else []
        said = self._text
        if thought and (thought.is_open or (yield from self._unread.starts([OPEN]))):
            said = self._thought
        else:
            self.may_think, self.thought_tokens = False, 0
        try:
            while True:
                marks = [*begins, CLOSE] if said is self._thought else begins
                if (yield from self._unread.to(marks, said.add)) == CLOSE:
                    said = self._after_thought("")
                else:
                    said = yield from self._read_call(said)
        except CutOff:
            return

    def _after_thought(self, text: str) -> _Said:
        """Begins the text. Returns where what follows belongs."""
        self.may_think = False
        self._text.drop_blanks()
        self._text.add(text)
        return self._text

    def _read_call(self, said: _Said) -> Steps[_Said]:
        """Reads what follows the mark of a call, which belongs to `said` if it is none. Returns where the rest does."""
        assert self._form
        assert self._calls
        self._unread.taken = [self._form.begin]
        self._calls.on_begin = said.call
        before = self._calls.finished
        try:
            yield from self._form.read(self._unread, self._calls)
        except (NoCall, CutOff) as error:
            if isinstance(error, NoCall) or self._calls.begun == before:
                read = "".join(self._unread.taken)
                thought, close, text = read.partition(CLOSE) if said is self._thought else (read, "", "")
                said.add(thought)
                return self._after_thought(text) if close else said
        return said


class _Said:
    """Text that is told once it is certain that it does not end with blanks. blanks: the characters that are such."""

    def __init__(self, blanks: str | None = None) -> None:
        self._blanks = blanks
        self._pending: list[str] = []  # blanks after the text that was told; not text if a call follows
        self._told: list[str] = []
        self._drops_first = self._after_call = False

    def drop_blanks(self) -> None:
        """Leaves out the blanks that it begins with."""
        self._drops_first = True

    def add(self, text: str) -> None:
        if self._drops_first:
            text = text.lstrip()
            self._drops_first = not text
        if said := text.rstrip(self._blanks):
            self._told += (*self._pending, said)
            self._pending, self._after_call = [], False
        self._pending.append(text[len(said) :])

    def call(self) -> None:
        """A call follows."""
        self._pending, self._after_call = [], True

    def end(self) -> None:
        if not self._after_call:
            self._told += self._pending

    def take(self) -> str:
        told, self._told = "".join(self._told), []
        return told
