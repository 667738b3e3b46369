"""`framesieve ask` with options of sampling: what reaches the service, and how several answers are shown."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import Result

from framesieve.v1 import generation_pb2
from tests.framesieve.fake_services import FakeServices


def test_ask_sends_how_tokens_are_to_be_chosen(
    framesieve: Callable[..., Result], services: FakeServices, address: str
) -> None:
    choosing = ["--temperature", "0.5", "--top-p", "0.25", "--top-k", "7", "--min-p", "0.125", "--seed", "0"]
    penalties = ["--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.75"]
    ends = ["--max-new-tokens", "9", "--stop", "x", "--stop", "y z", "--n", "2"]
    told = ["--json", "--top-logprobs", "2"]
    result = framesieve("ask", "?", "--server", address, *choosing, *penalties, *ends, *told)
    assert result.exit_code == 0, result.stderr
    assert services.asked[0].sampling == generation_pb2.Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=0,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        max_new_tokens=9,
        stop=["x", "y z"],
        n=2,
        logprobs=True,
        top_logprobs=2,
    )


def test_what_ask_was_not_told_stays_the_models_own(
    framesieve: Callable[..., Result], services: FakeServices, address: str
) -> None:
    framesieve("ask", "?", "--server", address)
    assert services.asked[0].sampling == generation_pb2.Sampling()


def test_ask_names_an_adapter(framesieve: Callable[..., Result], services: FakeServices, address: str) -> None:
    framesieve("ask", "?", "--server", address, "--adapter", "traffic")
    framesieve("ask", "?", "--server", address)
    assert [(asked.HasField("adapter"), asked.adapter) for asked in services.asked] == [(True, "traffic"), (False, "")]


def test_several_answers_stand_one_after_another_though_they_come_mixed(
    framesieve: Callable[..., Result], address: str
) -> None:
    result = framesieve("ask", "?", "--server", address, "--n", "3")
    assert result.exit_code == 0
    assert result.stdout == "A red ball ⚽\nSomething\n\n"
    places = [result.stderr.index(f"completion {number} of 3") for number in (1, 2, 3)]
    assert places == sorted(places)
    assert "6 tokens in 0.75 s" in result.stderr


def test_one_answer_has_no_number(framesieve: Callable[..., Result], address: str) -> None:
    assert "completion 1" not in framesieve("ask", "?", "--server", address).stderr


def test_json_holds_every_answer(framesieve: Callable[..., Result], address: str) -> None:
    result = framesieve("ask", "?", "--server", address, "--n", "2", "--json")
    assert result.stderr == ""
    told = json.loads(result.stdout)
    assert told["choices"] == [
        {"answer": "A red ball ⚽", "finish_reason": "stop"},
        {"answer": "Something", "finish_reason": "stop"},
    ]
    assert told["answer"] == "A red ball ⚽"
    assert told["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("wanted", "beside"), [("0", []), ("2", [{"token_id": 9, "logprob": -1.5}])], ids=["none", "two"]
)
def test_json_holds_log_probabilities_where_they_are_asked_for(
    framesieve: Callable[..., Result], address: str, wanted: str, beside: list[dict[str, float]]
) -> None:
    told = json.loads(framesieve("ask", "?", "--server", address, "--json", "--top-logprobs", wanted).stdout)
    [choice] = told["choices"]
    for token_id, token in zip((1, 2), choice["tokens"], strict=True):
        own = {"token_id": token_id, "logprob": -0.5}
        assert token == {**own, "top_logprobs": [own, *beside] if beside else []}


def test_log_probabilities_without_json_are_wrong_usage(framesieve: Callable[..., Result], address: str) -> None:
    result = framesieve("ask", "?", "--server", address, "--top-logprobs", "2")
    assert result.exit_code == 2
    assert "--json" in result.stderr
    assert result.stdout == ""


def test_help_groups_what_chooses_tokens_and_shows_an_example(framesieve: Callable[..., Result]) -> None:
    told = framesieve("ask", "--help").stdout
    choosing = told[told.index("Sampling (default") :].split("╰")[0]
    names = ("temperature", "top-p", "top-k", "min-p", "repetition-penalty", "presence-penalty", "frequency-penalty")
    assert [f"--{name} " in choosing for name in (*names, "seed")] == [True] * (len(names) + 1)
    assert "--n 3 --temperature 0.8" in told
