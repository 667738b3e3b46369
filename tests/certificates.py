"""Certificate authorities of the tests, and the certificates they issue, as PEM files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Issues certificates into a folder that also holds its own certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.path = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.path)

    def issue(self, name: str, *others: str, not_after: datetime | None = None) -> Issued:
        """A certificate of these names for servers and clients. The first name is that of the files."""
        leaf = self._ca.issue_cert(name, *others, not_after=not_after)
        issued = Issued(self._folder / f"{name}.cert.pem", self._folder / f"{name}.key.pem")
        issued.cert.write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(issued.key)
        return issued


def self_signed(folder: Path, name: str) -> Issued:
    """A certificate that no authority has issued, and that is none itself, as devices have."""
    issued = Issued(folder / f"{name}.own.cert.pem", folder / f"{name}.own.key.pem")
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    issued.cert.write_bytes(certificate.public_bytes(pem))
    private, unprotected = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    issued.key.write_bytes(key.private_bytes(pem, private, unprotected))
    return issued
