"""Three real processes guarded as docs/security.md says: mutual TLS and tokens on every hop, and quotas by client.

They run the embedded model, which gives the right answers to the questions of the demo.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from typer.testing import CliRunner

from demo.example import CLIP, QUESTIONS
from gridsieve.__main__ import app
from gridsieve.cli.inspection import inspect_media
from gridsieve.cli.launcher import SERVICES
from gridsieve.client.answer import Accepted
from gridsieve.client.client import GridsieveClient
from gridsieve.client.credentials import Access, credentials_of
from gridsieve.client.encoding import encode
from gridsieve.client.live_events import LiveFinished
from gridsieve.client.prompt import Pruning, Video
from gridsieve.common.channels import open_channel
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract import errors
from tests import media
from tests.integration.conftest import UNCOMPILED, idle, metric
from tests.integration.fleet import Service, Stack, exported, metric_in, started, until
from tests.integration.gateway import gateway
from tests.integration.gateway import question as http_question
from tests.integration.test_metrics import documented, families, seen

MAX_REQUESTS = 2
MAX_BYTES = 2**20
MALLORY = "mallory-0123456789-token"
SECURITY = Path(__file__).parents[2] / "docs/security.md"


@dataclass(frozen=True, slots=True)
class Guarded:
    """The services, and the folders of secrets that docs/security.md makes for them and for alice.

    tokens: by caller; bob may call generation, inspector the other two services.
    """

    stack: Stack
    secrets: Path
    tokens: Mapping[str, str]

    def access(self, name: str, **other: Any) -> Access:
        """The certificate of alice with the token of that caller."""
        ca, cert, key = (str(self.secrets / "alice" / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        own = {"tls_ca": ca, "tls_cert": cert, "tls_key": key, "token": self.tokens.get(name, MALLORY)}
        return Access(**{**own, **other})

    def client(self, name: str, **other: Any) -> GridsieveClient:
        return GridsieveClient(self.stack.address, **self.access(name, **other))


def made_secrets(folder: Path) -> tuple[Path, dict[str, str]]:
    """Runs the script of docs/security.md; returns the folder that it makes and the tokens by caller."""
    (script,) = re.findall(r"```sh\n(.*?)```", SECURITY.read_text(), re.DOTALL)
    subprocess.run(["sh", "-eu", "-c", script], cwd=folder, check=True, capture_output=True, timeout=60)
    secrets = folder / "secrets"
    tokens = {path.parent.name: path.read_text().strip() for path in secrets.glob("*/token")}
    for name, services in (("bob", SERVICES[2:]), ("inspector", SERVICES[:2])):
        tokens[name] = f"{name}-0123456789-token"
        for service in services:
            with (secrets / service / "tokens").open("a") as lines:
                lines.write(f"{name} {tokens[name]}\n")
    return secrets, tokens


def flags_of(service: str, secrets: Path, addresses: Mapping[str, str]) -> tuple[str, ...]:
    """gRPC's names of the addresses do not tell that the services share a host."""
    own = secrets / service
    flags = ["--tls-cert", f"{own}/cert.pem", "--tls-key", f"{own}/key.pem", "--tls-client-ca", f"{own}/ca.pem"]
    flags += ["--auth-tokens-file", f"{own}/tokens"]
    if service == "preprocessing":
        flags += ["--media-root", str(CLIP.parent)]
    else:
        flags += ["--upstream-tls-ca", f"{own}/ca.pem", "--upstream-token-file", f"{own}/token"]
        flags += ["--preprocessing", f"ipv4:{addresses['preprocessing']}", *UNCOMPILED]
    if service == "generation":
        flags += ["--encoder", f"ipv4:{addresses['encoder']}", "--no-reflection"]
        flags += ["--max-requests-per-client", str(MAX_REQUESTS), "--max-bytes-per-client", str(MAX_BYTES)]
    return tuple(flags)


def environment_of(secrets: Path) -> dict[str, str]:
    """What a process needs to connect to the services."""
    own = secrets / "alice"
    return {
        "GRIDSIEVE_UPSTREAM_TLS_CA": f"{own}/ca.pem",
        "GRIDSIEVE_TLS_CERT": f"{own}/cert.pem",
        "GRIDSIEVE_TLS_KEY": f"{own}/key.pem",
    }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    secrets, tokens = made_secrets(tmp_path_factory.mktemp("guarded"))
    services = {name: Service(name, DEMO_MODEL, secrets) for name in SERVICES}
    made = Guarded(Stack(services), secrets, tokens)
    for each in services.values():
        each.flags = flags_of(each.name, secrets, made.stack.addresses)
        each.credentials = credentials_of(made.access("alice"))
    with started(*services.values()):
        yield made


@pytest.fixture
async def alice(guarded: Guarded) -> AsyncIterator[GridsieveClient]:
    async with guarded.client("alice") as connected:
        yield connected


def test_the_gateway_serves_tls_and_passes_tokens_on(guarded: Guarded, tmp_path: Path) -> None:
    ca, cert, key = (str(guarded.secrets / "alice" / f"{name}.pem") for name in ("ca", "cert", "key"))
    flags = ("--tls-cert", cert, "--tls-key", key, "--upstream-tls-ca", ca)
    trusting = ssl.create_default_context(cafile=ca)
    with (
        gateway(guarded.stack.address, tmp_path, *flags, tls=Path(ca)) as door,
        door.http(verify=trusting) as client,
    ):
        asked = http_question("Why?", max_tokens=4)
        for token, status in ((guarded.tokens["bob"], 200), (MALLORY, 401)):
            headers = {"authorization": f"Bearer {token}"}
            assert client.post("/v1/chat/completions", json=asked, headers=headers).status_code == status
        deadline = time.monotonic() + 20  # the channel of health connects by itself, after that of the question perhaps
        while client.get("/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert client.post("/v1/chat/completions", json=asked).status_code == 401


async def test_tokens_and_seconds_are_counted_by_the_names_of_tokens(guarded: Guarded, tmp_path: Path) -> None:
    """By each service for its own callers: alice's token is the gateway's, which counts those of carol."""
    carol, metrics_port = "carol-0123456789-token", guarded.stack.metrics_ports["generation"]
    (tmp_path / "tokens").write_text(f"carol {carol}\n")
    own = guarded.secrets / "alice"
    flags = ("--auth-tokens-file", str(tmp_path / "tokens"), "--upstream-token-file", f"{own}/token")
    tls = ("--tls-cert", f"{own}/cert.pem", "--tls-key", f"{own}/key.pem", "--upstream-tls-ca", f"{own}/ca.pem")

    def used(text: str, name: str) -> list[float]:
        """Prompt tokens, tokens of answers, seconds."""
        count = partial(metric_in, text, client=name)
        tokens = [count("gridsieve_client_tokens_total", kind=kind) for kind in ("prompt", "completion")]
        return [*tokens, count("gridsieve_client_seconds_total")]

    def grown(text: str, before: str, name: str) -> list[float]:
        return [now - then for now, then in zip(used(text, name), used(before, name), strict=True)]

    before, since = exported(metrics_port), time.monotonic()
    with gateway(guarded.stack.address, tmp_path, *flags, *tls, tls=own / "ca.pem") as door:
        trusting = ssl.create_default_context(cafile=own / "ca.pem")
        with door.http(verify=trusting, headers={"authorization": f"Bearer {carol}"}) as client:
            fresh = client.get("/metrics").text
            assert 'gridsieve_client_tokens_total{client="carol",kind="prompt"} 0.0' in fresh
            for_strangers = client.get("/metrics", headers={"authorization": f"Bearer {MALLORY}"}).text
            assert families(fresh).keys() - families(for_strangers).keys() == documented("callers").keys()
            asked = http_question("Why?", max_tokens=4)
            usage = client.post("/v1/chat/completions", json=asked).raise_for_status().json()["usage"]
            client.get("/v1/models").raise_for_status()
            client.post("/v1/chat/completions", json=asked | {"temperature": -1})
            await idle(guarded.stack)
            text, at_generation = client.get("/metrics").text, exported(metrics_port)
            prompt, completion, seconds = used(text, "carol")
            assert [prompt, completion] == [usage["prompt_tokens"], usage["completion_tokens"]]
            assert 0 < seconds < time.monotonic() - since
            assert grown(at_generation, before, "alice")[:2] == [prompt, completion]
            endless = http_question("Why?", max_tokens=900, ignore_eos=True, stream=True)
            with client.stream("POST", "/v1/chat/completions", json=endless) as left:
                next(left.iter_lines())
            await idle(guarded.stack)
            await until(lambda: not metric_in(client.get("/metrics").text, "gridsieve_requests_running"))
            prompt, completion, _ = grown(client.get("/metrics").text, text, "carol")
            charged = grown(exported(metrics_port), at_generation, "alice")
            assert (prompt, 0 < completion <= charged[1] < 900) == (charged[0], True)
    async with guarded.client("bob") as bob, bob.live() as session:
        events = session.events()
        for time_s in (0.0, 0.5):
            await session.show(media.picture(56, 56), time_s)
        answer = await session.answer("Why?", max_new_tokens=4)
        await session.close()
        *_, last = [event async for event in events]
    await idle(guarded.stack)
    assert isinstance(last, LiveFinished)
    prompt, completion, seconds = grown(text := exported(metrics_port), before, "bob")
    of_question = answer.usage.prompt_tokens - answer.usage.cached_prompt_tokens
    assert (prompt, completion) == (last.usage.media_tokens + of_question, answer.usage.completion_tokens)
    assert seconds > 0
    by_caller = {name: family for name, family in families(text).items() if name.startswith("gridsieve_client_")}
    assert {name: seen(family, {"client"}) for name, family in by_caller.items()} == documented("callers")


async def test_the_questions_of_the_demo_are_answered_correctly_over_mutual_tls(alice: GridsieveClient) -> None:
    for question, rate in product(QUESTIONS, (0.0, 0.75)):
        answer = await alice.ask(Video(server_path=CLIP.name), question.text, pruning_rate=rate)
        assert answer.text == question.answer
        # 16 s at 2 frames a second are 16 slices of two.
        (item,) = answer.usage.media
        assert item.grid.t == 16
        assert item.num_kept == int(item.grid.tokens * (1 - rate))


async def test_services_that_do_not_know_that_they_share_a_host_send_frames_and_embeddings_in_messages(
    guarded: Guarded, alice: GridsieveClient
) -> None:

    def moved_bytes(service: str, method: str) -> tuple[float, int]:
        """In all, and how much of it was handed over."""
        sent = metric(guarded.stack, service, "gridsieve_message_bytes_total", method=method, direction="sent")
        return sent, sum(map(int, re.findall(r'"handed_over_bytes": (\d+)', guarded.stack.log(service))))

    calls = {"preprocessing": "Preprocess", "encoder": "Encode"}
    before = [await asyncio.to_thread(moved_bytes, *each) for each in calls.items()]
    await alice.ask(Video(data=media.clip(32, seed=900)), "What moves?", max_new_tokens=1)
    await idle(guarded.stack)
    after = [await asyncio.to_thread(moved_bytes, *each) for each in calls.items()]
    # 16 frames of 112 × 112 pixels, which are 8 · 16 tokens of at least 64 values of float32.
    for now, then, least in zip(after, before, (3 * 16 * 112**2, 4 * 64 * 8 * 16), strict=True):
        assert now[0] - then[0] > least
        assert now[1] == then[1]


NO_CERTIFICATE = dict.fromkeys(("tls_cert", "tls_key"))


@pytest.mark.parametrize(
    ("name", "shown", "error"),
    [
        ("alice", {"token": None}, errors.Unauthenticated),
        ("mallory", {}, errors.Unauthenticated),
        ("generation", {}, errors.Unauthenticated),
        ("alice", NO_CERTIFICATE, errors.Unavailable),
        ("alice", NO_CERTIFICATE | {"tls_ca": None}, errors.Unavailable),
    ],
)
async def test_a_caller_without_a_token_of_the_service_or_a_certificate_is_refused(
    guarded: Guarded, name: str, shown: dict[str, None], error: type[Exception]
) -> None:
    async with guarded.client(name, **shown) as client:
        with pytest.raises(error):
            await client.ask(Video(CLIP), "What moves?", timeout_s=20)


async def test_a_token_of_generation_is_no_token_of_the_services_behind_it(guarded: Guarded) -> None:
    both = guarded.stack.addresses["preprocessing"], guarded.stack.addresses["encoder"]
    # gRPC sometimes loses the status of a call that is refused while the caller still writes.
    with pytest.raises((errors.Unauthenticated, errors.Unavailable)):
        await encode(both[1], Video(CLIP), **guarded.access("alice"))
    (seen,) = await inspect_media(*both, Video(CLIP), [Pruning(0.5)], **guarded.access("inspector"))
    assert seen.kept.size < seen.plan.grid.tokens


async def test_a_client_at_its_quota_is_refused_and_another_is_not(guarded: Guarded, alice: GridsieveClient) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"--max-bytes-per-client is {MAX_BYTES}$"):
        await alice.ask(Video(data=bytes(MAX_BYTES)), "And this?", timeout_s=20)
    held = [alice.stream(Video(CLIP), "Describe it.", max_new_tokens=900, ignore_eos=True) for _ in range(2)]
    assert all([isinstance(await anext(stream), Accepted) for stream in held])
    with pytest.raises(errors.Overloaded, match=f"alice .*--max-requests-per-client is {MAX_REQUESTS}"):
        await alice.ask(None, "And I?", timeout_s=20)
    async with guarded.client("bob") as bob:
        assert (await bob.ask(None, "And I?", max_new_tokens=4, timeout_s=60)).usage.completion_tokens
    for stream in held:
        await stream.aclose()
    await idle(guarded.stack)


async def test_reflection_can_be_switched_off(guarded: Guarded) -> None:
    credentials = credentials_of(guarded.access("alice"))
    async with open_channel(guarded.stack.address, credentials) as channel:
        # A unary request: gRPC sometimes loses the status of a call that is refused while the caller still writes.
        reflect = channel.unary_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        call = reflect(ServerReflectionRequest(list_services="").SerializeToString(), metadata=credentials.metadata)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


def test_commands_take_credentials_from_flags_or_the_environment(guarded: Guarded, tmp_path: Path) -> None:
    own, address, behind = guarded.secrets / "alice", guarded.stack.address, guarded.stack.addresses

    def run(arguments: list[str], token: str | None = None) -> tuple[int, str]:
        environment = {**environment_of(guarded.secrets), "GRIDSIEVE_TOKEN": token} if token else {}
        done = CliRunner().invoke(app, arguments, env=environment)
        return done.exit_code, done.output

    ask = ["ask", str(CLIP), "What moves?", "--server", address, "--max-new-tokens", "4"]
    shown = ["--tls-ca", f"{own}/ca.pem", "--tls-cert", f"{own}/cert.pem", "--tls-key", f"{own}/key.pem"]
    assert run([*ask, *shown, "--token-file", f"{own}/token"])[0] == 0
    code, said = run(ask, MALLORY)
    assert (code, said.split(":")[0]) == (1, "UNAUTHENTICATED")
    assert run(ask, guarded.tokens["bob"])[0] == 0
    bench = ["bench", "--server", address, "--requests", "2", "--clients", "1", "--warmup", "0"]
    assert run([*bench, "--max-new-tokens", "2"], guarded.tokens["bob"])[0] == 0
    inspect = ["inspect", str(CLIP), "--preprocessing", behind["preprocessing"], "--encoder", behind["encoder"]]
    assert run([*inspect, "-o", str(tmp_path / "kept.png")], guarded.tokens["inspector"])[0] == 0


async def test_logs_name_clients_and_contain_no_token(guarded: Guarded, alice: GridsieveClient) -> None:
    with pytest.raises(errors.InvalidRequest):
        await alice.ask(None, "?", temperature=-1)
    async with guarded.client("mallory") as mallory:
        with pytest.raises(errors.Unauthenticated):
            await mallory.ask(None, "?")

    def logged() -> bool:
        lines = [json.loads(line) for line in guarded.stack.log("generation").splitlines() if line.startswith("{")]
        refused = {(line.get("client"), line.get("reason")) for line in lines}
        return {("alice", "INVALID_REQUEST"), (None, "UNAUTHENTICATED")} <= refused

    await until(logged)
    for service in SERVICES:
        log = guarded.stack.log(service)
        assert '"tls": "mutual", "tokens": true' in log
        assert not [name for name, token in {**guarded.tokens, "mallory": MALLORY}.items() if token in log]
