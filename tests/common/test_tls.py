"""TLS of listeners and channels: which certificates each side accepts, and that nothing falls back to plain text."""

from __future__ import annotations

import asyncio
import logging
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from gridsieve.client.credentials import Access, credentials_of
from gridsieve.common.channels import open_channel
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import free_port
from gridsieve.common.serving.guards import serve_metrics
from gridsieve.common.serving.probe import is_serving, own_credentials
from gridsieve.common.serving.settings import ServiceSettings
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


def pair_of(issued: Issued) -> dict[str, Path]:
    return {"tls_cert": issued.cert, "tls_key": issued.key}


def channel_to(service: GuardedService, **access: Any) -> grpc.aio.Channel:
    return open_channel(service.address, credentials_of(Access(**access)))


async def test_a_caller_is_served_if_it_trusts_the_authority_and_speaks_tls(
    echo: Echo, own: Issued, authority: Authority, stranger: Authority
) -> None:
    async with guarded(tcp_address(), echo, **pair_of(own)) as service:
        for access in ({}, {"tls_ca": stranger.path}):
            async with channel_to(service, **access) as channel:
                assert (await refusal(ask(channel)))[0] is UNAVAILABLE
        assert not echo.calls
        async with channel_to(service, tls_ca=authority.path) as channel:
            assert await ask(channel, 3) == 3


async def test_a_caller_refuses_a_certificate_of_another_name_and_a_plain_text_service(
    echo: Echo, authority: Authority
) -> None:
    for tls in (pair_of(authority.issue("encoder.test")), {}):
        async with (
            guarded(tcp_address(), echo, **tls) as service,
            channel_to(service, tls_ca=authority.path) as channel,
        ):
            assert (await refusal(ask(channel)))[0] is UNAVAILABLE
    assert not echo.calls


async def test_mutual_tls_needs_a_client_certificate_of_the_authority(
    echo: Echo, own: Issued, authority: Authority, stranger: Authority
) -> None:
    async with guarded(tcp_address(), echo, **pair_of(own), tls_client_ca=authority.path) as mutual:
        for pair in ({}, pair_of(stranger.issue("generation.test"))):
            async with channel_to(mutual, tls_ca=authority.path, **pair) as channel:
                assert (await refusal(ask(channel)))[0] is UNAVAILABLE
                assert (await refusal(well(channel)))[0] is UNAVAILABLE  # health included
        assert not echo.calls
        async with channel_to(mutual, tls_ca=authority.path, **pair_of(authority.issue("generation.test"))) as channel:
            assert await ask(channel, 5) == 5


async def test_a_unix_socket_uses_no_tls(echo: Echo, tmp_path: Path, own: Issued, authority: Authority) -> None:
    tls = {**pair_of(own), "tls_client_ca": authority.path}
    async with guarded(f"unix:{tmp_path}/s", echo, **tls) as service:
        async with channel_to(service) as plain, channel_to(service, tls_ca=authority.path) as trusting:
            assert [await ask(plain), await ask(trusting)] == [7, 7]
        # There the certificate is for calls upstream.
        variables = {"TLS_CERT": own.cert, "TLS_KEY": own.key, "UPSTREAM_TLS_CA": authority.path}
        environment = {f"GRIDSIEVE_{name}": str(path) for name, path in variables.items()}
        credentials = own_credentials(service.address, environment)
        assert await asyncio.to_thread(is_serving, service.address, credentials, 10)


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
        guarded(tcp_address(), echo, **pair_of(own)) as service,
        channel_to(service, tls_ca=authority.path) as connected,
    ):
        first = await shown(service)
        await ask(connected)
        authority.issue("127.0.0.1", "renewed.test")  # writes the same files
        second = await shown(service)
        assert first != second
        assert second in own.cert.read_bytes()
        assert await ask(connected) == 7
        own.key.write_text("half of a fil")
        with caplog.at_level(logging.ERROR, "gridsieve"):
            assert await shown(service) == second
        (record,) = caplog.records
        assert str(own.key) in record.getMessage()


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"tls_cert": "/c.pem"}, "--tls-cert /c.pem needs --tls-key, which is not set"),
        ({"tls_client_ca": "/ca.pem"}, "--tls-client-ca /ca.pem needs --tls-cert, which is not set"),
        ({"metrics_tls": True}, "--metrics-tls True needs --tls-cert, which is not set"),
    ],
)
def test_an_incomplete_tls_setting_is_refused(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(StartupError, match=f"^{missing}$"):
        ServiceSettings(listen="127.0.0.1:1", metrics_port=0, **given)


async def test_listener_and_metrics_refuse_unusable_certificates(echo: Echo, authority: Authority, own: Issued) -> None:
    other = authority.issue("other.test")
    for tls, why in (
        (
            {"tls_key": other.key},
            f"--tls-cert {own.cert} cannot be used with --tls-key {other.key}: key values mismatch",
        ),
        ({"tls_key": own.key, "tls_client_ca": own.key}, r"--tls-client-ca .* must hold certificates in PEM"),
    ):
        with pytest.raises(StartupError, match=why):
            serve_metrics(ServiceSettings(listen="unix:/s", metrics_port=1, metrics_tls=True, tls_cert=own.cert, **tls))
        with pytest.raises(StartupError, match=why):
            async with guarded(tcp_address(), echo, tls_cert=own.cert, **tls):
                pass


# --- health and metrics -----------------------------------------------------------------------------------------


async def test_the_probe_uses_tls_as_the_environment_of_the_service_says(
    echo: Echo, authority: Authority, own: Issued
) -> None:
    environment = {"GRIDSIEVE_TLS_CERT": str(own.cert), "GRIDSIEVE_TLS_KEY": str(own.key)}
    async with guarded(tcp_address(), echo, **pair_of(own), tls_client_ca=authority.path) as mutual:
        with pytest.raises(StartupError, match="needs GRIDSIEVE_UPSTREAM_TLS_CA"):
            own_credentials(mutual.address, environment)
        environment["GRIDSIEVE_UPSTREAM_TLS_CA"] = str(authority.path)
        credentials = own_credentials(mutual.address, environment)
        assert await asyncio.to_thread(is_serving, mutual.address, credentials, 10)
        plain = own_credentials(mutual.address, {"GRIDSIEVE_UPSTREAM_TLS_CA": str(authority.path)})
        with pytest.raises(grpc.RpcError):
            await asyncio.to_thread(is_serving, mutual.address, plain, 10)
    async with guarded(tcp_address(), echo) as service:
        assert await asyncio.to_thread(is_serving, service.address, plain, 10)


async def test_metrics_are_served_with_the_same_tls(
    own: Issued, authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    tls = {**pair_of(own), "tls_client_ca": authority.path}
    serve_metrics(ServiceSettings(listen="127.0.0.1:1", metrics_port=port, metrics_tls=True, **tls))

    def scrape(trusting: ssl.SSLContext) -> str:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=trusting, timeout=10) as answer:
            return answer.read().decode()

    trusting = ssl.create_default_context(cafile=str(authority.path))
    _, silent = await asyncio.open_connection("127.0.0.1", port)  # it never begins its handshake
    with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
        await asyncio.to_thread(scrape, trusting)
    trusting.load_cert_chain(own.cert, own.key)
    assert "gridsieve_requests_total" in await asyncio.to_thread(scrape, trusting)
    silent.close()
    await silent.wait_closed()
    assert capfd.readouterr().err == ""  # no traceback of a failed handshake
