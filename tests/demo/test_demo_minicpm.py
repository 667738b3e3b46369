"""The rules that are compared for a resampler's tokens keep equally many, and `groups` the groups that change most."""

from __future__ import annotations

import pytest
import torch

from demo.minicpm import GROUPS, QUERIES, RATES, keep, keep_groups
from framesieve.common.contract.retention import EVS, RANDOM


@pytest.mark.parametrize("rate", RATES)
def test_every_rule_keeps_as_many_tokens(rate: float) -> None:
    embeds = torch.randn(GROUPS * QUERIES, 8, generator=torch.Generator().manual_seed(0))
    counts = {len(keep(embeds, rule, rate, seed=1).unique()) for rule in (EVS, "groups", RANDOM)}
    assert counts == {int(GROUPS * QUERIES * (1 - rate)) // QUERIES * QUERIES}


def test_groups_that_change_most_are_kept_whole() -> None:
    groups = torch.ones(GROUPS, QUERIES, 4)
    groups[5:, 0, 0] = -1.0  # one token changes at group 5
    groups[9:, 2:] = -1.0  # most at group 9
    kept = keep_groups(groups.flatten(0, 1), 3)
    assert kept.tolist() == [group * QUERIES + query for group in (0, 5, 9) for query in range(QUERIES)]
