"""Qwen3-Omni through real processes: answers about sounds and clips with their sound, whole and pruned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gridsieve.client.client import GridsieveClient
from tests.integration.fleet import running
from tests.integration.test_sound import check_answers, check_pruned

FAMILY = "qwen3_omni_moe"


# What is end to end here, Qwen2.5-Omni covers; tests of preprocessing and of the encoder cover what differs.
@pytest.mark.deep
async def test_answers_about_sounds_and_clips_are_those_of_transformers_and_obey_the_law(
    checkpoints: Callable[[str], Path],
) -> None:
    folder = checkpoints(FAMILY)
    with running(folder) as stack:
        async with GridsieveClient(stack.address) as client:
            await check_answers(FAMILY, folder, stack, client)
            await check_pruned(FAMILY, folder, stack, client)
