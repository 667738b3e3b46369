"""Certificates from PEM files: checked before use, and reloaded when they are replaced on disk.

A file that cannot be used raises StartupError, which names its flag. This module knows neither settings nor channels.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from gridsieve.common.contract.errors import StartupError

log = logging.getLogger("gridsieve.security")  # standard logging: the client package needs no structlog


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate chain and its private key, as PEM."""

    chain: bytes
    key: bytes = field(repr=False)


def read_authorities(flag: str, path: Path) -> bytes:
    """Certificates of trusted authorities, as PEM. Raises StartupError for a file without any."""
    pem = _read(flag, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise StartupError(f"{flag} {path} must hold certificates in PEM: {_reason(error)}") from error
    return pem


def read_pair(cert: Path, key: Path, purpose: ssl.Purpose) -> KeyPair:
    """The files of --tls-cert and --tls-key.

    purpose: SERVER_AUTH for a certificate shown to callers, CLIENT_AUTH for one shown to services that are called.
    Raises StartupError for files that cannot be read or do not match, and for a certificate that the other side would
    reject, such as an expired one. The issuer is not checked.
    """
    pair = KeyPair(_read("--tls-cert", cert), _read("--tls-key", key))
    try:
        _shake_hands(cert, key, purpose)
    except ssl.SSLError as error:
        raise StartupError(f"--tls-cert {cert} cannot be used with --tls-key {key}: {_reason(error)}") from error
    return pair


class ServedCertificate:
    """A listener's certificate. Each new connection gets the certificate that its files hold at that time.

    client_ca: authorities of client certificates, which are then required; None asks for no client certificate.
    Raises StartupError for files that cannot be used. Unusable replacements are logged, and the old certificate stays.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._stamp = file_stamps(cert, key, client_ca)
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._read(),
            self._replaced,  # type: ignore[arg-type]  # the stub does not allow None
            require_client_authentication=client_ca is not None,
        )

    def _read(self) -> grpc.ServerCertificateConfiguration:
        pair = read_pair(self._cert, self._key, ssl.Purpose.SERVER_AUTH)
        authorities = read_authorities("--tls-client-ca", self._client_ca) if self._client_ca else None
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], authorities)

    def _replaced(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this for each connection, from a thread of its own. None keeps the configuration."""
        stamp = file_stamps(self._cert, self._key, self._client_ca)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            configuration = self._read()
        except StartupError as error:
            log.error("the new certificate cannot be used, the previous one stays in use: %s", error)
            return None
        log.info("the certificate %s was reloaded", self._cert)
        return configuration


def file_stamps(*paths: Path | None) -> tuple[tuple[int, int, int] | None, ...]:
    """Inode, size and modification time of each file: they change when a file is replaced."""
    stamps: list[tuple[int, int, int] | None] = []
    for path in filter(None, paths):
        try:
            stat = path.stat()
            stamps.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            stamps.append(None)
    return tuple(stamps)


def _shake_hands(cert: Path, key: Path, purpose: ssl.Purpose) -> None:
    """A TLS handshake in memory with a peer that trusts this certificate: dates, purpose and key are checked.

    Raises SSLError.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for side in (server, client):
        side.load_cert_chain(cert, key, password="")  # rejects encrypted keys instead of prompting for a password
    verifier = client if purpose is ssl.Purpose.SERVER_AUTH else server
    verifier.verify_mode = ssl.CERT_REQUIRED
    verifier.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    verifier.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for side_of_it in (client_side, server_side, client_side, server_side):
        try:
            side_of_it.do_handshake()
        except ssl.SSLWantReadError:
            continue


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{flag} {path} cannot be read: {error.strerror}") from error


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return error.reason.replace("_", " ").lower() if error.reason else "they are not PEM, or the key needs a password"
