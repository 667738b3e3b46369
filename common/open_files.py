"""How many files and connections a service may have open at once. Source: getrlimit(2)."""

from __future__ import annotations

import resource


def allow_open_files() -> None:
    """As many as the system lets this process have. The usual limit, 1024, is for programs that wait by select(2)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
