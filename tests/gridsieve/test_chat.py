"""`gridsieve chat` in a terminal."""

from __future__ import annotations

from tests.gridsieve.fake_services import FakeServices
from tests.gridsieve.terminal import CTRL_C, CTRL_D, in_terminal


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation_which_ctrl_d_ends(
    services: FakeServices, address: str
) -> None:
    with in_terminal("chat", "--server", address) as terminal:
        terminal.wait_for("> ")
        terminal.type("What moves?\n")
        terminal.wait_for("A red ball ⚽")
        terminal.wait_for("> ")
        terminal.type("hang\n")
        terminal.wait_for("A red ")
        terminal.type(CTRL_C)
        assert services.cancelled.wait(20)
        terminal.wait_for("> ")
        terminal.type("And then?\n")
        terminal.wait_for("A red ball ⚽")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.left() == 0
    last = services.asked[-1].prompt.messages
    assert [message.parts[0].text for message in last] == ["What moves?", "A red ball ⚽", "And then?"]


def test_ctrl_c_at_the_prompt_leaves_with_130_and_without_a_traceback(address: str) -> None:
    with in_terminal("chat", "--server", address) as terminal:
        terminal.wait_for("> ")
        # Readline notices a signal that comes just before it waits for a key only after the line.
        terminal.type(f"What{CTRL_C}\n")
        assert terminal.left() == 130
