"""The grammar of an answer, in llguidance's Lark: its thought, then a document, calls, or text.

    start: thought <[151668]> BLANK? (TEXT | lead body …)

A budget ends the thought: once it has so many tokens, only the mark that closes it is allowed. This module knows
neither requests nor the matcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.generation.sampling.call_forms import CallForm, Mark, ending, escaped, is_a_token
from gridsieve.services.generation.sampling.thoughts import CLOSE, OPEN, Thought
from gridsieve.services.generation.sampling.tool_calls import ToolUse

_FREE = "free"


def grammar_of(
    document: Sequence[str],
    calls: tuple[CallForm, ToolUse, Sequence[Mapping[str, Any]]] | None,
    thought: tuple[Thought, int | None] | None,
    mark: Mark,
) -> str:
    """The grammar of one answer.

    document: the rules of a document, or of an answer that calls nothing; none: any text. calls: their form, the tools,
    and the schemas of the tools' arguments; None: it has none. thought: with the most tokens of it; None: it has none.
    Raises InvalidRequest for a schema that the form cannot hold, and for a number that the tokenizer cannot.
    """
    start, rules = "document" if document else _FREE, list(document)
    if calls:
        start = _with_calls(start, *calls, mark, rules)
    if thought:
        start = _after_thought(*thought, start, mark, rules)
    return "\n".join((f"start: {start}", *rules, ""))


def _with_calls(
    other: str, form: CallForm, use: ToolUse, schemas: Sequence[Mapping[str, Any]], mark: Mark, rules: list[str]
) -> str:
    """Calls, or, unless they are required, what `other` says."""
    for place, (tool, schema) in enumerate(zip(use.tools, schemas, strict=True)):
        rules += form.rules(place, tool, schema, mark)
    rules.append(f"body: {' | '.join(f'tool_{place}' for place in range(len(use.tools)))}")
    rest = form.rest(mark, single=use.single)
    if use.required:
        return f"{mark(form.begin)} {rest}"
    if other != _FREE:
        return f"{other} | {mark(form.begin)} {rest}"
    rule, lead = ending("LEAD", "(?s:.*)", form.begin, mark)
    rules += [rule, f"TEXT: /(?s:.+)/ & ~/(?s:.*){escaped(form.begin)}(?s:.*)/"]
    return f"TEXT | {lead} {rest}"


def _after_thought(thought: Thought, budget: int | None, start: str, mark: Mark, rules: list[str]) -> str:
    """A thought, and then what `start` says. Its text has no limit but the budget: a `</think>` that is spelt in other
    tokens is not looked for, because looking costs a millisecond a token."""
    open_, close = mark(OPEN), mark(CLOSE)
    is_token = is_a_token(close) and (thought.is_open or is_a_token(open_))
    if budget is not None and not is_token:
        why = f"must be unset: {CLOSE} is no token of the checkpoint's tokenizer"
        raise InvalidRequest(why, field="sampling.max_thinking_tokens")
    if budget == 0:
        closing = close
    elif is_token:
        rules.append(f"thought{'' if budget is None else f'[max_tokens={budget}]'}: /(?s:.*)/")
        closing = f"thought {close}"
    else:
        rules.append(f'thought[suffix="{CLOSE}"]: /(?s:.*)/')
        closing = "thought"
    if start == _FREE:
        rules.append("anything: <[*]>*")
        if thought.is_open:
            return f"{closing} anything"
        rules.append(f"thoughtless: <[^{open_[2:-2]}]>*")
        return f"{open_} {closing} anything | thoughtless"
    rules.append("BLANK: /\\n{1,2}/")
    closing = f"{closing} BLANK?"
    return f"{closing} ({start})" if thought.is_open else f"({open_} {closing})? ({start})"
