"""Three services guarded as docs/security.md says: its secrets, their flags, and the credentials of callers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framesieve.cli.launcher import SERVICES, LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.credentials import Access

MAX_REQUESTS = 2
MAX_BYTES = 2**20
MALLORY = "mallory-0123456789-token"
SECURITY = Path(__file__).parents[2] / "docs/security.md"


@dataclass(frozen=True, slots=True)
class Guarded:
    """The services, and the folders of secrets that docs/security.md makes for them and for alice.

    tokens: by caller; bob may call generation, inspector the other two services.
    """

    stack: LocalStack
    secrets: Path
    tokens: Mapping[str, str]

    def access(self, name: str, **other: Any) -> Access:
        """The certificate of alice with the token of that caller."""
        ca, cert, key = (str(self.secrets / "alice" / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        own = {"tls_ca": ca, "tls_cert": cert, "tls_key": key, "token": self.tokens.get(name, MALLORY)}
        return Access(**{**own, **other})

    def client(self, name: str, **other: Any) -> FramesieveClient:
        return FramesieveClient(self.stack.address, **self.access(name, **other))


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


def flags_of(service: str, secrets: Path) -> list[str]:
    own = secrets / service
    flags = ["--tls-cert", f"{own}/cert.pem", "--tls-key", f"{own}/key.pem", "--tls-client-ca", f"{own}/ca.pem"]
    flags += ["--auth-tokens-file", f"{own}/tokens"]
    if service != "preprocessing":
        flags += ["--upstream-tls-ca", f"{own}/ca.pem", "--upstream-token-file", f"{own}/token"]
    if service == "generation":
        flags += ["--max-requests-per-client", str(MAX_REQUESTS), "--max-bytes-per-client", str(MAX_BYTES)]
        flags += ["--no-reflection", "--metrics-tls"]
    return flags


def probing(secrets: Path) -> dict[str, str]:
    """The environment of a process that checks the health of the services."""
    own = secrets / "alice"
    return {
        "FRAMESIEVE_UPSTREAM_TLS_CA": f"{own}/ca.pem",
        "FRAMESIEVE_TLS_CERT": f"{own}/cert.pem",
        "FRAMESIEVE_TLS_KEY": f"{own}/key.pem",
    }
