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

import pytest

ROOT = Path(__file__).parents[2]
URL = "https://example.org/clip.mp4?key=xyzzy"

BEGIN = """
import logging, sys, threading, warnings
import structlog
theirs = logging.getLogger("a.library")
theirs.addHandler(logging.StreamHandler())
theirs.propagate = False
from common.telemetry.logs import configure_logging
configure_logging("encoder", sys.argv[1], sys.argv[2])
log = structlog.get_logger()
"""


def logged(code: str, log_format: str = "auto", log_level: str = "info", status: int = 0) -> list[dict[str, Any]]:
    """Log lines of a process that runs `code`."""
    ran = subprocess.run(_command(code, log_format, log_level), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == status, ran.stderr
    return [json.loads(line) for line in ran.stderr.splitlines()]


def shown(code: str) -> str:
    """Output of such a process on a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(_command(code, "auto", "info"), cwd=ROOT, stderr=theirs) as process:
        os.close(theirs)
        data = b""
        try:
            while piece := os.read(ours, 2**16):
                data += piece
        except OSError:  # the other end of the terminal was closed
            pass
        os.close(ours)
        assert process.wait(60) == 0
    return data.decode()


def _command(code: str, log_format: str, log_level: str) -> list[str]:
    return [sys.executable, "-c", BEGIN + code, log_format, log_level]


def test_an_event_of_any_thread_is_a_json_line_with_its_service_and_request() -> None:
    code = """
structlog.contextvars.bind_contextvars(request_id="mine")
log.info("request ended", code="OK", seconds=0.5)
threading.Thread(target=log.warning, args=["from a thread"]).start()
"""
    first, second = logged(code)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", first.pop("timestamp"))
    expected = {"event": "request ended", "level": "info", "service": "encoder", "code": "OK", "seconds": 0.5}
    assert first == {**expected, "request_id": "mine"}
    assert (second["event"], second["level"], second["service"]) == ("from a thread", "warning", "encoder")


def test_a_terminal_gets_columns_without_local_variables() -> None:
    code = """
log.info("serving", listen="here")
prompt = "xyzzy"
try:
    1 / 0
except Exception:
    log.exception("bug")
"""
    text = shown(code)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert re.search(r"^\S+Z \[info +\] serving +listen=here service=encoder", plain, re.MULTILINE)
    assert "ZeroDivisionError: division by zero" in plain
    assert "xyzzy" not in plain
    with pytest.raises(json.JSONDecodeError):
        json.loads(text.splitlines()[0])


def test_events_below_the_level_are_dropped_and_exceptions_have_a_traceback() -> None:
    code = """
def fails():
    1 / 0
log.debug("dropped")
log.info("dropped")
try:
    fails()
except Exception:
    log.exception("bug")
"""
    (line,) = logged(code, "json", "warning")
    assert (line["event"], line["level"]) == ("bug", "error")
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert ", in fails\n" in line["exception"]
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_libraries_log_from_warnings_on_in_the_same_format() -> None:
    code = f"""
import httpx
for name in ("httpx", "httpcore.connection", "a.library"):
    logging.getLogger(name).debug("connect to {URL}")
    logging.getLogger(name).info("HTTP Request: GET {URL}")
    logging.getLogger(name).warning("%s", name)
warnings.warn("old")
try:
    1 / 0
except Exception:
    logging.getLogger("asyncio").exception("task failed")
"""
    *libraries, warned, failed = logged(code, "json", "debug")
    assert [(line["logger"], line["event"], line["level"]) for line in libraries] == [
        (name, name, "warning") for name in ("httpx", "httpcore.connection", "a.library")
    ]
    assert "UserWarning: old" in warned["event"]
    assert failed["exception"].endswith("ZeroDivisionError: division by zero")
    assert {line["service"] for line in (*libraries, warned, failed)} == {"encoder"}


def test_transformers_that_was_imported_before_logs_in_the_same_format() -> None:
    code = """
from transformers.utils import logging as theirs
configure_logging("encoder", "json", "info")
theirs.get_logger("transformers.models").warning("careful")
"""
    (line,) = logged(code)
    assert (line["logger"], line["event"]) == ("transformers.models", "careful")


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
