"""The scripts of examples/ against `framesieve serve` with the embedded model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from demo.example import CLIP, QUESTIONS
from framesieve.common.process import free_port
from tests.integration.fleet import ROOT

QUESTION = QUESTIONS[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Runs a script with arguments; returns what it prints."""
    folder, port = tmp_path_factory.mktemp("sockets"), free_port()
    sockets = {name: f"unix:{folder}/{name}" for name in ("preprocessing-listen", "encoder-listen", "listen")}
    flags = [f"--{flag}={address}" for flag, address in sockets.items()]
    flags += [f"--http-listen=127.0.0.1:{port}", "--metrics-port=0"]
    command = [sys.executable, "-m", "framesieve", "serve", *flags]
    for service in ("encoder", "generation"):
        command += [f"--{service}-compile", "off"]
    addresses = {
        "FRAMESIEVE_SERVER": sockets["listen"],
        "FRAMESIEVE_ENCODER": sockets["encoder-listen"],
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
    }

    def run(script: str, *arguments: str | Path) -> str:
        asked = [sys.executable, ROOT / "examples" / script, *arguments]
        environment = {**os.environ, **addresses, "PYTHONPATH": str(ROOT)}
        return subprocess.run(asked, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            assert any("framesieve listens at" in line for line in process.stderr)
            yield run
        finally:
            process.kill()


def test_the_examples_print_what_they_promise(run: Callable[..., str], tmp_path: Path) -> None:
    shutil.copy(CLIP, tmp_path / "a.mp4")
    (tmp_path / "b.mp4").write_bytes(b"no video")
    assert run("ask.py", CLIP, QUESTION.text).splitlines()[0] == QUESTION.answer
    assert run("stream.py", CLIP, QUESTION.text) == f"{QUESTION.answer}\n"
    assert run("openai_client.py", CLIP, QUESTION.text) == f"{QUESTION.answer}\n"
    by_clip = {each["clip"]: each for each in map(json.loads, run("folder.py", tmp_path, QUESTION.text).splitlines())}
    assert by_clip["a.mp4"]["answer"] == QUESTION.answer
    assert by_clip["b.mp4"]["error"] == "MEDIA_REJECTED"
    moments = [json.loads(line) for line in run("vectors.py", CLIP).splitlines()]
    assert [each["time_s"] for each in moments] == sorted(each["time_s"] for each in moments)
    assert np.allclose([np.linalg.norm(each["vector"]) for each in moments], 1)
