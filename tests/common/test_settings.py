"""Settings that every service has, and the page that lists all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.settings import GenerationSettings
from gridsieve.services.settings import page


@pytest.mark.parametrize(
    ("arguments", "environment", "value"),
    [
        (["--max-model-len", "5"], {}, 5),
        ([], {"GRIDSIEVE_MAX_MODEL_LEN": "5"}, 5),
        (["--max-model-len", "4", "--max-model-len=5"], {"GRIDSIEVE_MAX_MODEL_LEN": "6"}, 5),
        (["--max-model-len=None"], {"GRIDSIEVE_MAX_MODEL_LEN": "6"}, None),
        ([], {"MAX_MODEL_LEN": "5"}, None),
    ],
)
def test_a_setting_is_a_flag_and_a_variable_and_the_flag_takes_precedence(
    arguments: list[str], environment: dict[str, str], value: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert GenerationSettings.load(arguments).max_model_len == value


def test_a_wrong_value_is_refused_by_its_flag() -> None:
    with pytest.raises(StartupError, match=r"--max-model-len: .*got '0'"):
        GenerationSettings.load(["--max-model-len", "0"])


def test_the_page_of_settings_is_what_the_command_prints() -> None:
    assert (Path(__file__).parents[2] / "docs" / "settings.md").read_text() == page(), (
        "run: python -m gridsieve.services.settings > docs/settings.md"
    )
