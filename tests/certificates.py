"""Certificate authorities of the tests, and the certificates they issue, as PEM files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme


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
