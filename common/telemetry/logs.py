"""Logs: a line an event on stderr, JSON for machines and columns for a terminal, other people's libraries alike.

No prompt text and no media is logged, and of a URL its host alone. Libraries are heard from warnings on, however low
our own level is: some of them log URLs whole below that. gRPC's core, which is no Python, writes its own lines.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType

import structlog
from structlog.typing import EventDict, Processor

OURS = "framesieve"


def configure_logging(service: str, log_format: str, log_level: str) -> None:
    """Has every event of this process, of any thread and of any library, come as one line on stderr.

    log_format: console, json, or auto: console on a terminal.
    log_level: of our own events, debug, info or warning.
    """

    def named(_: object, __: str, event: EventDict) -> EventDict:
        return {**event, "service": service}

    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        named,
    ]
    # plain_traceback: the other one prints local variables, and prompts are among them.
    renderers: list[Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*before, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    level = logging.getLevelNamesMapping()[log_level.upper()]
    structlog.configure(
        processors=[*before, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: logging.getLogger(OURS),
        cache_logger_on_first_use=True,
    )
    _take_over(handler)
    logging.getLogger(OURS).setLevel(level)


def _take_over(handler: logging.Handler) -> None:
    """Everything goes to this handler: what libraries have set up, warnings, and what ends a thread or the process."""
    logging.captureWarnings(True)
    for logger in [logging.getLogger(name) for name in logging.root.manager.loggerDict]:
        logger.handlers.clear()
        logger.propagate = True
        if logger.level < logging.WARNING:
            logger.setLevel(logging.NOTSET)
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    log = structlog.get_logger()

    def ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.critical("the process ended by a bug", exc_info=(kind, error, trace))

    def thread_ended(given: threading.ExceptHookArgs) -> None:
        log.critical("a thread ended by a bug", exc_info=given.exc_value, thread=given.thread and given.thread.name)

    sys.excepthook = ended
    threading.excepthook = thread_ended
