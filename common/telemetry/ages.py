"""When something was, as hosts tell each other: how long ago, so that no two hosts' clocks are ever compared.

    sender     at ────────── sent       "1.5 s ago"
    receiver              heard ▶ at = heard − 1.5 s, late by the time on the way

Moments are nanoseconds of this host's monotonic clock, which all of its processes share.
"""

from __future__ import annotations

import math
from time import monotonic_ns

from common.contract.errors import PeerContract

# Before anything that is measured; the largest float in nanoseconds is no number any more.
_LONG_AGO_S = 1e9


def ago_s(at_ns: int) -> float:
    """How long ago a moment of this host's was, in seconds; 0 for one that is yet to come."""
    return max(0, monotonic_ns() - at_ns) * 1e-9


def moment_ns(peers_ago_s: float, heard_ns: int) -> int:
    """The moment that a peer means. Raises PeerContract for one that is yet to come, or no number of seconds ago."""
    if not (math.isfinite(peers_ago_s) and peers_ago_s >= 0):
        raise PeerContract(f"nothing was {peers_ago_s} s ago")
    return heard_ns - round(min(peers_ago_s, _LONG_AGO_S) * 1e9)
