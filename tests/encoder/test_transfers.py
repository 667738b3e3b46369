"""Readback copies on a stream of its own: after the work that it reads, without waiting for later work.

Without CUDA: the calls of torch are recorded. `tests/gpu/test_pruning_on_cuda.py` runs it on a device.
"""

from __future__ import annotations

from unittest.mock import MagicMock, call, patch

import torch

from services.encoder.tower.transfers import Readback


def test_readback_waits_for_earlier_work_and_not_for_later_work() -> None:
    cuda, (source, copied) = MagicMock(), (MagicMock(device=torch.device("cuda")), MagicMock())
    cuda.attach_mock(copied.copy_, "copy")
    with patch.object(torch, "cuda", cuda), patch.object(torch, "empty", return_value=copied) as empty:
        reading = Readback(source)
        assert empty.call_args.kwargs["pin_memory"]
        stream, done = cuda.Stream(), cuda.Event()
        entered, left = (
            cuda.mock_calls.index(call.stream().__enter__()),
            cuda.mock_calls.index(call.stream().__exit__(None, None, None)),
        )
        cuda.stream.assert_called_once_with(stream)
        assert call.Stream().wait_stream(cuda.current_stream()) in cuda.mock_calls[:entered]
        inside = cuda.mock_calls[entered + 1 : left]
        assert inside == [call.copy(source, non_blocking=True), call.Event(blocking=True), call.Event().record(stream)]
        done.synchronize.assert_not_called()  # the constructor does not wait
        assert reading.wait() == [copied]
        done.synchronize.assert_called_once_with()
        cuda.synchronize.assert_not_called()
