"""What the services must read alike of MiniCPM-V: its version, how many tokens a picture becomes, and how they are
pruned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framesieve.common.contract.errors import StartupError
from framesieve.common.contract.retention import NONE

# Tokens of a picture of each version that is supported, where the config does not say.
_QUERIES: Mapping[str, int] = {"2.5": 96, "2.6": 64, "4.0": 64, "4.5": 64}
# Measured: benchmarks/RESULTS.md, "Pruning the tokens of a resampler".
PRUNING_METHODS = (NONE,)
WHY_NOT_ALL = "a resampler's tokens are not places, and no method keeps answers better than dropping at random"


def version_of(config: Mapping[str, Any]) -> str:
    """The version, such as "2.6". Raises StartupError for one that is not supported, or none.

    A missing one is not guessed: it may be 2.0, another architecture.
    """
    stated = str(config.get("version"))
    version = stated if "." in stated else f"{stated}.0"
    if version not in _QUERIES:
        named = f"version {stated!r}" if config.get("version") is not None else "without a version in config.json"
        raise StartupError(f"MiniCPM-V {named} is not supported, only {', '.join(_QUERIES)}")
    return version


def queries_of(config: Mapping[str, Any]) -> int:
    """Tokens of each picture. Raises StartupError as `version_of`."""
    published = _QUERIES[version_of(config)]
    return int(config.get("query_num") or published)
