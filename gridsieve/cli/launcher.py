"""Runs the services as child processes: starts, watches and stops them together.

    preprocessing ◀── encoder ◀── generation ◀── gateway     started together; ready when all health checks pass;
                                                             stopped from right to left, so that running requests
                                                             complete

On one GPU, generation starts once the encoder is SERVING: it measures the memory that is left for its cache.

Each child has its own session, so a Ctrl-C in the terminal reaches this process alone, which then drains the children
(`gridsieve.cli.signals`). Children whose launcher is killed drain by themselves, all at the same time. It knows the
services by their module names and flags only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes.util import find_library
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Self

import grpc

from gridsieve.common.address import check_address, is_unix
from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import LAUNCHER, ExitStatus, free_port
from gridsieve.common.security.credentials import Credentials
from gridsieve.common.serving.probe import http_url, is_serving, own_credentials, serves_http

SERVICES = ("preprocessing", "encoder", "generation")
GATEWAY = "gateway"
# Some of the packages that the extra of each service installs.
PACKAGES = {
    "preprocessing": ("av", "httpx", "jinja2", "tokenizers"),
    "encoder": ("safetensors", "torch", "transformers"),
    "generation": ("safetensors", "tokenizers", "torch", "transformers"),
    GATEWAY: ("httptools", "sse_starlette", "starlette", "uvicorn"),
}
_UPSTREAM = {"preprocessing": (), "encoder": SERVICES[:1], "generation": SERVICES[:2], GATEWAY: SERVICES[1:]}
_OF_UPLOADS = ("preprocessing", GATEWAY)
_RANKS = {"encoder": ("data-parallel", "tower-tensor-parallel"), "generation": ("tensor-parallel",)}
POLL_S = 0.1
REPORT_S = 10.0
PROBE_S = 1.0
LOOK_S = 1.0
LOG_TAIL_LINES = 20
KILL_AFTER_DRAIN_S = 5.0
STDERR = 2


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of one service, host:port or unix:/path, and the port of its /metrics (0: none).

    The gateway serves /metrics at its address.
    """

    address: str
    metrics_port: int


@dataclass(eq=False)
class LocalStack:
    """Services on this machine, as a context manager, async or not.

        with LocalStack(model) as stack:
            ... stack.address ...

    model: a checkpoint folder or a Hugging Face repository; None: the embedded demo model.
    services: which services to start; each needs those before it. By default not the gateway.
    media_root: the folder that preprocessing may read paths from; None: none.
    endpoints: by service; None: unix sockets in a temporary folder, and free loopback ports for metrics.
    flags: additional command-line flags, by service. Without --upload-root among them, a gateway keeps uploaded files
        in a private folder until the stack stops.
    show_logs: services write to this process's stderr; otherwise to temporary files, which `log` reads.
    drain_s: how long each service may take to finish running requests when the stack stops.
    ready_timeout_s: how long the start may take; None: as long as all services live, since a first start may compile.
    report: called every REPORT_S with what the start waits for.
    Raises StartupError if an address is taken, and, with the end of the log, if a service ends or is not ready in time.
    """

    model: Path | None = None
    _: KW_ONLY
    services: Sequence[str] = SERVICES
    media_root: Path | None = None
    endpoints: Mapping[str, Endpoint] | None = None
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    show_logs: bool = False
    drain_s: float = 30.0
    ready_timeout_s: float | None = None
    report: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._credentials: dict[str, Credentials] = {}
        self._cleanup = contextlib.ExitStack()
        self._folder = Path()
        self._upload_root = ""
        # A plain bool, not threading.Event: Event.set in a signal handler can deadlock with the wait it interrupted.
        self._given_up = False

    @property
    def address(self) -> str:
        """The address of generation, which clients call."""
        return self._endpoints["generation"].address

    @property
    def url(self) -> str:
        """Where the gateway serves HTTP."""
        return http_url(self._endpoints[GATEWAY].address, os.environ)

    @property
    def addresses(self) -> dict[str, str]:
        return {name: self._endpoints[name].address for name in self.services}

    @property
    def metrics_ports(self) -> dict[str, int]:
        """Of the services, without the gateway."""
        return {name: self._endpoints[name].metrics_port for name in self.services if name != GATEWAY}

    def log(self, service: str) -> str:
        """The service's output so far; empty with show_logs."""
        path = self._folder / f"{service}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # --- starting -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the services and returns when all are ready."""
        try:
            check_packages(self.services)
            self._folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="gridsieve-")))
            self._endpoints = dict(self.endpoints or _own_endpoints(self._folder))
            if GATEWAY in self.services:
                self._upload_root = self._find_upload_root()
            if self.model:  # checked, and downloaded, once for all services
                self.model = Checkpoint.find(self.model).folder
            for service in self.services:
                self._prepare(service)
            self._start_all()
        except BaseException:
            self.kill()
            raise

    def _prepare(self, service: str) -> None:
        """Raises StartupError if the address is taken, which health checks would not notice."""
        address, metrics_port = self._endpoints[service].address, self._endpoints[service].metrics_port
        flag = {"generation": "--listen", GATEWAY: "--http-listen"}.get(service, f"--{service}-listen")
        check_address(flag, address)
        if listens(address):
            raise StartupError(
                f"the address {address} of {service} is already in use: stop that process or choose another {flag}"
            )
        if metrics_port and listens(f"127.0.0.1:{metrics_port}"):
            raise StartupError(
                f"the port {metrics_port} of {service}'s metrics is already in use: stop that process or choose "
                f"another --metrics-port, the first of three in a row"
            )
        self._credentials[service] = own_credentials(address, os.environ)

    def _find_upload_root(self) -> str:
        """The folder that the gateway writes and preprocessing reads: the one that a flag names, or a private one."""
        given = self._setting(GATEWAY, "upload-root", self._setting("preprocessing", "upload-root", ""))
        if given:
            return given
        own = self._folder / "uploads"
        own.mkdir(0o700)
        return str(own)

    def _spawn(self, service: str) -> subprocess.Popen[bytes]:
        endpoint = self._endpoints[service]
        command = [
            # -P: do not import a folder named "gridsieve" in the current directory.
            *(sys.executable, "-P", "-m", f"gridsieve.services.{service}"),
            *("--listen", endpoint.address),
            *(("--metrics-port", str(endpoint.metrics_port)) if service != GATEWAY else ()),
            *("--drain-s", str(self.drain_s)),
            *(("--model", str(self.model)) if self.model and service != GATEWAY else ()),
            *(("--media-root", str(self.media_root)) if self.media_root and service == "preprocessing" else ()),
            *(("--upload-root", self._upload_root) if self._upload_root and service in _OF_UPLOADS else ()),
            *(flag for name in _UPSTREAM[service] for flag in (f"--{name}", self._endpoints[name].address)),
            *self.flags.get(service, ()),
        ]
        with contextlib.ExitStack() as stack:
            path = self._folder / f"{service}.log"
            output = STDERR if self.show_logs else stack.enter_context(path.open("wb"))
            return subprocess.Popen(  # noqa: S603  (not user input)
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment()
                | {LAUNCHER: str(os.getpid())}
                | (_faster_malloc() if service in ("encoder", "generation") else {}),
                start_new_session=True,
            )

    def _start_all(self) -> None:
        began_s = time.monotonic()
        for service in self.services:
            if service == "generation" and self._gpus("encoder") & self._gpus("generation"):
                self._wait_until_ready(["encoder"], began_s)
            self.processes[service] = self._spawn(service)
        self._wait_until_ready(self.services, began_s)

    def _wait_until_ready(self, services: Iterable[str], began_s: float) -> None:
        """began_s: when the start began, on the monotonic clock."""
        waiting, reports = list(services), int((time.monotonic() - began_s) // REPORT_S)
        while waiting:
            if self._given_up:
                raise StartupError("the start was cancelled")
            ended = self.ended()
            if ended:
                raise StartupError(f"{ended} {self._how_it_ended(ended)}")
            elapsed_s = time.monotonic() - began_s
            if self.ready_timeout_s is not None and elapsed_s > self.ready_timeout_s:
                raise StartupError(
                    f"{waiting[0]} was not ready after {self.ready_timeout_s:g} s{self._log_tail(waiting[0])}"
                )
            waiting = [service for service in waiting if not self._is_serving(service)]
            if waiting and elapsed_s >= (reports + 1) * REPORT_S:
                reports = int(elapsed_s // REPORT_S)
                self.report(f"still starting after {reports * REPORT_S:g} s: {', '.join(waiting)}")
            time.sleep(POLL_S)

    def _is_serving(self, service: str) -> bool:
        address = self._endpoints[service].address
        try:
            if service == GATEWAY:
                return serves_http(address, os.environ, PROBE_S)
            return is_serving(address, self._credentials[service], PROBE_S)
        except (grpc.RpcError, OSError):
            return False

    def _gpus(self, service: str) -> set[int]:
        """The GPUs that the encoder or generation will use; none if it will compute on the CPU."""
        kind, _, index = self._setting(service, "device", "auto").partition(":")
        if kind == "cpu" or (kind == "auto" and not _has_gpu()):
            return set()
        try:
            first, ranks = int(index or 0), max(int(self._setting(service, flag, "1")) for flag in _RANKS[service])
        except ValueError:  # the service itself reports it
            return set()
        return set(range(first, first + ranks))

    def _setting(self, service: str, name: str, default: str) -> str:
        """What a flag of the service says, as `--name value` or `--name=value`, or its variable."""
        variable = f"GRIDSIEVE_{name.replace('-', '_').upper()}"  # which the services read in any case
        value = next((each for key, each in os.environ.items() if key.upper() == variable), "") or default
        flags = self.flags.get(service, ())
        for flag, following in zip_longest(flags, flags[1:], fillvalue=""):
            given, equals, inline = flag.partition("=")
            if given == f"--{name}":
                value = inline if equals else following
        return value

    # --- watching -----------------------------------------------------------------------------------------------

    def ended(self) -> str | None:
        """The name of a service that has ended, or None."""
        return next((name for name, process in self.processes.items() if _has_ended(process)), None)

    def watch(self) -> None:
        """Blocks until `end` is called. Raises StartupError when a service ends by itself."""
        while (ended := self.ended()) is None:
            if self._given_up:
                return
            time.sleep(POLL_S)
        raise StartupError(f"{ended} {self._how_it_ended(ended)}")

    def _how_it_ended(self, service: str) -> str:
        status = self.processes[service].wait()
        if status == ExitStatus.CANNOT_START and self.show_logs:
            return "cannot start, for the reason above"
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{how}{self._log_tail(service)}"

    def _log_tail(self, service: str) -> str:
        lines = self.log(service).rstrip().splitlines()[-LOG_TAIL_LINES:]
        return "".join(f"\n  {line}" for line in lines)

    # --- stopping -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Makes `watch` return and cancels a running `start`. Safe in a signal handler."""
        self._given_up = True

    @property
    def exit_status(self) -> ExitStatus:
        """After `stop`: the combined exit status of the services."""
        ended = {process.returncode for process in self.processes.values()}
        if ended <= {ExitStatus.FINISHED}:
            return ExitStatus.FINISHED
        cut_off = {ExitStatus.FINISHED, ExitStatus.CUT_OFF, -signal.SIGKILL}  # SIGKILL: killed after its grace period
        return ExitStatus.CUT_OFF if ended <= cut_off else ExitStatus.FAILED

    def stop(self) -> None:
        """Drains and stops the services, the last first; kills a service that exceeds its grace."""
        try:
            for process in reversed(self.processes.values()):
                if _has_ended(process):
                    continue
                os.kill(process.pid, signal.SIGTERM)
                deadline = time.monotonic() + self.drain_s + KILL_AFTER_DRAIN_S
                while not _has_ended(process) and time.monotonic() < deadline:
                    time.sleep(POLL_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills all running services and their child processes."""
        self._kill_groups()
        for process in self.processes.values():
            process.wait()
        self._cleanup.close()

    def kill_unwaited(self) -> None:
        """`kill` for signal handlers: does not wait, since the interrupted code may hold Popen's lock."""
        self._kill_groups()
        with contextlib.suppress(OSError):
            self._cleanup.close()

    def _kill_groups(self) -> None:
        """Skips processes that were waited for: their pid may have been reused."""
        for process in self.processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: make `start` return, then kill what it started.
            self.end()
            await asyncio.wait([starting])
            self.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)


def check_packages(services: Sequence[str]) -> None:
    """Raises StartupError if packages are missing, with the extras that install them."""
    missing = {service: [name for name in PACKAGES[service] if find_spec(name) is None] for service in services}
    extras = [service for service, names in missing.items() if names]
    if extras:
        names = ", ".join(dict.fromkeys(name for service in extras for name in missing[service]))
        raise StartupError(f"missing packages: {names}; they come with pip install 'gridsieve[{','.join(extras)}]'")


def _has_gpu() -> bool:
    """Whether CUDA's driver finds a GPU that this process and its children may use."""
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) == 0)
    except OSError:
        return False


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without Popen's lock, and without reaping: the pid stays valid until `kill` or `_how_it_ended` waits.

    An exception that a signal handler raises inside Popen.poll or Popen.wait may leave the lock taken, and the next
    wait would hang.
    """
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return process.returncode is not None or os.waitid(os.P_PID, process.pid, options) is not None


def listens(address: str) -> bool:
    """Whether a process accepts connections at an address; False for a malformed address or a stale socket file."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        if is_unix(address):
            kind, _, path = address.partition(":")
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(LOOK_S)
                connection.connect(f"\0{path}" if kind == "unix-abstract" else path)
                return True
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), LOOK_S):
            return True
    return False


def _own_endpoints(folder: Path) -> dict[str, Endpoint]:
    own = {name: Endpoint(f"unix:{folder}/{name}.sock", free_port()) for name in SERVICES}
    return {**own, GATEWAY: Endpoint(f"127.0.0.1:{free_port()}", 0)}


def environment() -> dict[str, str]:
    """This process's environment, with the folder of this checkout or installation on PYTHONPATH."""
    path = filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@cache
def _faster_malloc() -> dict[str, str]:
    """Preloads tcmalloc where the system has it: forwards allocate a tensor in every operator. {} without it."""
    library = find_library("tcmalloc_minimal")
    return {"LD_PRELOAD": " ".join(filter(None, (os.environ.get("LD_PRELOAD"), library)))} if library else {}
