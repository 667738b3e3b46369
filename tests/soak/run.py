"""`make soak`: real services under a mixed load in which callers leave, services are killed and requests are bad.

Two preprocessing and two encoder replicas serve one generation; killing a replica must not fail a request.

    calm       every fixed question once, one after another, to learn its answer
    storm      the load, with a service killed every now and then        60 % of the time
    steady     the load alone: memory must be flat                       40 %
    silence    no requests: all resources must be free again

Prints a report as JSON. Exits with status 1 if a request was lost or ended wrongly, resources leaked, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from gridsieve.cli.signals import unwind_on_signals
from gridsieve.client.client import GridsieveClient
from gridsieve.common.checkpoint import DEMO_MODEL
from tests.integration.fleet import Service, at_rest
from tests.soak.faults import Faults, growth
from tests.soak.ledger import Ledger
from tests.soak.load import Load
from tests.soak.questions import Questions

STORM = 0.6
AT_MOST_GROWTH = 1.08
SETTLE_S = 10.0
# Small, so that requests compete for room and caches are full before memory is measured.
FLAGS = {
    "preprocessing": ["--inflight-bytes", str(8 * 2**20)],
    "encoder": ["--cache-bytes", str(2 * 2**20)],
    "generation": ["--kv-cache-tokens", "4096", "--max-num-seqs", "8", "--max-waiting-requests", "16"],
}


@dataclass(frozen=True, slots=True)
class Report:
    """faults: descriptions of all that went wrong; growth: ratio of memory under steady load, by service."""

    seconds: float
    seed: int
    asked: int
    lost: int
    outcomes: dict[str, dict[str, int]]
    killed: dict[str, int]
    growth: dict[str, float]
    faults: list[str]


async def soak(seconds: float, seed: int, clients: int, kill_every_s: float) -> Report:
    random, start_s = Random(seed), time.monotonic()
    questions, ledger = Questions(random), Ledger()
    with _running() as services:
        faults = Faults(services, random)
        async with GridsieveClient(services[-1].address) as client:
            load = Load(client, questions, ledger, faults, random)
            for question in questions.fixed():
                await load.ask(question)
            sampling = asyncio.create_task(faults.sample())
            wrong = await load.during(_storm_then_steady(faults, seconds, kill_every_s), clients)
            sampling.cancel()
        try:
            await at_rest(services, SETTLE_S)
        except AssertionError as still:
            wrong.append(f"still held without requests: {still}")
        wrong = [*ledger.faults, *faults.ended, *wrong]
        wrong += [f"{count} × {words}" for words, count in Counter(_errors_logged(services)).items()]
    grown = {f"{each.name} {each.address}": growth(faults.memory_bytes[at]) for at, each in enumerate(services)}
    wrong += [f"{service}: memory grew {by:.3f} times" for service, by in grown.items() if by > AT_MOST_GROWTH]
    if ledger.lost:
        wrong.append(f"{ledger.lost} requests were lost")
    by_kind: dict[str, dict[str, int]] = {}
    for (kind, outcome), count in sorted(ledger.outcomes.items()):
        by_kind.setdefault(kind, {})[outcome] = count
    killed = dict(faults.killed)
    return Report(time.monotonic() - start_s, seed, ledger.asked, ledger.lost, by_kind, killed, grown, wrong)


async def _storm_then_steady(faults: Faults, seconds: float, kill_every_s: float) -> None:
    await faults.kill_for(STORM * seconds, kill_every_s)
    for samples in faults.memory_bytes:
        samples.clear()
    await asyncio.sleep((1 - STORM) * seconds)


@contextmanager
def _running() -> Iterator[list[Service]]:
    """Two preprocessing services, two encoders, and generation, which comes last."""
    with tempfile.TemporaryDirectory(prefix="gridsieve-soak-") as folder, ExitStack() as running:

        def service(name: str, **upstream: str) -> Service:
            addresses = tuple(word for name, address in upstream.items() for word in (f"--{name}", address))
            made = Service(name, DEMO_MODEL, Path(folder), (*FLAGS[name], *addresses), alone=True)
            running.callback(made.close)
            made.start()
            return made

        preprocessing = [service("preprocessing") for _ in range(2)]
        first = ",".join(each.address for each in preprocessing)
        encoders = [service("encoder", preprocessing=first) for _ in range(2)]
        second = ",".join(each.address for each in encoders)
        services = [*preprocessing, *encoders, service("generation", preprocessing=first, encoder=second)]
        for each in services:
            each.ready()
        yield services


def _errors_logged(services: Sequence[Service]) -> Iterator[str]:
    """Errors of their own that services logged, without request ids."""
    for service in services:
        for line in service.log().splitlines():
            logged = json.loads(line) if line.startswith("{") else {}
            if logged.get("level") in ("error", "critical"):
                where = str(logged.get("exception", "")).strip().splitlines()[-3:]
                yield f"{service.name} logged {logged['event']}: {logged.get('error', '')} {' '.join(where)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=12, help="requests at a time")
    parser.add_argument("--kill-every-s", type=float, default=15.0, help="on average, while services are killed")
    args = parser.parse_args()
    unwind_on_signals()
    report = asyncio.run(soak(60 * args.minutes, args.seed, args.clients, args.kill_every_s))
    print(json.dumps(asdict(report), indent=2))
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
