"""URLs of uploaded files, by which the gateway tells preprocessing what to read below the --upload-root of both.

    upload:<sha256 of the caller's Authorization header>/<sha256 of the file>

The gateway makes such a URL only for the caller that uploaded the file, and refuses requests that contain such a URL. A
gRPC request may contain one; its caller must know the digest of the file and the digest of the uploader's header.
"""

from __future__ import annotations

import re

from gridsieve.common.contract.errors import InvalidRequest

_URL = re.compile(r"upload:([0-9a-f]{64}/[0-9a-f]{64})")


def upload_url(owner: str, digest: str) -> str:
    """owner, digest: 64 hexadecimal digits each."""
    return f"upload:{owner}/{digest}"


def upload_path(url: str) -> str:
    """The path below --upload-root. Raises InvalidRequest for a malformed URL."""
    parts = _URL.fullmatch(url)
    if parts is None:
        raise InvalidRequest("must be upload:, 64 hexadecimal digits, a slash, and 64 hexadecimal digits")
    return parts[1]
