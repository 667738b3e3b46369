"""Logs of a process of its own, as whoever reads its stderr gets them: a file, or a terminal."""

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
heard = logging.getLogger("a.library")
heard.addHandler(logging.StreamHandler())
heard.propagate = False
from common.telemetry.logs import configure_logging
configure_logging("encoder", sys.argv[1], sys.argv[2])
log = structlog.get_logger()
"""


def logged(code: str, log_format: str = "auto", log_level: str = "info", status: int = 0) -> list[dict[str, Any]]:
    """What a process logs that runs `code`."""
    ran = subprocess.run(_command(code, log_format, log_level), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == status, ran.stderr
    return [json.loads(line) for line in ran.stderr.splitlines()]


def shown(code: str) -> str:
    """What a terminal shows of it."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(_command(code, "auto", "info"), cwd=ROOT, stderr=theirs) as process:
        os.close(theirs)
        data = b""
        try:
            while piece := os.read(ours, 2**16):
                data += piece
        except OSError:  # how a terminal says that nobody writes any more
            pass
        os.close(ours)
        assert process.wait(60) == 0
    return data.decode()


def _command(code: str, log_format: str, log_level: str) -> list[str]:
    return [sys.executable, "-c", BEGIN + code, log_format, log_level]


def test_an_event_is_a_line_of_json_with_its_service_and_request_from_any_thread() -> None:
    code = """
structlog.contextvars.bind_contextvars(request_id="mine")
log.info("request ended", code="OK", seconds=0.5)
threading.Thread(target=log.warning, args=["from a thread"]).start()
"""
    first, second = logged(code)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", first.pop("timestamp"))
    told = {"event": "request ended", "level": "info", "service": "encoder", "code": "OK", "seconds": 0.5}
    assert first == {**told, "request_id": "mine"}
    assert (second["event"], second["level"], second["service"]) == ("from a thread", "warning", "encoder")


def test_a_terminal_shows_columns_without_the_values_of_variables() -> None:
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


@pytest.mark.parametrize(
    ("log_level", "heard"),
    [("debug", ["debug", "info", "warning"]), ("info", ["info", "warning"]), ("warning", ["warning"])],
)
def test_what_is_below_the_level_is_not_logged(log_level: str, heard: list[str]) -> None:
    code = 'log.debug("said")\nlog.info("said")\nlog.warning("said")'
    assert [line["level"] for line in logged(code, "json", log_level)] == heard


def test_an_exception_comes_with_its_trace() -> None:
    (line,) = logged('def fails():\n    1 / 0\ntry:\n    fails()\nexcept Exception:\n    log.exception("bug")')
    assert (line["event"], line["level"]) == ("bug", "error")
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert ", in fails\n" in line["exception"]
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_libraries_are_heard_from_warnings_on_in_the_same_format() -> None:
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


def test_transformers_warns_in_the_same_format_once_services_have_imported_it() -> None:
    code = """
import services.encoder.__main__
configure_logging("encoder", "json", "info")
from transformers.utils import logging as theirs
theirs.get_logger("transformers.models").warning("careful")
"""
    (line,) = logged(code)
    assert (line["logger"], line["event"]) == ("transformers.models", "careful")


@pytest.mark.parametrize(
    ("code", "event", "status"),
    [
        ("1 / 0", "the process ended by a bug", 1),
        ("thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()", "a thread ended by a bug", 0),
    ],
)
def test_what_ends_a_process_or_a_thread_is_logged_with_its_trace(code: str, event: str, status: int) -> None:
    (line,) = logged(code, status=status)
    assert (line["event"], line["level"]) == (event, "critical")
    assert line["exception"].endswith("ZeroDivisionError: division by zero")
