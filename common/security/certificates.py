"""Certificates out of PEM files, checked before anybody relies on them, and read anew when they are replaced on disk.

Whatever is wrong with a file is a StartupError that names its flag. It knows neither settings nor channels.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import structlog

from common.contract.errors import StartupError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate, with those that lead to its authority, and its private key, all as PEM."""

    chain: bytes
    key: bytes = field(repr=False)


def read_authorities(flag: str, path: Path) -> bytes:
    """The certificates of those whose word is taken, as PEM. Raises StartupError for a file without any."""
    pem = _read(flag, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise StartupError(f"{flag} {path} must hold certificates in PEM: {_told(error)}") from error
    return pem


def read_pair(cert: Path, key: Path, purpose: ssl.Purpose) -> KeyPair:
    """The files of --tls-cert and --tls-key.

    purpose: whom the certificate is shown to: SERVER_AUTH to callers, CLIENT_AUTH to services that are called.
    Raises StartupError for files that cannot be read or do not belong together, and for a certificate that its
    beholder would refuse, as one that has expired. Who issued it is not judged here.
    """
    pair = KeyPair(_read("--tls-cert", cert), _read("--tls-key", key))
    try:
        _shake_hands(cert, key, purpose)
    except ssl.SSLError as error:
        raise StartupError(f"--tls-cert {cert} cannot be used with --tls-key {key}: {_told(error)}") from error
    return pair


class ServedCertificate:
    """A listener's certificate. What stands in its files when somebody connects is what they are shown.

    client_ca: authorities; whoever connects must show a certificate of theirs. None: nobody is asked for one.
    Raises StartupError for files that cannot be used. If they are replaced by such, what was read before stays.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._stamp = self._stamped()
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._read(),
            self._replaced,  # type: ignore[arg-type]  # the stub does not know of None
            require_client_authentication=client_ca is not None,
        )

    def _read(self) -> grpc.ServerCertificateConfiguration:
        pair = read_pair(self._cert, self._key, ssl.Purpose.SERVER_AUTH)
        authorities = read_authorities("--tls-client-ca", self._client_ca) if self._client_ca else None
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], authorities)

    def _replaced(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, in a thread of its own, whenever somebody connects. None: nothing has changed."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            configuration = self._read()
        except StartupError as error:
            log.error("replaced certificate cannot be used, the one before stays", error=str(error))
            return None
        log.info("certificate was replaced", tls_cert=str(self._cert))
        return configuration

    def _stamped(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What tells a file from the one that stood there before."""
        stamps: list[tuple[int, int, int] | None] = []
        for path in filter(None, (self._cert, self._key, self._client_ca)):
            try:
                stat = path.stat()
                stamps.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
            except OSError:
                stamps.append(None)
        return tuple(stamps)


def _shake_hands(cert: Path, key: Path, purpose: ssl.Purpose) -> None:
    """Shows the certificate to nobody but ourselves, who trust it but for its dates, its purpose and its key.

    Raises SSLError.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for side in (server, client):
        side.load_cert_chain(cert, key, password="")  # a key that needs one is refused, not asked about
    beholder = client if purpose is ssl.Purpose.SERVER_AUTH else server
    beholder.verify_mode = ssl.CERT_REQUIRED
    beholder.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    beholder.load_verify_locations(cert)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = client.wrap_bio(back, there)
    called = server.wrap_bio(there, back, server_side=True)
    for side_of_it in (calling, called, calling, called):
        try:
            side_of_it.do_handshake()
        except ssl.SSLWantReadError:
            continue


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{flag} {path} cannot be read: {error.strerror}") from error


def _told(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return error.reason.replace("_", " ").lower() if error.reason else "they are not PEM, or the key needs a password"
