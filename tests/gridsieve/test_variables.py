"""Environment variables in place of flags of the command."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import Result

from tests.gridsieve.fake_services import FakeServices

Run = Callable[..., Result]


def test_flags_come_from_the_environment_unless_the_command_line_has_them(
    gridsieve: Run, services: FakeServices, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"MAX_NEW_TOKENS": "7", "SEED": "4", "STOP": "two words\nend", "JSON": "1", "SERVER": address}
    for name, value in given.items():
        monkeypatch.setenv(f"GRIDSIEVE_ASK_{name}", value)
    monkeypatch.setenv("GRIDSIEVE_SERVER", "unix:/nowhere")  # that of all commands gives way to that of one
    monkeypatch.setenv("GRIDSIEVE_CHAT_TEMPERATURE", "0.5")
    result = gridsieve("ask", "What moves?", "--seed", "5")
    assert (result.exit_code, json.loads(result.stdout)["answer"]) == (0, "A red ball ⚽")
    sampling = services.asked[0].sampling
    assert (sampling.max_new_tokens, sampling.seed, list(sampling.stop)) == (7, 5, ["two words", "end"])
    assert not sampling.HasField("temperature")


def test_a_wrong_value_is_reported_by_the_name_of_its_variable(gridsieve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRIDSIEVE_ASK_FPS", "many")
    result = gridsieve("ask", "What moves?")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "GRIDSIEVE_ASK_FPS" in result.stderr


def test_bench_starts_a_model_of_its_own_though_the_environment_has_a_server(
    gridsieve: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRIDSIEVE_SERVER", "unix:/nowhere")
    result = gridsieve("bench", "--model", "/nowhere")
    assert result.exit_code == 1
    assert result.stderr.startswith("STARTUP: ")
