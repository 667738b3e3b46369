"""The service's side of one worker process: starts it, exchanges messages with it, kills it.

It belongs to the event loop that made it. It knows nothing of jobs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path

from gridsieve.common.contract.errors import StartupError
from gridsieve.services.preprocessing.workers.limits import Limits, Mechanism
from gridsieve.services.preprocessing.workers.protocol import Facts, Kind, Message, receive, send

_START = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv.pop()); importlib.import_module(sys.argv[4]).main()"
)
# A numeric library that the machine's variables set otherwise computes other bits than the service.
# CUDA_VISIBLE_DEVICES says which card it sees.
_KEPT_ENVIRONMENT = ("LD_LIBRARY_PATH", "OPENBLAS_", "OMP_", "MKL_", "CUDA_")
# Frames reuse the memory of those before them: otherwise malloc gives it back, and each of its pages costs a fault.
# What is kept counts to the memory limit of the next job, so it is little.
_OWN_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
}
_START_S = 60.0
_EXIT_S = 1.0


class Fault(StrEnum):
    """Why a worker is replaced. ABANDONED: its job was cancelled, and it did not stop."""

    CRASHED = "crashed"
    SLOW = "slow"
    MEMORY = "memory"
    CONTRACT = "contract"
    ABANDONED = "abandoned"


class WorkerFault(Exception):
    """A worker cannot be used any more. The text completes "the media cannot be decoded: …"."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


class WorkerProcess:
    """One worker process, which `start` makes. The caller must call `end`."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes], handle: int) -> None:
        """handle: the process's descriptor (pidfd)."""
        self.working = False  # a JOB was sent, and no DONE has come yet
        self._connection, self._process, self._handle = connection, process, handle
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    def start(cls, entry: str, limits: Limits) -> WorkerProcess:
        """entry: the module whose `main` it runs, found on this process's module path.

        The calling thread must outlive the worker: the kernel kills a worker when the thread that started it ends.
        Raises OSError where the machine is out of processes, descriptors or memory.
        """
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = (str(theirs.fileno()), json.dumps(asdict(limits)), str(os.getpid()), entry)
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT_ENVIRONMENT)}
        path = json.dumps([os.path.abspath(each) for each in sys.path])  # noqa: PTH100  Path resolves links
        try:
            with theirs:
                process = subprocess.Popen(  # noqa: S603  (the command is fixed)
                    [sys.executable, "-I", "-c", _START, *arguments, path],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=kept | _OWN_ENVIRONMENT,
                    start_new_session=True,
                )
            handle = os.pidfd_open(process.pid)
        except OSError:
            connection.close()  # a process that has started ends when its connection closes
            raise
        connection.setblocking(False)
        worker = cls(connection, process, handle)
        worker._loop.add_reader(handle, worker._note_exit)
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    def processor_s(self) -> float:
        """Processor time that it has used, in seconds. Source: proc_pid_stat(5), utime and stime."""
        after_name = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")

    @property
    def alive(self) -> bool:
        return os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None

    async def ready(self) -> frozenset[str]:
        """Waits until the worker is ready; returns what confines it.

        Raises WorkerFault if it does not start, StartupError if the worker says why.
        """
        try:
            async with asyncio.timeout(_START_S):
                message = await self.receive()
        except TimeoutError as error:
            raise WorkerFault(Fault.SLOW, f"it took more than {_START_S:g} s to start") from error
        message.close()
        if message.kind is Kind.FAILED:
            raise StartupError(message.facts.text("text"))
        return message.facts.names("confined_by", list(Mechanism))

    def send(self, kind: Kind, facts: Facts | None = None, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a message. Raises WorkerFault if the worker is gone or does not read."""
        try:
            send(self._connection, Message(kind, facts or Facts(), descriptors))
        except OSError as error:
            raise WorkerFault(Fault.CRASHED, "its decoder process is gone") from error
        self.working |= kind is Kind.JOB

    async def receive(self) -> Message:
        """The worker's next message. Raises WorkerFault once it has ended, PeerContract for a malformed message."""
        while True:
            alive = self.alive  # read first: messages sent before the worker ended are still received
            try:
                message = receive(self._connection)
                self.working &= message.kind is not Kind.DONE
                return message
            except BlockingIOError:
                if not alive:
                    break
            except EOFError:
                break
            await self._readable()
        await asyncio.wait([self._exited], timeout=_EXIT_S)
        raise WorkerFault(Fault.CRASHED, self._exit_text())

    async def end(self) -> None:
        """Kills the worker and all processes that it started, and closes its descriptors here."""
        if self._handle < 0:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # before it is reaped: until then its process id is not reused
        await asyncio.shield(self._exited)
        self._loop.remove_reader(self._handle)
        self._process.wait()
        os.close(self._handle)
        self._handle = -1
        self._connection.close()

    def _exit_text(self) -> str:
        status = os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if status is None:
            return "its decoder process closed the connection"
        if status.si_code == os.CLD_EXITED:
            return f"its decoder ended with status {status.si_status}"
        return f"its decoder crashed (signal {status.si_status})"

    def _note_exit(self) -> None:
        self._loop.remove_reader(self._handle)
        if not self._exited.done():
            self._exited.set_result(None)

    async def _readable(self) -> None:
        """Returns when there may be a message to receive, or the process has exited."""
        readable: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._connection, readable.cancel)  # unlike set_result, cancel may be called twice
        try:
            await asyncio.wait([readable, self._exited], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._loop.remove_reader(self._connection)
