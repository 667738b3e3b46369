"""Quotas of clients by themselves: never exceeded, and nothing is remembered once nothing runs."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contract.errors import InvalidRequest, Overloaded
from common.security.quotas import Charge, ClientQuotas

MAX_REQUESTS, MAX_BYTES = 2, 10
CLIENTS = st.sampled_from(["alice", "bob"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), CLIENTS),
        st.tuples(st.just("charge"), st.integers(0, 9), st.integers(0, 12)),
        st.tuples(st.just("end"), st.integers(0, 9)),
    ),
    max_size=40,
)


class Running:
    """A running request of the model, and the bytes counted for it."""

    def __init__(self, client: str, context: ExitStack, charge: Charge) -> None:
        self.client, self.context, self.charge, self.size_bytes = client, context, charge, 0


@given(STEPS)
def test_a_client_gets_exactly_what_its_quota_leaves(steps: list[tuple[Any, ...]]) -> None:
    quotas = ClientQuotas(MAX_REQUESTS, MAX_BYTES)
    running: list[Running] = []
    for kind, *arguments in steps:
        requests: dict[str, int] = defaultdict(int)
        held: dict[str, int] = defaultdict(int)
        for each in running:
            requests[each.client] += 1
            held[each.client] += each.size_bytes
        assert quotas.clients == len(requests)
        if kind == "begin":
            (client,) = arguments
            context = ExitStack()
            if requests[client] == MAX_REQUESTS:
                with pytest.raises(Overloaded, match=f"{client} has 2 requests"):
                    context.enter_context(quotas.request(client))
                continue
            running.append(Running(client, context, context.enter_context(quotas.request(client))))
        elif running:
            one = running[arguments[0] % len(running)]
            if kind == "end":
                one.context.close()
                running.remove(one)
            elif one.size_bytes + arguments[1] > MAX_BYTES:
                with pytest.raises(InvalidRequest, match=f"has {one.size_bytes + arguments[1]} bytes"):
                    one.charge(arguments[1])
            elif held[one.client] + arguments[1] > MAX_BYTES:
                with pytest.raises(Overloaded, match="to add"):
                    one.charge(arguments[1])
            else:
                one.charge(arguments[1])
                one.size_bytes += arguments[1]
    for each in running:
        each.context.close()
    assert quotas.clients == 0


def test_without_limits_everything_is_admitted() -> None:
    quotas = ClientQuotas()
    with ExitStack() as context:
        for _ in range(1000):
            context.enter_context(quotas.request("alice"))(2**40)
        assert quotas.clients == 1
    assert quotas.clients == 0
