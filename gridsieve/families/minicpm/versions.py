"""What the services must read alike of MiniCPM-V: its version, and how many tokens a picture becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import Fields

# Tokens of a picture of each version that is supported, where the config does not say.
_QUERIES: Mapping[str, int] = {"2.5": 96, "2.6": 64, "4.0": 64, "4.5": 64}
# Old configs have no version: 2.5 alone has so many queries, and 2.0 alone this width with these queries.
_QUERIES_OF_2_5, _WIDTH_AND_QUERIES_OF_2_0 = 96, (2304, 64)
_WHY_NOT_2_0 = "a tower of timm's and a language model that scales embeddings, residuals and logits"
# Of 4.6 and 4.7, patches per side of a token: the tower merges 2 × 2 twice, or once.
_MERGED_SIDES: Mapping[str, int] = {"16x": 4, "4x": 2}


def version_of(config: Mapping[str, Any]) -> str:
    """The version, such as "2.6". Raises StartupError for one that is not supported.

    A missing one is known by the published numbers of 2.5 and 2.0, else it is not guessed.
    """
    stated, queries = config.get("version"), config.get("query_num")
    if stated is None and queries == _QUERIES_OF_2_5:
        return "2.5"
    if stated is None and (config.get("hidden_size"), queries) == _WIDTH_AND_QUERIES_OF_2_0:
        stated = "2.0"
    version = str(stated) if "." in str(stated) else f"{stated}.0"
    if version not in _QUERIES:
        named = f"version {str(stated)!r}" if stated is not None else "without a version in config.json"
        why = f": {_WHY_NOT_2_0}" if version == "2.0" else ""
        raise StartupError(f"MiniCPM-V {named} is not supported, only {', '.join(_QUERIES)}{why}")
    return version


def queries_of(config: Mapping[str, Any]) -> int:
    """Tokens of each picture. Raises StartupError as `version_of`."""
    published = _QUERIES[version_of(config)]
    return Fields("config.json", config).whole("query_num", published)


def merged_side(config: Fields) -> int:
    """Patches per side of a token of 4.6 and 4.7. Raises StartupError for other kernels than theirs, and modes."""
    mode = str(config.get("downsample_mode", "16x"))
    if mode not in _MERGED_SIDES:
        raise StartupError(f"downsample_mode {mode!r} is not supported, only {', '.join(_MERGED_SIDES)}")
    vision = config.part("vision_config")
    for name, value, only in (
        ("merge_kernel_size", config.get("merge_kernel_size", [2, 2]), [2, 2]),
        ("merger_times", config.get("merger_times", 1), 1),
        ("vision_config.window_kernel_size", vision.get("window_kernel_size", [2, 2]), [2, 2]),
    ):
        if value != only:
            raise StartupError(f"{name} {value} is not supported, only {only}")
    return _MERGED_SIDES[mode]
