"""Logs: one line per event on stderr, JSON or columns for a terminal, for this project and its libraries alike.

Prompt texts and media are never logged, and of a URL only its host. Libraries log from warnings on, whatever our own
level: below that, some of them log whole URLs. gRPC's C core writes lines of its own.

It also owns the request stats: tokens, frames and bytes of a running request, added up for the line and the span that
report its end. They are numbers only, so no text of a caller gets into either.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from contextvars import ContextVar
from types import TracebackType
from typing import TypeAlias

import structlog
from structlog.typing import EventDict, Processor

OURS = "gridsieve"

RequestStats: TypeAlias = Counter[str]

_REQUEST_STATS: ContextVar[RequestStats | None] = ContextVar("request_stats", default=None)


def begin_request_stats() -> RequestStats:
    """New stats for the request of the running task and of the tasks that it starts."""
    begun: RequestStats = Counter()
    _REQUEST_STATS.set(begun)
    return begun


def add_request_stats(**sizes: int) -> None:
    """Adds to the stats of the running request, from the event loop's thread. Does nothing outside of requests."""
    if (running := _REQUEST_STATS.get()) is not None:
        for name, size in sizes.items():
            running[name] += size


def configure_logging(service: str, log_format: str, log_level: str) -> None:
    """Sends the events of all threads and libraries to stderr, one line each.

    log_format: console, json, or auto: console on a terminal, else json.
    log_level: of our own events: debug, info or warning.
    """

    def add_service(_: object, __: str, event: EventDict) -> EventDict:
        return {**event, "service": service}

    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
    ]
    # plain_traceback, because the default formatter prints local variables, which may hold prompts.
    renderers: list[Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    level = logging.getLevelNamesMapping()[log_level.upper()]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: logging.getLogger(OURS),
        cache_logger_on_first_use=True,
    )
    _redirect_all_to(handler)
    logging.getLogger(OURS).setLevel(level)


def _redirect_all_to(handler: logging.Handler) -> None:
    """Replaces the handlers that libraries set up, and logs warnings and uncaught exceptions of all threads."""
    logging.captureWarnings(True)
    for logger in [logging.getLogger(name) for name in logging.root.manager.loggerDict]:
        logger.handlers.clear()
        logger.propagate = True
        if logger.level < logging.WARNING:
            logger.setLevel(logging.NOTSET)
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    log = structlog.get_logger()

    def log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.critical("a bug ended the process", exc_info=(kind, error, trace))

    def log_thread_exception(given: threading.ExceptHookArgs) -> None:
        log.critical("a bug ended a thread", exc_info=given.exc_value, thread=given.thread and given.thread.name)

    sys.excepthook = log_exception
    threading.excepthook = log_thread_exception
