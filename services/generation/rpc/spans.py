"""What traces tell of generation's own stages, out of the request's clock; the service that does the others tells them.

The engine's steps hold parts of many requests, and its thread knows no request's trace: each gets spans of its own.
"""

from __future__ import annotations

from common.telemetry.tracing import record
from services.generation.rpc.timing import Stage, StageClock

_OWN = (Stage.TRANSFER, Stage.WAIT_FOR_PREFILL, Stage.PREFILL)


def record_stages(clock: StageClock, error: BaseException | None = None) -> None:
    """Records the stages that took time, once the request is over. error: what cut the last of them short, if any."""
    intervals = clock.intervals_ns()
    for stage in _OWN:
        began_ns, ended_ns = intervals.get(stage, (0, 0))
        if ended_ns > began_ns:
            record(stage.name.lower(), began_ns, ended_ns)
    if Stage.PREFILL in intervals:
        _, began_ns = intervals[Stage.PREFILL]
        record("generate", began_ns, clock.now_ns() if error else began_ns + clock.generate_ns, error)
        return
    unfinished = next(stage for stage in Stage if stage not in intervals)
    if unfinished in _OWN:
        _, began_ns = intervals[Stage(unfinished - 1)]
        record(unfinished.name.lower(), began_ns, clock.now_ns(), error)
