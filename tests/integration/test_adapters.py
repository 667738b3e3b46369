"""Adapters through three real processes: each answers as PEFT does on transformers' whole model."""

from __future__ import annotations

import asyncio
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from framesieve.__main__ import app
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Image, Message, Text, Video
from tests.families import FAMILIES, load_reference
from tests.integration.conftest import settles
from tests.integration.test_families import BRIEF, TALL, model_inputs, preprocess

CLEAR_MARGIN = 2e-4
PARTS = (Video(data=BRIEF, fps=8), Image(data=TALL))


async def test_concurrent_requests_with_and_without_adapters_answer_as_peft_and_transformers_do(
    stack: LocalStack, checkpoint: Path, adapted: dict[Path, Any]
) -> None:
    messages = [Message("user", (*PARTS, Text("What moves?")))]
    asked = await preprocess(stack.addresses["preprocessing"], messages)
    reference = load_reference("qwen2_5_vl", checkpoint)
    models = {None: reference} | {folder.name: model for folder, model in adapted.items()}
    async with FramesieveClient(stack.address) as client:
        names = [*models, *models]  # each twice: the second hits the prefix cache of its own adapter
        answers = await asyncio.gather(
            *(
                client.ask(
                    PARTS, "What moves?", adapter=name, max_new_tokens=8, temperature=0, logprobs=True, timeout_s=60
                )
                for name in names
            )
        )
    firsts: list[torch.Tensor] = []
    inputs = model_inputs(FAMILIES["qwen2_5_vl"], checkpoint, asked, reference.config)
    for name, answer in zip(names, answers, strict=True):
        generated = models[name].generate(
            **inputs, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        logits = torch.cat(generated.logits)
        firsts.append(logits[0])
        best, second = logits.topk(2, dim=-1).values.T
        assert (best - second > CLEAR_MARGIN).all(), "choose another clip: a tie proves nothing"
        expected = generated.sequences[0, asked.plan.tokens :]
        assert list(answer.token_ids) == expected.tolist()
        logprobs = logits.log_softmax(dim=-1).gather(1, expected[:, None])[:, 0]
        assert answer.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
    for one, other in combinations(firsts[: len(models)], 2):
        assert float((one - other).abs().max()) > 0.01, "adapters that change nothing prove nothing"


def test_the_command_takes_an_adapter_and_lists_those_it_knows(stack: LocalStack, media_root: Path) -> None:
    asking = ["ask", str(media_root / "clip.mp4"), "What moves?", "--server", stack.address, "--json"]
    asking += ["--max-new-tokens", "3", "--adapter"]
    answer = CliRunner().invoke(app, [*asking, "small"])
    assert answer.exit_code == 0, answer.stderr
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] > 0
    refused = CliRunner().invoke(app, [*asking, "huge"])
    assert refused.exit_code == 1
    assert "adapter must be one of small, large, got 'huge'" in " ".join(refused.stderr.split())


async def test_logs_name_the_adapters_that_are_loaded_and_that_of_each_request(
    stack: LocalStack, adapted: dict[Path, Any]
) -> None:
    async with FramesieveClient(stack.address) as client:
        for name in (None, "large"):
            await client.ask(None, "?", adapter=name, max_new_tokens=1, request_id=f"by {name}", timeout_s=60)

    def said() -> list[dict[str, Any]]:
        return [json.loads(line) for line in stack.log("generation").splitlines()]

    def ended() -> dict[str, str | None]:
        return {each["request_id"]: each.get("adapter") for each in said() if each["event"] == "request ended"}

    # The end of a request is logged after its caller has the answer.
    assert await settles(lambda: {"by None", "by large"} <= ended().keys(), True)
    loaded = [(each["adapter"], each["path"]) for each in said() if each["event"] == "adapter loaded"]
    assert loaded == [(folder.name, str(folder)) for folder in adapted]
    assert (ended()["by None"], ended()["by large"]) == (None, "large")
