"""Three real processes guarded as docs/security.md says: mutual TLS and tokens on every hop, and quotas by client.

They run the embedded model, which gives the right answers to the questions of the demo.
"""

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
from demo.example import CLIP, QUESTIONS
from demo.questions import Question
from framesieve.__main__ import app
from framesieve.cli.inspection import inspect_media
from framesieve.cli.launcher import SERVICES, Endpoint, LocalStack
from framesieve.client.answer import Accepted, Answer
from framesieve.client.client import FramesieveClient
from framesieve.client.credentials import credentials_of
from framesieve.client.encoding import encode
from framesieve.client.prompt import Message, Text, Video
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


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    secrets, tokens = made_secrets(tmp_path_factory.mktemp("guarded"))
    endpoints = {service: Endpoint(f"127.0.0.1:{free_port()}", free_port()) for service in SERVICES}
    stack = LocalStack(
        media_root=CLIP.parent, endpoints=endpoints, flags={service: flags_of(service, secrets) for service in SERVICES}
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


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.kind)
@pytest.mark.parametrize("rate", [0.0, 0.75])
async def test_the_questions_of_the_demo_are_answered_correctly_over_mutual_tls(
    alice: FramesieveClient, question: Question, rate: float
) -> None:
    answer = await alice.ask(CLIP, question.text, pruning_rate=rate)
    assert answer.text == question.answer
    # 16 s at 2 frames a second are 16 slices of two.
    (item,) = answer.usage.media
    assert item.grid.t == 16
    assert item.kept_tokens == int(item.grid.tokens * (1 - rate))
    assert not item.first_slice_only


async def test_a_clip_on_the_server_and_the_next_turn_are_answered(alice: FramesieveClient) -> None:
    first, second = QUESTIONS
    answer = await alice.ask(Video(server_path=CLIP.name), first.text, pruning_rate=0.75)
    assert answer.text == first.answer
    history = [Message("user", (Video(CLIP), Text(first.text))), Message("assistant", (Text(first.answer),))]
    answer = await alice.ask(None, second.text, history=history, pruning_rate=0.5, max_new_tokens=24)
    assert answer.usage.media[0].grid.t == 16
    assert answer.text


@pytest.mark.parametrize(("name", "shown"), [("alice", {"token": None}), ("mallory", {}), ("generation", {})])
async def test_a_caller_without_a_token_of_the_service_is_refused(
    guarded: Guarded, name: str, shown: dict[str, None]
) -> None:
    async with guarded.client(name, **shown) as client:
        with pytest.raises(errors.Unauthenticated, match="the call needs a known bearer token"):
            await client.ask(Video(CLIP), "What moves?", timeout_s=20)


@pytest.mark.parametrize("missing", [("tls_cert", "tls_key"), ("tls_ca", "tls_cert", "tls_key")])
async def test_a_caller_without_a_certificate_or_without_tls_is_not_let_in(
    guarded: Guarded, missing: tuple[str, ...]
) -> None:
    async with guarded.client("alice", **dict.fromkeys(missing)) as client:
        with pytest.raises(errors.Unavailable):
            await client.ask(None, "Anybody there?", timeout_s=20)


async def test_a_token_of_generation_is_no_token_of_the_services_behind_it(guarded: Guarded) -> None:
    addresses = guarded.stack.addresses
    # gRPC sometimes loses the status of a call that is refused while the caller still writes.
    with pytest.raises((errors.Unauthenticated, errors.Unavailable)):
        await encode(addresses["encoder"], Video(CLIP), **guarded.access("alice"))
    seen = await inspect_media(
        addresses["preprocessing"],
        addresses["encoder"],
        Video(CLIP),
        Pruning(0.5),
        **guarded.access("inspector"),
    )
    assert seen.kept.size < seen.plan.grid.tokens


async def test_a_client_at_its_quota_is_refused_and_another_is_not(guarded: Guarded, alice: FramesieveClient) -> None:
    held = [alice.stream(Video(CLIP), "Describe it.", max_new_tokens=900, ignore_eos=True) for _ in range(2)]
    assert all([isinstance(await anext(stream), Accepted) for stream in held])
    with pytest.raises(
        errors.Overloaded, match=f"alice has 2 requests running, --max-requests-per-client is {MAX_REQUESTS}"
    ):
        await alice.ask(None, "And I?", timeout_s=20)
    async with guarded.client("bob") as bob:
        assert (await bob.ask(None, "And I?", max_new_tokens=4, timeout_s=60)).usage.completion_tokens
    for stream in held:
        await stream.aclose()
    await has_its_quota_again(alice)
    with pytest.raises(errors.InvalidRequest, match=f"--max-bytes-per-client is {MAX_BYTES}$"):
        await alice.ask(Video(data=bytes(MAX_BYTES)), "And this?", timeout_s=20)


async def has_its_quota_again(client: FramesieveClient) -> None:
    """Asks until as many requests as allowed run at once. The service notices the end of a call a moment later."""
    async with asyncio.timeout(20):
        while True:
            asked = [client.ask(None, "And now?", max_new_tokens=1) for _ in range(MAX_REQUESTS)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            if all(isinstance(each, Answer) for each in answers):
                return
            assert all(isinstance(each, Answer | errors.Overloaded) for each in answers), answers
            await asyncio.sleep(0.05)


async def test_reflection_needs_a_token_and_can_be_switched_off(guarded: Guarded) -> None:
    async def services_at(name: str, caller: str) -> list[str]:
        credentials = credentials_of(guarded.access(caller))
        async with open_channel(guarded.stack.addresses[name], credentials) as channel:
            # A unary request: gRPC sometimes loses the status of a call that is refused while the caller still writes.
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


def test_metrics_are_served_over_tls_where_the_flag_says_so(guarded: Guarded) -> None:
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


def test_the_command_takes_credentials_from_flags_or_the_environment(guarded: Guarded) -> None:
    own = guarded.secrets / "alice"
    asked = ["ask", str(CLIP), "What moves?", "--server", guarded.stack.address, "--json", "--max-new-tokens", "4"]
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


def test_bench_and_inspect_take_them_as_well(guarded: Guarded, tmp_path: Path) -> None:
    environment = probing(guarded.secrets)
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
        ["inspect", str(CLIP), *both, "-o", str(tmp_path / "kept.png")],
        env={**environment, "FRAMESIEVE_TOKEN": guarded.tokens["inspector"]},
    )
    assert drawn.exit_code == 0, drawn.output


def test_the_probe_needs_a_certificate_but_no_token(guarded: Guarded) -> None:
    assert run(["common.serving.probe", guarded.stack.address], **probing(guarded.secrets)).returncode == 0
    assert run(["common.serving.probe", guarded.stack.address]).returncode == 1


async def test_logs_name_clients_and_contain_no_token(guarded: Guarded, alice: FramesieveClient) -> None:
    with pytest.raises(errors.InvalidRequest):
        await alice.ask(None, "?", temperature=-1)

    def logged() -> bool:
        lines = [json.loads(line) for line in guarded.stack.log("generation").splitlines() if line.startswith("{")]
        refused = {(line.get("client"), line.get("reason")) for line in lines}
        return {("alice", "INVALID_REQUEST"), (None, "UNAUTHENTICATED")} <= refused

    assert await settles(logged, True)
    for service in SERVICES:
        log = guarded.stack.log(service)
        assert '"tls": "mutual", "tokens": true' in log
        assert not [name for name, token in guarded.tokens.items() if token in log]
