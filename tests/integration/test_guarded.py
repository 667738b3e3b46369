"""Three real processes that answer nobody whom they do not know: mutual TLS and tokens on every hop, and budgets."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from typer.testing import CliRunner

from common.channels import open_channel
from common.contract import errors
from common.contract.retention import Pruning
from common.process import free_port
from framesieve.__main__ import app
from framesieve.cli.inspection import inspect_media
from framesieve.cli.launcher import SERVICES, Endpoint, LocalStack
from framesieve.client.answer import Accepted, Answer, Delta, Progress
from framesieve.client.client import FramesieveClient
from framesieve.client.credentials import credentials_of
from framesieve.client.encoding import encode
from framesieve.client.prompt import Video
from tests import media
from tests.certificates import Authority
from tests.integration.conftest import settles
from tests.integration.guarded_stack import (
    MALLORY,
    MAX_BYTES,
    MAX_REQUESTS,
    Guarded,
    flags_of,
    made_secrets,
    probing,
)

CLIP = media.clip(16, fps=4, seed=50)


def clip_of(size_bytes: int) -> Video:
    """The clip with so many bytes in all, of which players pass over the last."""
    more = size_bytes - len(CLIP)
    return Video(data=CLIP + more.to_bytes(4, "big") + b"free" + bytes(more - 8))


LARGE = clip_of(MAX_BYTES * 2 // 3)


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    secrets, tokens = made_secrets(tmp_path_factory.mktemp("guarded"))
    endpoints = {service: Endpoint(f"127.0.0.1:{free_port()}", free_port()) for service in SERVICES}
    stack = LocalStack(
        checkpoint, endpoints=endpoints, flags={service: flags_of(service, secrets) for service in SERVICES}
    )
    with pytest.MonkeyPatch.context() as environment:
        for name, value in probing(secrets).items():
            environment.setenv(name, value)
        stack.start()
    try:
        yield Guarded(stack, secrets, tokens)
    finally:
        stack.end_at_once()
        stack.stop()


@pytest.fixture
async def alice(guarded: Guarded) -> AsyncIterator[FramesieveClient]:
    async with guarded.client("alice") as connected:
        yield connected


async def test_a_question_about_a_clip_is_answered_by_mutual_tls_and_tokens_on_every_hop(
    alice: FramesieveClient,
) -> None:
    answer = await alice.ask(Video(data=CLIP), "What moves?", pruning_rate=0.5, max_new_tokens=8, timeout_s=60)
    assert answer.usage.completion_tokens >= 1
    assert answer.usage.media[0].kept_tokens < answer.usage.media[0].grid.tokens
    assert (await alice.ask(None, "Nothing to see?", max_new_tokens=4, timeout_s=60)).text is not None


@pytest.mark.parametrize(("name", "shown"), [("alice", {"token": None}), ("mallory", {}), ("generation", {})])
async def test_who_shows_no_token_of_this_service_is_refused(
    guarded: Guarded, name: str, shown: dict[str, None]
) -> None:
    async with guarded.client(name, **shown) as client:
        with pytest.raises(errors.Unauthenticated, match="a bearer token that is known here"):
            await client.ask(Video(data=CLIP), "What moves?", timeout_s=20)


@pytest.mark.parametrize("missing", [("tls_cert", "tls_key"), ("tls_ca", "tls_cert", "tls_key")])
async def test_who_shows_no_certificate_or_speaks_no_tls_reaches_nobody(
    guarded: Guarded, missing: tuple[str, ...]
) -> None:
    async with guarded.client("alice", **dict.fromkeys(missing)) as client:
        with pytest.raises(errors.Unavailable):
            await client.ask(None, "Anybody there?", timeout_s=20)


async def test_the_services_behind_take_their_own_callers_tokens_alone(guarded: Guarded) -> None:
    addresses = guarded.stack.addresses
    # Of a call that is refused while it is written to, gRPC loses the status now and then.
    with pytest.raises((errors.Unauthenticated, errors.Unavailable)):
        await encode(addresses["encoder"], Video(data=CLIP), **guarded.access("alice"))
    seen = await inspect_media(
        addresses["preprocessing"],
        addresses["encoder"],
        Video(data=CLIP),
        Pruning(0.5),
        **guarded.access("inspector"),
    )
    assert seen.kept.size < seen.plan.grid.tokens


async def test_one_client_at_its_limit_costs_another_nothing(guarded: Guarded, alice: FramesieveClient) -> None:
    held = [alice.stream(Video(data=CLIP), "Describe it.", max_new_tokens=900, ignore_eos=True) for _ in range(2)]
    assert all([isinstance(await anext(stream), Accepted) for stream in held])
    with pytest.raises(
        errors.Overloaded, match=f"alice has 2 requests running, --max-requests-per-client is {MAX_REQUESTS}"
    ):
        await alice.ask(None, "And I?", timeout_s=20)
    async with guarded.client("bob") as bob:
        assert (await bob.ask(None, "And I?", max_new_tokens=4, timeout_s=60)).usage.completion_tokens
    for stream in held:
        await stream.aclose()
    await has_its_budget_again(alice)


async def test_one_clients_bytes_are_bounded_and_another_has_as_many(guarded: Guarded, alice: FramesieveClient) -> None:
    limit = f"--max-bytes-per-client is {MAX_BYTES}$"
    with pytest.raises(errors.InvalidRequest, match=limit):
        await alice.ask(clip_of(MAX_BYTES), "What moves?", timeout_s=20)
    held = alice.stream(LARGE, "Describe it.", max_new_tokens=900, ignore_eos=True)
    assert isinstance(await anext(held), Accepted)
    with pytest.raises(errors.Overloaded, match=rf"^alice has requests of \d+ bytes running .* {limit}"):
        await alice.ask(LARGE, "And this?", timeout_s=20)
    async with guarded.client("bob") as bob:
        assert (await bob.ask(LARGE, "And I?", max_new_tokens=4, timeout_s=60)).usage.completion_tokens
    assert (await alice.ask(Video(data=CLIP), "And less?", max_new_tokens=4, timeout_s=60)).usage.completion_tokens
    await held.aclose()
    await has_its_budget_again(alice)


async def has_its_budget_again(client: FramesieveClient) -> None:
    """Of requests and of bytes. What has ended is known to the service a moment later."""
    async with asyncio.timeout(20):
        while True:
            asked = [client.ask(each, "And now?", max_new_tokens=1) for each in (LARGE, *[None] * (MAX_REQUESTS - 1))]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            if all(isinstance(each, Answer) for each in answers):
                return
            assert all(isinstance(each, Answer | errors.Overloaded) for each in answers), answers
            await asyncio.sleep(0.05)


async def test_a_certificate_that_is_replaced_is_shown_to_whoever_connects_next(
    guarded: Guarded, alice: FramesieveClient, tmp_path: Path
) -> None:
    running = alice.stream(Video(data=CLIP), "Describe it.", max_new_tokens=900, ignore_eos=True)
    assert isinstance(await anext(running), Accepted)
    other, own = Authority(tmp_path), guarded.secrets / "generation"
    before = {name: (own / name).read_bytes() for name in ("key.pem", "cert.pem")}
    issued = other.issue("127.0.0.1")
    try:
        (own / "key.pem").write_bytes(issued.key.read_bytes())
        (own / "cert.pem").write_bytes(issued.cert.read_bytes())
        async with guarded.client("bob", tls_ca=str(other.path)) as bob:
            assert (await bob.ask(None, "And now?", max_new_tokens=4, timeout_s=60)).usage.completion_tokens
    finally:
        for name, pem in before.items():
            (own / name).write_bytes(pem)
    async with guarded.client("bob") as bob:
        assert (await bob.ask(None, "And again?", max_new_tokens=4, timeout_s=60)).usage.completion_tokens
    assert isinstance(await anext(running), Progress | Delta)  # who was there is still answered
    await running.aclose()


async def test_reflection_answers_who_is_known_and_nobody_where_it_is_switched_off(guarded: Guarded) -> None:
    async def services_at(name: str, caller: str) -> list[str]:
        credentials = credentials_of(guarded.access(caller))
        async with open_channel(guarded.stack.addresses[name], credentials) as channel:
            # As one request: of a refused call that is written to, gRPC loses the status now and then.
            reflect = channel.unary_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
            answer = await reflect(request, metadata=credentials.metadata, timeout=20).read()
            return [each.name for each in answer.list_services_response.service]

    assert "framesieve.v1.EncoderService" in await services_at("encoder", "inspector")
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await services_at("generation", "alice")
    assert info.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_metrics_are_told_by_tls_where_that_is_said(guarded: Guarded) -> None:
    ports = guarded.stack.metrics_ports
    own = guarded.secrets / "alice"
    trusting = ssl.create_default_context(cafile=own / "ca.pem")
    trusting.load_cert_chain(own / "cert.pem", own / "key.pem")
    for url in (f"https://127.0.0.1:{ports['generation']}/metrics", f"http://127.0.0.1:{ports['encoder']}/metrics"):
        with urllib.request.urlopen(url, context=trusting if url.startswith("https") else None, timeout=20) as answer:
            assert b"framesieve_requests_total" in answer.read()


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("FRAMESIEVE_")}
    return subprocess.run(
        [sys.executable, "-m", *arguments], env={**own, **environment}, capture_output=True, text=True, timeout=60
    )


def test_the_command_shows_what_its_flags_and_environment_say(guarded: Guarded, tmp_path: Path) -> None:
    clip, own = tmp_path / "clip.mp4", guarded.secrets / "alice"
    clip.write_bytes(CLIP)
    asked = ["ask", str(clip), "What moves?", "--server", guarded.stack.address, "--json", "--max-new-tokens", "4"]
    shown = ["--tls-ca", f"{own}/ca.pem", "--tls-cert", f"{own}/cert.pem", "--tls-key", f"{own}/key.pem"]
    framesieve = CliRunner()
    by_flags = framesieve.invoke(app, [*asked, *shown, "--token-file", f"{own}/token"])
    assert by_flags.exit_code == 0, by_flags.stderr
    assert json.loads(by_flags.stdout)["usage"]["completion_tokens"] >= 1
    environment = probing(guarded.secrets)
    stranger = framesieve.invoke(app, asked, env={**environment, "FRAMESIEVE_TOKEN": MALLORY})
    assert (stranger.exit_code, stranger.stderr.split(":")[0]) == (1, "UNAUTHENTICATED")
    by_environment = framesieve.invoke(app, asked, env={**environment, "FRAMESIEVE_TOKEN": guarded.tokens["bob"]})
    assert by_environment.exit_code == 0, by_environment.stderr


def test_bench_and_inspect_show_it_as_well(guarded: Guarded, tmp_path: Path) -> None:
    clip, environment = tmp_path / "clip.mp4", probing(guarded.secrets)
    clip.write_bytes(CLIP)
    framesieve, addresses = CliRunner(), guarded.stack.addresses
    load = ["bench", "--server", guarded.stack.address, "--requests", "2", "--clients", "1", "--warmup", "0"]
    measured = framesieve.invoke(
        app, [*load, "--max-new-tokens", "2"], env={**environment, "FRAMESIEVE_TOKEN": guarded.tokens["alice"]}
    )
    assert measured.exit_code == 0, measured.output
    assert "2 answered, 0 failed" in measured.stdout
    both = ["--preprocessing", addresses["preprocessing"], "--encoder", addresses["encoder"]]
    drawn = framesieve.invoke(
        app,
        ["inspect", str(clip), *both, "-o", str(tmp_path / "kept.png")],
        env={**environment, "FRAMESIEVE_TOKEN": guarded.tokens["inspector"]},
    )
    assert drawn.exit_code == 0, drawn.output


def test_the_probe_finds_a_service_well_by_tls_and_without_a_token(guarded: Guarded) -> None:
    assert run(["common.serving.probe", guarded.stack.address], **probing(guarded.secrets)).returncode == 0
    assert run(["common.serving.probe", guarded.stack.address]).returncode == 1


async def test_logs_know_clients_by_name_and_hold_no_token(guarded: Guarded, alice: FramesieveClient) -> None:
    with pytest.raises(errors.InvalidRequest):
        await alice.ask(None, "?", temperature=-1)

    def told() -> bool:
        lines = [json.loads(line) for line in guarded.stack.log("generation").splitlines() if line.startswith("{")]
        refused = {(line.get("client"), line.get("reason")) for line in lines}
        return {("alice", "INVALID_REQUEST"), (None, "UNAUTHENTICATED")} <= refused

    assert await settles(told, True)
    for service in SERVICES:
        log = guarded.stack.log(service)
        assert '"tls": "mutual", "tokens": true' in log
        assert not [name for name, token in guarded.tokens.items() if token in log]


def test_a_process_that_cannot_be_guarded_as_it_is_told_does_not_start() -> None:
    ended = run(["services.preprocessing", "--metrics-port", "0", "--tls-cert", "/missing.pem"])
    assert ended.returncode == 2
    assert ended.stderr == "cannot start: --tls-cert /missing.pem needs --tls-key, which is not set\n"
