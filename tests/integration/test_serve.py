"""`gridsieve serve` with real services: a repository under its name, the examples, and its end by SIGKILL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.clips import another_file
from demo.example import CLIP, QUESTIONS
from gridsieve.cli.launcher import listens
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.process import free_port
from tests.gridsieve import test_readme as readme
from tests.integration.fleet import ROOT, until
from tests.processes import children, runs

REPOSITORY = "acme/Tiny-VL-2.5"
QUESTION = QUESTIONS[0]


@dataclass(frozen=True)
class Serving:
    """The command. addresses: of preprocessing, the encoder, generation and the gateway. printed: until they serve."""

    process: subprocess.Popen[str]
    addresses: list[str]
    printed: list[str]

    @property
    def url(self) -> str:
        return f"http://{self.addresses[-1]}/v1"

    def run(self, script: str, *arguments: str | Path) -> str:
        """Runs a script of examples/; returns what it prints."""
        return self.python(ROOT / "examples" / script, *arguments)

    def python(self, *arguments: str | Path) -> str:
        """Runs Python in the project's folder, with the addresses of the services; returns what it prints."""
        return self._output(sys.executable, *arguments)

    def shell(self, command: str) -> str:
        """As `python`, of a command of the README, whose addresses are those of the services."""
        for default, address in (("127.0.0.1:50053", self.addresses[2]), ("127.0.0.1:8000", self.addresses[3])):
            command = command.replace(default, address)
        return self._output("bash", "-c", command)

    def _output(self, *command: str | Path) -> str:
        preprocessing, encoder, generation, _ = self.addresses
        environment = {
            **os.environ,
            "GRIDSIEVE_SERVER": generation,
            "GRIDSIEVE_ENCODER": encoder,
            "GRIDSIEVE_INSPECT_ENCODER": encoder,
            "GRIDSIEVE_INSPECT_PREPROCESSING": preprocessing,
            "OPENAI_BASE_URL": self.url,
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        return subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """It serves the embedded model as a repository that Hugging Face's cache holds."""
    folder, home = tmp_path_factory.mktemp("serve"), tmp_path_factory.mktemp("huggingface")
    sockets = [f"unix:{folder}/{name}" for name in ("preprocessing", "encoder", "generation")]
    addresses = [*sockets, f"127.0.0.1:{free_port()}"]
    cached = home / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    shutil.copytree(DEMO_MODEL, cached / "snapshots" / "66285546d2b8")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("66285546d2b8")
    flags = ("--preprocessing-listen", "--encoder-listen", "--listen", "--http-listen")
    command = [sys.executable, "-m", "gridsieve", "serve", "--model", REPOSITORY, "--metrics-port", "0"]
    command += [f"{flag}={address}" for flag, address in zip(flags, addresses, strict=True)]
    command += ["--encoder-compile=off", "--generation-compile=off", "--media-root=demo"]
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "KMP_SETTINGS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            printed = [process.stderr.readline()]
            while printed[-1] and "gridsieve ask" not in printed[-1]:
                printed.append(process.stderr.readline())
            yield Serving(process, addresses, printed)
        finally:
            process.kill()


def test_a_repository_is_served_under_its_name_at_the_address_that_is_printed(serving: Serving) -> None:
    (said,) = [line for line in serving.printed if "gridsieve listens at" in line]
    assert f"http://{serving.addresses[-1]} " in said
    assert [each["id"] for each in httpx.get(f"{serving.url}/models").json()["data"]] == [REPOSITORY]
    body = {"model": REPOSITORY, "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1}
    answer = httpx.post(f"{serving.url}/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["model"]) == (200, REPOSITORY)


def test_a_film_above_the_inline_limit_is_uploaded_and_asked_about(serving: Serving) -> None:
    film = another_file(CLIP.read_bytes(), 64 * 2**20 + 1)
    with httpx.Client(base_url=f"http://{serving.addresses[-1]}", timeout=60) as http:
        told = http.get("/version").json()
        assert (told["version"], told["max_inline_bytes"]) == (version("gridsieve"), 64 * 2**20)
        assert told["uploads"] == {"file_bytes": 2**30, "all_bytes": 2**34, "expires_s": 24 * 3600}
        file_id = http.post("/v1/files", files={"file": ("film.mp4", film)}).json()["id"]
        content = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": QUESTION.text}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == QUESTION.answer
        http.delete(f"/v1/files/{file_id}")  # the command is killed, which leaves its folder behind


@pytest.mark.skipif(not Path(sys.prefix, "lib", "libiomp5.so").exists(), reason="Intel's OpenMP has no wheel here")
def test_the_encoder_and_generation_compute_with_the_openmp_of_intel(serving: Serving) -> None:
    """The runtime prints its settings when it is first used: what was set, and what holds."""
    assert sum("KMP_BLOCKTIME=1" in line for line in serving.printed) == 2 * 2


def test_the_commands_of_the_readme_that_ask_are_answered(serving: Serving, tmp_path: Path) -> None:
    asked = readme.commands()[3:10]
    told = [serving.shell(command.replace("kept.png", str(tmp_path / "kept.png"))) for command in asked]
    readme.check_answers(asked, told, tmp_path)


def test_the_examples_print_what_they_promise(serving: Serving, tmp_path: Path) -> None:
    shutil.copy(CLIP, tmp_path / "a.mp4")
    (tmp_path / "b.mp4").write_bytes(b"no video")
    for script in ("stream.py", "openai_client.py"):
        assert serving.run(script, CLIP, QUESTION.text) == f"{QUESTION.answer}\n"
    seen = [line.partition(" s: ") for line in serving.run("watch.py", CLIP, QUESTION.text, "4").splitlines()]
    assert QUESTION.answer in seen[-1][2]  # with frames that were late the model may say more
    assert all(float(time_s) >= 4 for time_s, _, _ in seen)
    lines = serving.run("folder.py", tmp_path, QUESTION.text).splitlines()
    by_clip = {each["clip"]: each for each in map(json.loads, lines)}
    assert by_clip["a.mp4"]["answer"] == QUESTION.answer
    assert by_clip["b.mp4"]["error"] == "MEDIA_REJECTED"
    assert f"clip.mp4: {QUESTION.answer}" in serving.run("batches.py", CLIP.parent, QUESTION.text).splitlines()
    moments = [json.loads(line) for line in serving.run("vectors.py", CLIP).splitlines()]
    assert [each["time_s"] for each in moments] == sorted(each["time_s"] for each in moments)
    assert np.allclose([np.linalg.norm(each["vector"]) for each in moments], 1)


def test_the_notebook_runs(serving: Serving) -> None:
    """Its cells, one after the other, within an event loop, as Jupyter runs them."""
    notebook = json.loads((ROOT / "examples" / "first_questions.ipynb").read_text())
    cells = "\n".join("".join(each["source"]) for each in notebook["cells"] if each["cell_type"] == "code")
    script = "import ast, asyncio, sys; code = compile(sys.argv[1], 'cells', 'exec', ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)\n"
    script += "async def main(): await eval(code, globals())\nasyncio.run(main())"
    lines = serving.python("-c", script, cells).splitlines()
    assert [line.partition(": ")[2] for line in lines[:3]] == [QUESTION.answer] * 3
    assert lines[-1] == "the red square"


async def test_services_end_when_the_command_is_killed(serving: Serving) -> None:
    """The last test of these services."""
    services = children(serving.process.pid)
    assert len(services) == 4
    assert all(map(listens, serving.addresses))
    serving.process.send_signal(signal.SIGKILL)
    await until(lambda: not any(map(listens, serving.addresses)), within_s=10)
    await until(lambda: not any(map(runs, services)), within_s=60)  # interpreters of low priority end slowly
