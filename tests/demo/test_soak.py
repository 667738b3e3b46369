"""What the soak test counts as a fault."""

from __future__ import annotations

import pytest

from common.contract.errors import (
    DeadlinePassed,
    InvalidRequest,
    MediaForbidden,
    MediaRejected,
    Overloaded,
    Unavailable,
)
from tests.soak.faults import growth
from tests.soak.ledger import Ledger
from tests.soak.questions import Question

GOOD = Question("video", None, "What?", {}, known="clip 0")
BAD = Question("noise", None, "What?", {}, InvalidRequest)
DAMAGED = Question("damaged", None, "What?", {}, InvalidRequest, may_pass=True)


def test_a_request_that_neither_ends_nor_fails_is_lost() -> None:
    ledger = Ledger(asked=3)
    ledger.answered(GOOD, "a square")
    ledger.left(GOOD)
    assert ledger.lost == 1


def test_different_answers_to_the_same_question_are_a_fault() -> None:
    ledger = Ledger()
    ledger.answered(GOOD, "a square")
    ledger.answered(GOOD, "a square")
    assert not ledger.faults
    ledger.answered(GOOD, "a circle")
    assert ledger.faults == ["clip 0: answered 'a circle', and before 'a square'"]


@pytest.mark.parametrize(
    ("question", "error", "fine_while"),
    [
        (GOOD, Overloaded("full", 1.0), {"", "gone", "impatient"}),
        (GOOD, Overloaded("full", 0.0), set()),
        (GOOD, Unavailable("lost", "generation"), {"gone"}),
        (GOOD, DeadlinePassed("late"), {"impatient"}),
        (GOOD, ValueError("a bug"), set()),
        (BAD, MediaRejected("no media"), {"", "gone", "impatient"}),
        (BAD, MediaForbidden("no"), set()),
    ],
)
def test_an_error_is_a_fault_unless_it_is_expected(question: Question, error: Exception, fine_while: set[str]) -> None:
    for state in ("", "gone", "impatient"):
        ledger = Ledger()
        ledger.failed(question, error, gone=state == "gone", impatient=state == "impatient")
        assert (not ledger.faults) == (state in fine_while), state


def test_an_answer_to_an_invalid_question_is_a_fault_unless_it_may_pass() -> None:
    ledger = Ledger()
    ledger.answered(DAMAGED, "a square")
    assert not ledger.faults
    ledger.answered(BAD, "a square")
    assert len(ledger.faults) == 1


def test_growth_is_the_ratio_of_the_last_third_to_the_middle_third() -> None:
    assert growth([1, 900, 5, 100, 100, 101, 120, 121, 121]) == pytest.approx(1.21)
