"""TLS of listeners and channels: which certificates each side accepts, and that nothing falls back to plain text."""

from __future__ import annotations

import asyncio
import logging
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.channels import open_channel
from common.contract.errors import StartupError
from common.process import free_port
from common.serving.guards import serve_metrics
from common.serving.probe import is_serving, own_credentials
from common.serving.settings import ServiceSettings
from framesieve.client.credentials import Access, credentials_of
from tests.certificates import Authority, Issued
from tests.common.guarded_service import Echo, GuardedService, ask, guarded, refusal, tcp_address, well

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that the services do not know."""
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> Issued:
    return authority.issue("127.0.0.1", "localhost")


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def service(echo: Echo, own: Issued) -> AsyncIterator[GuardedService]:
    """Shows a certificate and asks for none."""
    async with guarded(tcp_address(), echo, tls_cert=own.cert, tls_key=own.key) as running:
        yield running


@pytest.fixture
async def mutual(echo: Echo, own: Issued, authority: Authority) -> AsyncIterator[GuardedService]:
    """Asks for client certificates as well."""
    tls = {"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": authority.path}
    async with guarded(tcp_address(), echo, **tls) as running:
        yield running


def channel_to(service: GuardedService, **access: Any) -> grpc.aio.Channel:
    return open_channel(service.address, credentials_of(Access(**access)))


async def test_a_caller_is_served_if_it_trusts_the_authority_and_speaks_tls(
    echo: Echo, service: GuardedService, authority: Authority, stranger: Authority
) -> None:
    async with channel_to(service) as channel:
        assert (await refusal(ask(channel)))[0] is UNAVAILABLE
    async with channel_to(service, tls_ca=stranger.path) as channel:
        code, _, message = await refusal(ask(channel))
        assert code is UNAVAILABLE
        assert "CERTIFICATE_VERIFY_FAILED" in message
    assert not echo.calls
    async with channel_to(service, tls_ca=authority.path) as channel:
        assert await ask(channel, 3) == 3


async def test_a_caller_refuses_a_certificate_of_another_name_and_a_plain_text_service(
    echo: Echo, authority: Authority
) -> None:
    other = authority.issue("encoder.test")
    for tls in ({"tls_cert": other.cert, "tls_key": other.key}, {}):
        async with (
            guarded(tcp_address(), echo, **tls) as service,
            channel_to(service, tls_ca=authority.path) as channel,
        ):
            assert (await refusal(ask(channel)))[0] is UNAVAILABLE
    assert not echo.calls


async def test_mutual_tls_needs_a_client_certificate_of_the_authority(
    echo: Echo, mutual: GuardedService, authority: Authority, stranger: Authority
) -> None:
    foreign, shown = stranger.issue("generation.test"), authority.issue("generation.test")
    for pair in ({}, {"tls_cert": foreign.cert, "tls_key": foreign.key}):
        async with channel_to(mutual, tls_ca=authority.path, **pair) as channel:
            assert (await refusal(ask(channel)))[0] is UNAVAILABLE
            assert (await refusal(well(channel)))[0] is UNAVAILABLE  # health included
    assert not echo.calls
    async with channel_to(mutual, tls_ca=authority.path, tls_cert=shown.cert, tls_key=shown.key) as channel:
        assert await ask(channel, 5) == 5


async def test_a_unix_socket_uses_no_tls(echo: Echo, tmp_path: Path, own: Issued, authority: Authority) -> None:
    tls = {"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": authority.path}
    async with (
        guarded(f"unix:{tmp_path}/s", echo, **tls) as service,
        channel_to(service) as plain,
        channel_to(service, tls_ca=authority.path) as trusting,
    ):
        assert [await ask(plain), await ask(trusting)] == [7, 7]


async def test_a_replaced_certificate_is_used_for_new_connections_and_an_unusable_one_is_not(
    echo: Echo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("127.0.0.1")

    async def shown(service: GuardedService) -> bytes:
        host, port = service.address.split(":")
        pem = await asyncio.to_thread(
            ssl.get_server_certificate, (host, int(port)), ca_certs=str(authority.path), timeout=10
        )
        return pem.strip().encode()

    async with (
        guarded(tcp_address(), echo, tls_cert=own.cert, tls_key=own.key) as service,
        channel_to(service, tls_ca=authority.path) as connected,
    ):
        first = await shown(service)
        await ask(connected)
        authority.issue("127.0.0.1", "renewed.test")  # writes the same files
        second = await shown(service)
        assert first != second
        assert second in own.cert.read_bytes()
        assert await ask(connected) == 7
        key = own.key.read_bytes()
        own.key.write_text("half of a fil")
        with caplog.at_level(logging.ERROR, "framesieve"):
            assert await shown(service) == second
        (record,) = caplog.records
        assert str(own.key) in record.getMessage()
        own.key.write_bytes(key)
        assert await shown(service) == second


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"tls_cert": "/c.pem"}, "--tls-cert /c.pem needs --tls-key, which is not set"),
        ({"tls_key": "/k.pem"}, "--tls-key /k.pem needs --tls-cert, which is not set"),
        ({"tls_client_ca": "/ca.pem"}, "--tls-client-ca /ca.pem needs --tls-cert, which is not set"),
        ({"metrics_tls": True}, "--metrics-tls True needs --tls-cert, which is not set"),
    ],
)
def test_an_incomplete_tls_setting_is_refused(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(StartupError) as info:
        ServiceSettings(listen="127.0.0.1:1", metrics_port=0, **given)
    assert str(info.value) == missing


@pytest.mark.parametrize("listen", ["unix:/nowhere", "127.0.0.1:1"])
async def test_listener_and_metrics_refuse_unusable_certificates(
    echo: Echo, authority: Authority, own: Issued, listen: str
) -> None:
    other = authority.issue("other.test")
    for tls, why in (
        ({"tls_key": other.key}, f"--tls-cert {own.cert} cannot be used with --tls-key {other.key}"),
        ({"tls_key": own.key, "tls_client_ca": own.key}, r"--tls-client-ca .* must hold certificates in PEM"),
    ):
        settings = {"listen": listen, "tls_cert": own.cert, **tls}
        with pytest.raises(StartupError, match=why):
            serve_metrics(ServiceSettings(metrics_port=1, metrics_tls=True, **settings))
        with pytest.raises(StartupError, match=why):
            async with guarded(tcp_address(), echo, tls_cert=own.cert, **tls):
                pass


# --- health and metrics -----------------------------------------------------------------------------------------


async def test_the_probe_uses_tls_as_the_environment_of_the_service_says(
    mutual: GuardedService, authority: Authority, own: Issued
) -> None:
    environment = {
        "FRAMESIEVE_UPSTREAM_TLS_CA": str(authority.path),
        "FRAMESIEVE_TLS_CERT": str(own.cert),
        "FRAMESIEVE_TLS_KEY": str(own.key),
    }
    credentials = own_credentials(mutual.address, environment)
    assert await asyncio.to_thread(is_serving, mutual.address, credentials, 10)
    with pytest.raises(grpc.RpcError):
        await asyncio.to_thread(is_serving, mutual.address, own_credentials(mutual.address, {}), 10)
    del environment["FRAMESIEVE_UPSTREAM_TLS_CA"]
    with pytest.raises(StartupError, match="needs FRAMESIEVE_UPSTREAM_TLS_CA"):
        own_credentials(mutual.address, environment)


@pytest.mark.parametrize("listens", ["tcp", "unix"])
async def test_the_probe_uses_plain_text_where_the_listener_does(
    echo: Echo, authority: Authority, own: Issued, tmp_path: Path, listens: str
) -> None:
    environment, settings = {"FRAMESIEVE_UPSTREAM_TLS_CA": str(authority.path)}, {}
    if listens == "unix":  # where the certificate is for calls upstream
        settings = {"tls_cert": own.cert, "tls_key": own.key}
        environment |= {f"FRAMESIEVE_{name.upper()}": str(path) for name, path in settings.items()}
    address = f"unix:{tmp_path}/socket" if listens == "unix" else tcp_address()
    async with guarded(address, echo, **settings):
        assert await asyncio.to_thread(is_serving, address, own_credentials(address, environment), 10)


async def test_metrics_are_served_with_the_same_tls(
    own: Issued, authority: Authority, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    tls = {"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": authority.path}
    settings = ServiceSettings(listen="127.0.0.1:1", metrics_port=port, metrics_tls=True, **tls)
    serve_metrics(settings)

    def scrape(trusting: ssl.SSLContext) -> str:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=trusting, timeout=10) as answer:
            return answer.read().decode()

    trusting = ssl.create_default_context(cafile=str(authority.path))
    _, silent = await asyncio.open_connection("127.0.0.1", port)  # it never begins its handshake
    with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
        await asyncio.to_thread(scrape, trusting)
    trusting.load_cert_chain(own.cert, own.key)
    assert "framesieve_requests_total" in await asyncio.to_thread(scrape, trusting)
    silent.close()
    await silent.wait_closed()
    assert capfd.readouterr().err == ""  # no traceback of a failed handshake
