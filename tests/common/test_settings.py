"""Settings that every service has: renamed ones, and the page that lists all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from framesieve.common.contract.errors import StartupError
from framesieve.common.serving.settings import ServiceSettings, renamed
from framesieve.services.settings import page

FLAG, OLD_FLAG = "--max-model-len", "--max-prompt-tokens"
VARIABLE, OLD_VARIABLE = "FRAMESIEVE_MAX_MODEL_LEN", "FRAMESIEVE_MAX_PROMPT_TOKENS"


class Renaming(ServiceSettings):
    listen: str = "unix:/s"
    metrics_port: int = 0
    max_model_len: int = Field(7, ge=1, validation_alias=renamed("max_prompt_tokens", "max_model_len"))


@pytest.mark.parametrize(
    ("arguments", "environment", "value", "old_names"),
    [
        ([FLAG, "5"], {}, 5, ()),
        ([f"{OLD_FLAG}=5"], {}, 5, ((OLD_FLAG, FLAG),)),
        ([], {OLD_VARIABLE: "5"}, 5, ((OLD_VARIABLE, VARIABLE),)),
        ([OLD_FLAG, "4", FLAG, "5"], {}, 5, ((OLD_FLAG, FLAG),)),
        ([OLD_FLAG, "5"], {VARIABLE: "4"}, 5, ((OLD_FLAG, FLAG),)),
        ([], {"MAX_MODEL_LEN": "5", "MAX_PROMPT_TOKENS": "5"}, 7, ()),
    ],
)
def test_a_renamed_setting_is_set_by_flags_and_variables_of_both_names(
    arguments: list[str],
    environment: dict[str, str],
    value: int,
    old_names: tuple[tuple[str, str], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    settings = Renaming.load(arguments)
    assert (settings.max_model_len, settings.old_names) == (value, old_names)


def test_a_wrong_value_by_the_old_name_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--max-model-len: .*got '0'"):
        Renaming.load([OLD_FLAG, "0"])


def test_the_page_of_settings_is_what_the_command_prints() -> None:
    assert (Path(__file__).parents[2] / "docs" / "settings.md").read_text() == page(), (
        "run: python -m framesieve.services.settings > docs/settings.md"
    )
