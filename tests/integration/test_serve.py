"""`framesieve serve` with real services: the name that it serves a repository under, and its end by SIGKILL."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from framesieve.cli.launcher import listens
from framesieve.common.process import free_port
from tests.integration.fleet import ROOT, children, runs, until

REPOSITORY = "acme/Tiny-VL-2.5"


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of preprocessing, the encoder, generation and the gateway."""
    folder = tmp_path_factory.mktemp("serve")
    return [
        *(f"unix:{folder}/{name}" for name in ("preprocessing", "encoder", "generation")),
        f"127.0.0.1:{free_port()}",
    ]


@pytest.fixture(scope="module")
def serving(
    addresses: list[str], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    """The command, which serves a repository that Hugging Face's cache holds."""
    home = tmp_path_factory.mktemp("huggingface")
    cached = home / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    shutil.copytree(tiny_checkpoint, cached / "snapshots" / "66285546d2b8")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("66285546d2b8")
    flags = ("--preprocessing-listen", "--encoder-listen", "--listen", "--http-listen")
    command = [sys.executable, "-m", "framesieve", "serve", "--model", REPOSITORY, "--metrics-port", "0"]
    command += [f"{flag}={address}" for flag, address in zip(flags, addresses, strict=True)]
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            assert any("framesieve listens at" in line for line in process.stderr)
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("serving")
def test_a_repository_is_served_under_its_name(addresses: list[str]) -> None:
    url = f"http://{addresses[-1]}/v1"
    assert [each["id"] for each in httpx.get(f"{url}/models").json()["data"]] == [REPOSITORY]
    body = {"model": REPOSITORY, "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1}
    answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["model"]) == (200, REPOSITORY)


async def test_services_end_when_the_command_is_killed(serving: subprocess.Popen[str], addresses: list[str]) -> None:
    services = children(serving.pid)
    assert len(services) == 4
    assert all(map(listens, addresses))
    serving.send_signal(signal.SIGKILL)
    await until(lambda: not any(map(listens, addresses)), within_s=10)
    await until(lambda: not any(map(runs, services)), within_s=60)  # interpreters of low priority end slowly
