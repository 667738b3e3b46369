"""Logs of a process on its stderr: JSON for a file, columns for a terminal."""

from __future__ import annotations

import json
import os
import pty
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
from common.telemetry.logs import configure_logging
configure_logging("encoder", "auto", sys.argv[1])
log = structlog.get_logger()
"""


def logged(code: str, log_level: str = "info", status: int = 0) -> list[dict[str, Any]]:
    """Log lines of a process that runs `code`."""
    command = [sys.executable, "-c", BEGIN + code, log_level]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == status, ran.stderr
    return [json.loads(line) for line in ran.stderr.splitlines()]


def test_an_event_is_a_json_line_with_its_service_and_request_and_those_below_the_level_are_dropped() -> None:
    code = """
structlog.contextvars.bind_contextvars(request_id="mine")
log.info("request ended", code="OK", seconds=0.5)
log.debug("dropped")
"""
    (line,) = logged(code)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line.pop("timestamp"))
    expected = {"event": "request ended", "level": "info", "service": "encoder", "code": "OK", "seconds": 0.5}
    assert line == {**expected, "request_id": "mine"}


def test_a_terminal_gets_columns_without_local_variables() -> None:
    code = """
log.info("serving", listen="here")
prompt = "xyzzy"
try:
    1 / 0
except Exception:
    log.exception("bug")
"""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", BEGIN + code, "info"], cwd=ROOT, stderr=theirs) as process:
        os.close(theirs)
        data = b""
        try:
            while piece := os.read(ours, 2**16):
                data += piece
        except OSError:  # the other end of the terminal was closed
            pass
        os.close(ours)
        assert process.wait(60) == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", data.decode())
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


def test_uncaught_exceptions_of_threads_and_of_the_process_are_logged() -> None:
    code = """
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
1 / 0
"""
    lines = logged(code, status=1)
    assert [line["event"] for line in lines] == ["a thread ended by a bug", "the process ended by a bug"]
    assert {line["level"] for line in lines} == {"critical"}
    assert all(line["exception"].endswith("ZeroDivisionError: division by zero") for line in lines)
