"""Logs of a process on its stderr: JSON for a file, columns for a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
URL = "https://example.org/clip.mp4?key=xyzzy"

BEGIN = """
import logging, sys, threading, warnings
import structlog
theirs = logging.getLogger("a.library")
theirs.addHandler(logging.StreamHandler())
theirs.propagate = False
from gridsieve.common.telemetry.logs import configure_logging
configure_logging("encoder", sys.argv[1], sys.argv[2])
log = structlog.get_logger()
"""


def printed(code: str, log_format: str = "auto", log_level: str = "info", status: int = 0) -> str:
    """What a process that runs `code` prints."""
    command = [sys.executable, "-c", BEGIN + code, log_format, log_level]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == status, ran.stderr
    return ran.stderr


def logged(code: str, log_level: str = "info", status: int = 0) -> list[dict[str, Any]]:
    """Log lines of a process that runs `code`."""
    return [json.loads(line) for line in printed(code, log_level=log_level, status=status).splitlines()]


def test_the_console_format_has_columns_without_local_variables() -> None:
    code = """
log.info("serving", listen="here")
prompt = "xyzzy"
try:
    1 / 0
except Exception:
    log.exception("bug")
"""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed(code, "console"))
    assert re.search(r"^\S+Z \[info +\] serving +listen=here service=encoder", plain, re.MULTILINE)
    assert "ZeroDivisionError: division by zero" in plain
    assert "xyzzy" not in plain


def test_libraries_log_from_warnings_on_in_the_same_format() -> None:
    code = f"""
import httpx
from transformers.utils import logging as of_transformers
configure_logging("encoder", "json", "debug")
of_transformers.get_logger("transformers.models").warning("transformers.models")
for name in ("httpx", "httpcore.connection", "a.library"):
    logging.getLogger(name).debug("connect to {URL}")
    logging.getLogger(name).info("HTTP Request: GET {URL}")
    logging.getLogger(name).warning("%s", name)
warnings.warn("old")
"""
    *libraries, warned = logged(code, "debug")
    assert [(line["logger"], line["event"], line["level"]) for line in libraries] == [
        (name, name, "warning") for name in ("transformers.models", "httpx", "httpcore.connection", "a.library")
    ]
    assert "UserWarning: old" in warned["event"]
    assert {line["service"] for line in (*libraries, warned)} == {"encoder"}


def test_events_from_the_level_on_and_uncaught_exceptions_of_threads_and_of_the_process_are_lines_of_json() -> None:
    code = """
structlog.contextvars.bind_contextvars(request_id="mine")
log.info("request ended", code="OK", seconds=0.5)
log.debug("dropped")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
1 / 0
"""
    event, *lines = logged(code, status=1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", event.pop("timestamp"))
    expected = {"event": "request ended", "level": "info", "service": "encoder", "code": "OK", "seconds": 0.5}
    assert event == {**expected, "request_id": "mine"}
    assert [line["event"] for line in lines] == ["a bug ended a thread", "a bug ended the process"]
    assert {line["level"] for line in lines} == {"critical"}
    assert all(line["exception"].endswith("ZeroDivisionError: division by zero") for line in lines)
