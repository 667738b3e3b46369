"""`python -m tests.common.refusing_peer ADDRESS METHOD [PLAN]`: a service that refuses every call.

It refuses unread calls or, with the message of a plan in hexadecimal, calls that have received their plan.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from gridsieve.common.contract.errors import Overloaded
from gridsieve.common.serving.status import DETAILS_KEY, status_details
from tests.common.loopback import speaking

REFUSAL = Overloaded("alice has 2 requests running, 2 are allowed", retry_after_s=2.5)


async def main(address: str, method: str, plan: str = "") -> None:
    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        if plan:
            await anext(requests)
            yield bytes.fromhex(plan)
        details = ((DETAILS_KEY, status_details(REFUSAL).SerializeToString()),)
        await context.abort(grpc.StatusCode[REFUSAL.status], str(REFUSAL), details)

    async with speaking(address, {method: refuse}):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
