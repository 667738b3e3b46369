"""What descriptions say of parts of a clip, and which of them are true."""

from __future__ import annotations

from random import Random

import torch

from demo.descriptions import Event, altered, caption, described, seen_in
from demo.embedder import contrast
from demo.scenes import Motion, Thing
from tests.demo.scenes import scene

SCENE = scene(
    Thing("blue", "square", 0.8, 0.2, 0.1),
    Thing("red", "circle", 0.7, 0.7, 0.1, motion=Motion("left", 2.0, 4.0, 0.4)),
)
MOVES = Event("red", "circle", "left"), Event("blue", "square", "still", "top right")


def test_a_part_shows_a_move_none_or_is_uncertain() -> None:
    assert seen_in(SCENE, 0, 16) == MOVES
    assert caption(MOVES).text == "A red circle moves left and a blue square stands still at the top right."
    assert seen_in(SCENE, 5, 9) == (Event("red", "circle", "still"), MOVES[1])
    assert seen_in(SCENE, 3, 9) is None, "half of the move"


def test_descriptions_are_true_of_what_they_describe_and_changed_ones_of_something_else() -> None:
    rng = Random(0)
    assert all(described(MOVES, rng).holds(MOVES) for _ in range(200))
    changed = [altered(MOVES[:1], rng) for _ in range(200)]
    assert not any(each.holds(MOVES[:1]) for each in changed)
    assert any(each.holds((Event("red", "circle", "up"),)) for each in changed)


def test_the_loss_has_a_text_against_all_clips_and_a_clip_against_false_texts() -> None:
    """Of two texts and two clips; the first text is true of both, so it says nothing of which clip is meant."""
    scores = torch.tensor([[2.0, 1.0], [0.5, 3.0]])
    holds = torch.tensor([[True, True], [False, True]])
    e = scores.exp()
    of_text = -torch.log(e[1, 1] / e[1].sum())
    of_clips = [-torch.log(e[0, 0] / (e[0, 0] + e[1, 0])), torch.tensor(0.0), torch.tensor(0.0)]
    torch.testing.assert_close(contrast(scores, holds), of_text + torch.stack(of_clips).mean())
