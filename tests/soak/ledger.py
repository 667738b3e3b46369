"""Records how requests ended and which of those ends are faults. It knows no services or processes."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field

from gridsieve.common.contract.errors import DeadlinePassed, GridsieveError, Overloaded, Unavailable
from tests.soak.questions import Question


@dataclass
class Ledger:
    """asked: requests begun; outcomes: requests by kind and end; faults: descriptions of wrong ends."""

    asked: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Requests without an end."""
        return self.asked - self.outcomes.total()

    def answered(self, question: Question, text: str) -> None:
        self._note(question, "answered")
        if question.refused_as and not question.may_pass:
            self.faults.append(f"{question.kind}: answered, and should have been refused")
        if question.known and self.answers.setdefault(question.known, text) != text:
            self.faults.append(f"{question.known}: answered {text!r}, and before {self.answers[question.known]!r}")

    def left(self, question: Question) -> None:
        self._note(question, "left by the caller")

    def failed(self, question: Question, error: BaseException, *, gone: bool, impatient: bool) -> None:
        """gone: generation was killed during or just before the request; impatient: the deadline was short."""
        self._note(question, error.reason if isinstance(error, GridsieveError) else type(error).__name__)
        match error:
            case Overloaded():
                expected = error.retry_after_s > 0
            case Unavailable():
                expected = gone
            case DeadlinePassed():
                expected = impatient
            case _:
                expected = question.refused_as is not None and isinstance(error, question.refused_as)
        if not expected:
            words = str(error) if isinstance(error, GridsieveError) else "".join(traceback.format_exception(error))
            self.faults.append(f"{question.kind}: {type(error).__name__}: {words}")

    def _note(self, question: Question, outcome: str) -> None:
        self.outcomes[question.kind, outcome] += 1
