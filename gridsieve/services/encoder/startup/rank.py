"""A worker rank: loads its tower, then encodes what it is sent until the service hangs up or ends.

`python -m gridsieve.services.encoder.startup.rank DESCRIPTOR`; only the service starts it.
"""

from __future__ import annotations

from gridsieve.services.compute.prepare import prepare

prepare()  # before the imports below, of which torch reads the environment once

import os
import sys
from pathlib import Path

import structlog
import torch

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import ExitStatus
from gridsieve.common.ranks import Orders
from gridsieve.common.telemetry.logs import configure_logging
from gridsieve.services.compute.device import device_of
from gridsieve.services.compute.group import leave
from gridsieve.services.encoder.settings import EncoderSettings
from gridsieve.services.encoder.startup.build import budget_of, join_ranks, load_rank, ranks_of, share_of
from gridsieve.services.encoder.tower.parallel.exchange import Exchange, adapter_of, unpacked, values_of
from gridsieve.services.encoder.tower.parallel.tower import DONE, NO_MEMORY, encode_share, packing_of
from gridsieve.services.encoder.tower.patches import Frames
from gridsieve.services.encoder.tower.tower import Tower

log = structlog.get_logger()


def main() -> ExitStatus:
    orders = Orders(int(sys.argv[1]))
    if not orders.facts:  # the service has ended since
        return ExitStatus.FINISHED
    settings, rank = EncoderSettings(**orders.facts["settings"]), int(orders.facts["rank"])
    configure_logging("encoder", settings.log_format, settings.log_level)
    structlog.contextvars.bind_contextvars(rank=rank)
    try:
        share = share_of(settings, rank)
        tower = load_rank(settings, device_of(settings.device, *ranks_of(settings), rank), share, hears=False)
        orders.answer(DONE)
        exchange = Exchange(join_ranks(Path(orders.facts["meeting"]), rank, settings, tower.device, share))
    except StartupError as error:
        log.error("cannot start", error=str(error))
        return ExitStatus.CANNOT_START
    except BrokenPipeError:  # the service could not start, and has ended
        return ExitStatus.FINISHED
    if share is None:
        run_shares(orders, tower, exchange, budget_of(tower, settings))
    elif not run_forwards(orders, tower, exchange):
        return ExitStatus.FAILED
    leave(tower.device)
    return ExitStatus.FINISHED


def run_shares(orders: Orders, tower: Tower, exchange: Exchange, max_tokens: int) -> None:
    """Encodes share after share until the service hangs up. max_tokens: of one forward."""
    packing = packing_of(tower, max_tokens)
    while (order := orders.receive()) is not None:
        with torch.inference_mode():
            slices = receive_slices(order, tower, exchange)
            try:
                embeds = encode_share(tower, slices, packing, adapter_of(order))
            except torch.AcceleratorError:  # the process can use the device no more
                raise
            except Exception as error:  # any other error fails this share and not the rank
                log.exception("a rank failed to compute its share")
                full = isinstance(error, torch.OutOfMemoryError)
                orders.answer(NO_MEMORY if full else str(error).encode() or b"an error without a message")
                continue
            orders.answer(DONE)
            exchange.send(embeds, 0).wait()


def run_forwards(orders: Orders, tower: Tower, exchange: Exchange) -> bool:
    """Computes its share of forward after forward until the service hangs up. False: one failed."""
    while (order := orders.receive()) is not None:
        try:
            with torch.inference_mode():
                tower.encode(receive_slices(order, tower, exchange))
        except Exception:  # the other ranks are left in a sum
            log.exception("a rank failed to compute its share")
            return False
    return True


def receive_slices(order: bytes, tower: Tower, exchange: Exchange) -> list[Frames]:
    """The slices that rank 0 has announced."""
    values = torch.empty(values_of(order), dtype=tower.patches.frame_dtype, device=tower.device)
    return unpacked(exchange.receive(values, 0), order)


if __name__ == "__main__":
    os._exit(main())  # see `compute.group.leave`
