"""Services as real processes, started once a session: one stack, and a fleet that tests may kill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.checkpoint import TINY, write_checkpoint
from gridsieve.client.client import GridsieveClient
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.v1 import generation_pb2_grpc
from tests import media
from tests.adapters import write_adapter
from tests.families import load_reference
from tests.gridsieve.films import FakeEmbedder
from tests.integration.collector import Collector, collecting
from tests.integration.fleet import (
    TIMED,
    Fleet,
    Service,
    Stack,
    exported,
    media_port,
    metric_in,
    running,
    started,
    until,
)
from tests.integration.gateway import Gateway, gateway
from tests.integration.load import is_answered_soon
from tests.scripted import write_scripted
from tests.served import served

LOCALHOST = "localhost=127.0.0.0/8,localhost=::1"
UNCOMPILED = ("--compile", "off")  # half a minute of processor time
DECODE_MEMORY_BYTES = 192 * 2**20
FETCH_MAX_BYTES = 1_000_000
UPLOAD_MAX_BYTES = 1_000_000
# Of the generation service of `stack` and of `door`.
MAX_INLINE_BYTES = 8 * 2**20
DRAIN_S = 2.0
SHORT_DRAIN_S = 1.0
# The adapter that changes the tower, too.
SEEING = "seeing"
SERVED_NAME, OTHER_NAME = "traffic-7b", "city/traffic"
# The long clip: 128 slices of 16 tokens, 64 float32 values each. An encoder of the fleet has room for one at a time.
LONG_ITEM_BYTES = 128 * 16 * 64 * 4


@pytest.fixture(scope="session")
def media_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clip, clip.mp4."""
    folder = tmp_path_factory.mktemp("media")
    (folder / "clip.mp4").write_bytes(media.clip())
    return folder


@pytest.fixture(scope="session")
def upload_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the stack and of `door`."""
    return tmp_path_factory.mktemp("uploads")


@contextmanager
def another_generation(
    stack: Stack, model: Path, folder: Path, *flags: str, program: str | None = None
) -> Iterator[Service]:
    """Generation with other flags, behind the preprocessing and the encoder of a stack. folder: of its log."""
    service = Service("generation", model, folder, (*flags, *upstream_of(stack)), program=program)
    with started(service):
        yield service


def upstream_of(stack: Stack) -> Iterator[str]:
    """The flags of a service that calls the preprocessing and the encoder of a stack."""
    for name in ("preprocessing", "encoder"):
        yield from (f"--{name}", stack.addresses[name])


@pytest.fixture(scope="session")
def adapted(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Any]:
    """The adapters of `stack`: from folder, which is named like the adapter, to the whole model with it in PEFT."""
    folder, reference = tmp_path_factory.mktemp("adapters"), load_reference("qwen2_5_vl", tiny_checkpoint)
    targets = {
        "small": r".*language_model.*\.(q|v)_proj",
        "large": r".*language_model.*_proj",
        SEEING: r".*language_model.*\.(q|v)_proj|.*visual\..*(qkv|_proj|mlp\.[02])",
    }
    return {
        folder / name: write_adapter(reference, folder / name, seed, target_modules=target)
        for seed, (name, target) in enumerate(targets.items())
    }


@pytest.fixture(scope="session")
def stack(
    tiny_checkpoint: Path,
    media_root: Path,
    upload_root: Path,
    adapted: dict[Path, Any],
    fetch_port: int,
    collector: Collector,
) -> Iterator[Stack]:
    """The three services with adapters and small limits of decoding and fetching. Tests leave them idle.

    They send their spans to the collector. One worker decodes. Of loopback, only the name localhost may be fetched
    from; elsewhere only public addresses.
    """
    preprocessing = ["--decode-workers", "1", "--decode-memory-bytes", str(DECODE_MEMORY_BYTES)]
    preprocessing += ["--allow-media-domain", LOCALHOST, "--allow-media-domain", "*"]
    preprocessing += ["--upload-root", str(upload_root)]
    preprocessing += ["--fetch-ports", f"80,{fetch_port}", "--fetch-max-bytes", str(FETCH_MAX_BYTES)]
    adapters = [f"{folder.name}={folder}" for folder in adapted]
    generation = ["--kv-cache-tokens", "2048", "--adapters", ",".join(adapters)]
    generation += ["--max-inline-bytes", str(MAX_INLINE_BYTES)]
    encoder = ["--adapters", next(each for each in adapters if each.startswith(SEEING))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("GRIDSIEVE_SERVED_MODEL_NAME", f"{SERVED_NAME},{OTHER_NAME}")
        flags = {"preprocessing": preprocessing, "encoder": encoder, "generation": generation}
        with running(tiny_checkpoint, media_root=media_root, flags=flags) as stack:
            patch.undo()  # services that start later send no spans and have the name of their folder
            yield stack


@pytest.fixture(scope="session")
def live_stack(stack: Stack, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack with a generation service that holds live sessions. Tests leave it running and idle."""
    flags = ("--kv-cache-tokens", "16384", "--live-tokens", "8192")
    with another_generation(stack, tiny_checkpoint, tmp_path_factory.mktemp("live"), *flags) as generation:
        yield Stack({**stack.services, "generation": generation})


@pytest.fixture(scope="session")
def live_door(live_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(live_stack.address, tmp_path_factory.mktemp("door")) as started:
        yield started


@pytest.fixture(scope="session")
def demo(fetch_port: int) -> Iterator[Stack]:
    """The three services with the embedded model, and room for live sessions."""
    flags = {
        "preprocessing": ("--fetch-ports", str(fetch_port), "--allow-media-domain", LOCALHOST),
        "encoder": UNCOMPILED,
        "generation": ("--kv-cache-tokens", "16384", "--live-tokens", "12288", *UNCOMPILED),
    }
    with running(DEMO_MODEL, flags=flags) as stack:
        yield stack


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The three services with a model that calls two tools, whatever it is asked."""
    with running(write_scripted(tmp_path_factory.mktemp("scripted"))) as stack:
        yield stack


@pytest.fixture(scope="session")
def scripted_door(scripted: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(scripted.address, tmp_path_factory.mktemp("tools")) as started:
        yield started


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[GridsieveClient]:
    async with GridsieveClient(stack.address) as connected:
        yield connected


@pytest.fixture(scope="session")
def door(stack: Stack, media_root: Path, upload_root: Path) -> Iterator[Gateway]:
    """A gateway before the stack, which takes uploads."""
    flags = ["--upload-root", str(upload_root), "--upload-max-bytes", str(UPLOAD_MAX_BYTES)]
    flags += ["--max-inline-bytes", str(MAX_INLINE_BYTES)]
    with gateway(stack.address, media_root, *flags) as started:
        yield started


@pytest.fixture(scope="session")
def drawing_door(stack: Stack, media_root: Path, upload_root: Path) -> Iterator[Gateway]:
    """A gateway before the stack that tells kept tokens, and takes uploads up to the default limit."""
    flags = ("--encoder", stack.addresses["encoder"], "--upload-root", str(upload_root))
    with gateway(stack.address, media_root, *flags) as started:
        yield started


@pytest.fixture(scope="session")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a hand-written embedder."""
    with served(
        lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(FakeEmbedder(), server),
        f"unix:{tmp_path_factory.mktemp('embedder')}/embedder.sock",
    ) as address:
        yield address


@pytest.fixture
def http(door: Gateway) -> Iterator[httpx.Client]:
    with door.http() as client:
        yield client


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def fetch_port() -> int:
    return media_port()


@pytest.fixture
async def fleet(fleet_of_all_tests: Fleet) -> Fleet:
    """With the first replica of each service running and answering."""
    ended = [each for each in fleet_of_all_tests.first if not each.running]
    if ended:
        await asyncio.to_thread(fleet_of_all_tests.start, *ended)
        async with GridsieveClient(fleet_of_all_tests.generation.address) as client:
            await is_answered_soon(client)
    return fleet_of_all_tests


@pytest.fixture
async def fleet_client(fleet: Fleet) -> AsyncIterator[GridsieveClient]:
    async with GridsieveClient(fleet.generation.address) as connected:
        yield connected


@pytest.fixture(scope="session")
def fleet_of_all_tests(tmp_path_factory: pytest.TempPathFactory, fetch_port: int) -> Iterator[Fleet]:
    """Slow on purpose: a large tower that encodes one slice at a time, and prompts prefilled in small chunks.

    The second replica of each service has a short grace period to drain in. All print the names of slow callbacks.
    """
    folder = tmp_path_factory.mktemp("fleet")
    sizes = {"tower_hidden": 256, "tower_intermediate": 1024, "tower_depth": 6, "full_attention_blocks": (5,)}
    model = write_checkpoint(folder / "model", replace(TINY, **sizes), seed=1)  # type: ignore[arg-type]

    def two(name: str, *flags: str) -> tuple[Service, Service]:
        return one(name, *flags), one(name, *flags, "--drain-s", str(SHORT_DRAIN_S))

    def one(name: str, *flags: str) -> Service:
        return Service(name, model, folder, flags, program=TIMED.format(name=name))

    def addresses(services: tuple[Service, Service]) -> str:
        return ",".join(each.address for each in services)

    fetching = ("--fetch-ports", str(fetch_port), "--allow-media-domain", LOCALHOST)
    preprocessing = two("preprocessing", "--decode-workers", "2", "--media-root", str(folder), *fetching)
    upstream: tuple[str, ...] = ("--preprocessing", addresses(preprocessing), "--threads", "1")
    encoder = two(
        "encoder", *upstream, "--batch-tokens", "16", "--output-buffer-bytes", str(LONG_ITEM_BYTES), *UNCOMPILED
    )
    upstream = (*upstream, "--encoder", addresses(encoder), "--drain-s", str(DRAIN_S))
    upstream = (*upstream, "--kv-cache-tokens", "17408", "--live-tokens", "1024")
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16")
    generation = one("generation", *upstream, *flags)
    made = Fleet(preprocessing, encoder, generation, fetch_port)
    try:
        yield made
    finally:
        for each in (*preprocessing, *encoder, generation):
            each.close()


def metric(stack: Stack, service: str, name: str, **labels: str) -> float:
    """`metric_in` of a service of the stack."""
    return metric_in(exported(stack.metrics_ports[service]), name, **labels)


async def idle(stack: Stack) -> None:
    """Returns once no request runs. A request is counted as ended only after its caller has the answer."""
    await until(lambda: not any(metric(stack, each, "gridsieve_requests_running") for each in stack.metrics_ports))
