"""TLS on listeners and channels: who shows what to whom, and that nothing that was asked for goes on without it."""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from cryptography.hazmat.primitives import serialization

from common.channels import open_channel
from common.contract.errors import StartupError
from common.serving.exposition import serve_metrics
from common.serving.guards import metrics_tls
from common.serving.probe import is_serving, own_credentials
from common.serving.settings import ServiceSettings
from framesieve.client.credentials import Access, credentials_of
from tests.certificates import Authority, Issued
from tests.common.guarded_service import Echo, GuardedService, ask, guarded, refusal, tcp_address, well

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    (tmp_path / "elsewhere").mkdir()
    return Authority(tmp_path / "elsewhere")


@pytest.fixture
def own(authority: Authority) -> Issued:
    return authority.issue("127.0.0.1", "localhost")


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def service(echo: Echo, own: Issued) -> AsyncIterator[GuardedService]:
    """One that shows a certificate and asks for none."""
    async with guarded(tcp_address(), echo, tls_cert=own.cert, tls_key=own.key) as running:
        yield running


@pytest.fixture
async def mutual(echo: Echo, own: Issued, authority: Authority) -> AsyncIterator[GuardedService]:
    """One that asks for a certificate as well."""
    async with guarded(
        tcp_address(), echo, tls_cert=own.cert, tls_key=own.key, tls_client_ca=authority.path
    ) as running:
        yield running


def channel_to(service: GuardedService, **access: Any) -> grpc.aio.Channel:
    return open_channel(service.address, credentials_of(Access(**access)))


async def test_a_caller_that_trusts_the_authority_is_answered(service: GuardedService, authority: Authority) -> None:
    async with channel_to(service, tls_ca=authority.path) as channel:
        assert await ask(channel, 3) == 3


async def test_a_caller_in_plain_text_reaches_nobody(echo: Echo, service: GuardedService) -> None:
    async with channel_to(service) as channel:
        code, *_ = await refusal(ask(channel))
    assert code is UNAVAILABLE
    assert not echo.calls


async def test_a_caller_does_not_talk_to_who_another_authority_vouches_for(
    service: GuardedService, stranger: Authority
) -> None:
    async with channel_to(service, tls_ca=stranger.path) as channel:
        code, _, told = await refusal(ask(channel))
    assert code is UNAVAILABLE
    assert "CERTIFICATE_VERIFY_FAILED" in told


async def test_a_caller_does_not_talk_to_who_has_another_name(echo: Echo, authority: Authority) -> None:
    other = authority.issue("encoder.test")
    async with (
        guarded(tcp_address(), echo, tls_cert=other.cert, tls_key=other.key) as service,
        channel_to(service, tls_ca=authority.path) as channel,
    ):
        assert (await refusal(ask(channel)))[0] is UNAVAILABLE
        assert not echo.calls


async def test_a_caller_that_speaks_tls_does_not_fall_back_to_plain_text(echo: Echo, authority: Authority) -> None:
    async with (
        guarded(tcp_address(), echo) as service,
        channel_to(service, tls_ca=authority.path) as channel,
    ):
        assert (await refusal(ask(channel)))[0] is UNAVAILABLE
        assert not echo.calls


async def test_mutual_tls_answers_who_shows_a_certificate_of_the_authority(
    mutual: GuardedService, authority: Authority
) -> None:
    shown = authority.issue("generation.test")
    async with channel_to(mutual, tls_ca=authority.path, tls_cert=shown.cert, tls_key=shown.key) as channel:
        assert await ask(channel, 5) == 5


async def test_mutual_tls_lets_nobody_in_without_a_certificate_or_with_another_authority_s(
    echo: Echo, mutual: GuardedService, authority: Authority, stranger: Authority
) -> None:
    foreign = stranger.issue("generation.test")
    for shown in ({}, {"tls_cert": foreign.cert, "tls_key": foreign.key}):
        async with channel_to(mutual, tls_ca=authority.path, **shown) as channel:
            assert (await refusal(ask(channel)))[0] is UNAVAILABLE
            assert (await refusal(well(channel)))[0] is UNAVAILABLE  # not even health
    assert not echo.calls


async def test_a_unix_socket_speaks_no_tls_whatever_is_set(
    echo: Echo, tmp_path: Path, own: Issued, authority: Authority
) -> None:
    async with (
        guarded(
            f"unix:{tmp_path}/s", echo, tls_cert=own.cert, tls_key=own.key, tls_client_ca=authority.path
        ) as service,
        channel_to(service) as plain,
        channel_to(service, tls_ca=authority.path) as trusting,
    ):
        assert [await ask(plain), await ask(trusting)] == [7, 7]


# --- certificates that are replaced -----------------------------------------------------------------------------


def shown_by(address: str, authority: Authority) -> bytes:
    """The certificate that a new connection is shown."""
    host, port = address.split(":")
    return ssl.get_server_certificate((host, int(port)), ca_certs=str(authority.path), timeout=10).encode()


async def test_a_certificate_that_is_replaced_is_shown_to_whoever_connects_next(
    echo: Echo, own: Issued, authority: Authority
) -> None:
    async with guarded(tcp_address(), echo, tls_cert=own.cert, tls_key=own.key) as service:
        before = await asyncio.to_thread(shown_by, service.address, authority)
        async with channel_to(service, tls_ca=authority.path) as connected:
            await ask(connected)
            authority.issue("127.0.0.1", "renewed.test")  # into the same files
            after = await asyncio.to_thread(shown_by, service.address, authority)
            assert await ask(connected) == 7  # who was there stays
        assert before != after
        assert after.strip() in own.cert.read_bytes()


async def test_a_replacement_that_cannot_be_used_leaves_the_certificate_before(
    echo: Echo, own: Issued, authority: Authority
) -> None:
    async with guarded(tcp_address(), echo, tls_cert=own.cert, tls_key=own.key) as service:
        before = await asyncio.to_thread(shown_by, service.address, authority)
        key = own.key.read_bytes()
        own.key.write_text("half of a fil")
        with structlog.testing.capture_logs() as logged:
            assert await asyncio.to_thread(shown_by, service.address, authority) == before
        assert [each["log_level"] for each in logged] == ["error"]
        assert str(own.key) in logged[0]["error"]
        own.key.write_bytes(key)
        assert await asyncio.to_thread(shown_by, service.address, authority) == before


# --- refusing to start ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"tls_cert": "/c.pem"}, "--tls-cert /c.pem needs --tls-key, which is not set"),
        ({"tls_key": "/k.pem"}, "--tls-key /k.pem needs --tls-cert, which is not set"),
        ({"tls_client_ca": "/ca.pem"}, "--tls-client-ca /ca.pem needs --tls-cert, which is not set"),
        ({"metrics_tls": True}, "--metrics-tls True needs --tls-cert, which is not set"),
    ],
)
def test_half_a_tls_setting_refuses_to_start(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(StartupError) as info:
        ServiceSettings(listen="127.0.0.1:1", metrics_port=0, **given)
    assert str(info.value) == missing


async def test_a_certificate_that_cannot_be_used_refuses_to_start(
    echo: Echo, authority: Authority, own: Issued
) -> None:
    other = authority.issue("other.test")
    with pytest.raises(StartupError, match=f"--tls-cert {own.cert} cannot be used with --tls-key {other.key}"):
        async with guarded(tcp_address(), echo, tls_cert=own.cert, tls_key=other.key):
            pass
    with pytest.raises(StartupError, match=r"--tls-client-ca .* must hold certificates in PEM"):
        async with guarded(tcp_address(), echo, tls_cert=own.cert, tls_key=own.key, tls_client_ca=own.key):
            pass


# --- health and metrics -----------------------------------------------------------------------------------------


async def test_the_probe_asks_by_tls_with_the_service_s_own_environment(
    mutual: GuardedService, authority: Authority, own: Issued
) -> None:
    environment = {
        "FRAMESIEVE_UPSTREAM_TLS_CA": str(authority.path),
        "FRAMESIEVE_TLS_CERT": str(own.cert),
        "FRAMESIEVE_TLS_KEY": str(own.key),
    }
    own = own_credentials(mutual.address, environment)
    assert await asyncio.to_thread(is_serving, mutual.address, own, 10)
    with pytest.raises(grpc.RpcError):
        await asyncio.to_thread(is_serving, mutual.address, own_credentials(mutual.address, {}), 10)
    del environment["FRAMESIEVE_UPSTREAM_TLS_CA"]
    with pytest.raises(StartupError, match="needs FRAMESIEVE_UPSTREAM_TLS_CA"):
        own_credentials(mutual.address, environment)


@pytest.mark.parametrize("listens", ["tcp", "unix"])
async def test_the_probe_asks_in_plain_text_where_the_service_is_called_so_whatever_it_does_upstream(
    echo: Echo, authority: Authority, own: Issued, tmp_path: Path, listens: str
) -> None:
    environment, settings = {"FRAMESIEVE_UPSTREAM_TLS_CA": str(authority.path)}, {}
    if listens == "unix":  # with a certificate to show upstream
        settings = {"tls_cert": own.cert, "tls_key": own.key}
        environment |= {f"FRAMESIEVE_{name.upper()}": str(path) for name, path in settings.items()}
    address = f"unix:{tmp_path}/socket" if listens == "unix" else tcp_address()
    async with guarded(address, echo, **settings):
        assert await asyncio.to_thread(is_serving, address, own_credentials(address, environment), 10)


@pytest.mark.parametrize("listen", ["unix:/nowhere", "127.0.0.1:1"])
def test_metrics_refuse_files_that_cannot_be_used_by_their_flags_and_ask_for_no_password(
    authority: Authority, own: Issued, tmp_path: Path, listen: str
) -> None:
    def refused(told: str, **files: Path) -> None:
        settings = ServiceSettings(listen=listen, metrics_port=1, metrics_tls=True, **files)
        with pytest.raises(StartupError, match=told):
            metrics_tls(settings)

    locked = tmp_path / "locked.pem"
    key = serialization.load_pem_private_key(own.key.read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    refused(f"--tls-cert {own.cert} cannot be used with --tls-key {locked}", tls_cert=own.cert, tls_key=locked)
    refused("--tls-key .*nowhere cannot be read", tls_cert=own.cert, tls_key=tmp_path / "nowhere")
    refused(
        r"--tls-client-ca .* must hold certificates in PEM", tls_cert=own.cert, tls_key=own.key, tls_client_ca=own.key
    )


async def test_metrics_are_guarded_by_the_same_tls(own: Issued, authority: Authority) -> None:
    host, _, port = tcp_address().rpartition(":")
    settings = ServiceSettings(
        listen="127.0.0.1:1",
        metrics_port=int(port),
        tls_cert=own.cert,
        tls_key=own.key,
        tls_client_ca=authority.path,
        metrics_tls=True,
    )
    serve_metrics(settings.metrics_port, host, metrics_tls(settings))

    def scrape(trusting: ssl.SSLContext) -> str:
        with urllib.request.urlopen(f"https://{host}:{port}/metrics", context=trusting, timeout=10) as answer:
            return answer.read().decode()

    trusting = ssl.create_default_context(cafile=str(authority.path))
    _, silent = await asyncio.open_connection(host, int(port))  # says nothing, and keeps nobody waiting
    with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
        await asyncio.to_thread(scrape, trusting)
    trusting.load_cert_chain(own.cert, own.key)
    assert "framesieve_requests_total" in await asyncio.to_thread(scrape, trusting)
    silent.close()
    await silent.wait_closed()
