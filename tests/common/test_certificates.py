"""Certificate files: unusable ones are refused at the start, with the flag and the reason."""

from __future__ import annotations

import shlex
import ssl
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from common.contract.errors import StartupError
from common.security.certificates import read_authorities, read_pair
from tests.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def openssl(command: str) -> None:
    subprocess.run(["openssl", *shlex.split(command)], check=True, capture_output=True, timeout=30)


def refusal(cert: Path, key: Path, purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> str:
    with pytest.raises(StartupError) as info:
        read_pair(cert, key, purpose)
    return str(info.value)


def test_a_certificate_and_its_key_are_read(authority: Authority) -> None:
    issued = authority.issue("encoder.test")
    for purpose in (ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH):
        pair = read_pair(issued.cert, issued.key, purpose)
        assert (pair.chain, pair.key) == (issued.cert.read_bytes(), issued.key.read_bytes())
    assert "PRIVATE" not in repr(pair)


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    one, other = authority.issue("one.test"), authority.issue("other.test")
    assert refusal(one.cert, other.key) == (
        f"--tls-cert {one.cert} cannot be used with --tls-key {other.key}: key values mismatch"
    )


@pytest.mark.parametrize("purpose", [ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH])
def test_an_expired_certificate_is_refused(authority: Authority, purpose: ssl.Purpose) -> None:
    old = authority.issue("old.test", not_after=datetime(2024, 1, 1, tzinfo=UTC))
    message = refusal(old.cert, old.key, purpose)
    assert f"--tls-cert {old.cert}" in message
    assert "certificate has expired" in message


def test_a_certificate_for_clients_only_cannot_serve(tmp_path: Path) -> None:
    cert, key = tmp_path / "client.pem", tmp_path / "client.key"
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 2 -subj /CN=alice"
    openssl(f"req {kind} -addext extendedKeyUsage=clientAuth -out {cert} -keyout {key}")
    assert read_pair(cert, key, ssl.Purpose.CLIENT_AUTH).chain == cert.read_bytes()
    assert "purpose" in refusal(cert, key)


def test_a_key_with_a_password_is_refused_without_a_prompt(authority: Authority, tmp_path: Path) -> None:
    issued, locked = authority.issue("one.test"), tmp_path / "locked.pem"
    openssl(f"pkey -in {issued.key} -aes128 -passout pass:four -out {locked}")
    assert "needs a password" in refusal(issued.cert, locked)


@pytest.mark.parametrize("flag", ["--tls-cert", "--tls-key"])
def test_a_missing_file_is_named_with_its_flag(authority: Authority, tmp_path: Path, flag: str) -> None:
    issued, missing = authority.issue("one.test"), tmp_path / "missing.pem"
    cert, key = (missing, issued.key) if flag == "--tls-cert" else (issued.cert, missing)
    assert refusal(cert, key) == f"{flag} {missing} cannot be read: No such file or directory"


@pytest.mark.parametrize("garbled", ["cert", "key"])
def test_a_file_that_is_not_pem_is_refused(authority: Authority, garbled: str) -> None:
    issued = authority.issue("one.test")
    getattr(issued, garbled).write_text("garbage")
    assert "not PEM" in refusal(issued.cert, issued.key)


def test_authorities_are_certificates_in_pem(authority: Authority, tmp_path: Path) -> None:
    assert read_authorities("--tls-client-ca", authority.path) == authority.path.read_bytes()
    for name, content in (("garbage", b"\xff garbage"), ("key", authority.issue("one.test").key.read_bytes())):
        wrong = tmp_path / name
        wrong.write_bytes(content)
        with pytest.raises(StartupError, match=f"--upstream-tls-ca {wrong} must hold certificates in PEM"):
            read_authorities("--upstream-tls-ca", wrong)
    with pytest.raises(StartupError, match=r"--upstream-tls-ca .* cannot be read: Is a directory"):
        read_authorities("--upstream-tls-ca", tmp_path)
