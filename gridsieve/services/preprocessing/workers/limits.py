"""The limits of one job, and the sandbox of a worker process, which is in place before it reads untrusted bytes.

It knows nothing of jobs. Where the kernel lacks one mechanism (Landlock, user namespaces), the others still hold.
Source: prctl(2), landlock(7), netdevice(7), and the structures of linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# CUDA opens a few dozens of the driver's files for itself.
_DESCRIPTORS, _CARD_DESCRIPTORS = 32, 256

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER_AND_NEWNET = 0x10000000 | 0x40000000
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION_FLAG = 1
_LANDLOCK_PATH_BENEATH = 1
_LANDLOCK_READ = 1 << 2 | 1 << 3
_LANDLOCK_NET_PORT = 2
_LANDLOCK_CONNECT = 2
_BIND_AND_CONNECT = _SOCKETS_AND_SIGNALS = 3
# Rights that can be withheld and the size of the structure that names them, by the first ABI that knows them.
_LANDLOCK_FILE_RIGHTS = {1: 2**13 - 1, 2: 2**14 - 1, 3: 2**15 - 1, 5: 2**16 - 1}
_LANDLOCK_SIZES = {1: 8, 4: 16, 6: 24}
_LANDLOCK_PORTS_ABI = 4

_SIOCSIFFLAGS, _IFF_UP_AND_RUNNING = 0x8914, 0x41


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of one job.

    stall_s: seconds that its worker works without progress, which is reading a packet.
    frame_s: seconds of work for each frame that is asked for, on average, beside stall_s.
    memory_bytes: address space beyond that of an idle worker.
    file_bytes, frames, length_s: size of the media file, frames of a video, and its duration in seconds.
    Waiting for the job's reader is not work.
    """

    stall_s: float
    frame_s: float
    memory_bytes: int
    file_bytes: int
    frames: int
    length_s: int

    def work_s(self, frames: int) -> float:
        """Seconds of work on a job that makes `frames` frames."""
        return self.stall_s + self.frame_s * frames


class Mechanism(StrEnum):
    """What confines a worker: user and network namespaces of its own, and Landlock's rights to files and ports."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"


@dataclass(frozen=True, slots=True)
class Confined:
    """by: the mechanisms that the kernel has granted; without the others, the worker can reach more.

    listener: on loopback and the one port to which it can connect, if it asked for one. Landlock's rule of a port has
    no address: without namespaces, it can connect to that port of any host.
    """

    by: list[Mechanism]
    listener: socket.socket | None


def confine(memory_bytes: int, parent: int, listens: bool = False, on_card: bool = False) -> Confined:
    """Irrevocably drops every right that decoding does not need. Call it before starting any thread.

    The kernel kills this process first when memory runs out, and at once when `parent` dies. The process keeps its
    open descriptors. It can open only the files of Python's libraries; it cannot use the network, trace or signal
    other processes, or dump core. memory_bytes: address space beyond what is used now. listens: it may connect to
    itself, and without namespaces to that port of any host, see `Confined`.

    on_card: it uses CUDA, which reserves far more addresses than memory, and opens the driver's libraries, devices and
    files of /proc and /sys while it runs, with rights that a user namespace may lack. So its addresses, its files and
    its namespaces stay as they are, and neither mechanism counts as granted.
    """
    with suppress(OSError):  # where /proc is read-only
        Path("/proc/self/oom_score_adj").write_text("1000")
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_FSIZE: memory_bytes,
        resource.RLIMIT_NOFILE: _CARD_DESCRIPTORS if on_card else _DESCRIPTORS,
        resource.RLIMIT_CORE: 0,
    }
    if not on_card:
        limits[resource.RLIMIT_AS] = used_bytes + memory_bytes
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    granted = []
    if not on_card and libc.unshare(_CLONE_NEWUSER_AND_NEWNET) == 0:  # refused in many containers
        granted.append(Mechanism.NAMESPACES)
    listener = _listener(Mechanism.NAMESPACES in granted) if listens else None
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if _landlock(libc, listener, on_card) and not on_card:
        granted.append(Mechanism.LANDLOCK)
    # Last: a change of credentials, which a new user namespace is, clears it.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(0)
    return Confined(granted, listener)


def _listener(own_network: bool) -> socket.socket:
    """Listens on a port of loopback. own_network: loopback is this process's own, and down."""
    listener = socket.socket()
    if own_network:
        fcntl.ioctl(listener, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP_AND_RUNNING))
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def _landlock(libc: ctypes.CDLL, listener: socket.socket | None, keeps_files: bool) -> bool:
    """Drops every right to files, and to ports and other processes where the kernel supports it. False without it.

    listener: to whose port it may still connect. keeps_files: it drops the other rights alone.
    """
    abi = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION_FLAG)
    if abi < (_LANDLOCK_PORTS_ABI if keeps_files else 1):
        return False
    files = 0 if keeps_files else _LANDLOCK_FILE_RIGHTS[max(each for each in _LANDLOCK_FILE_RIGHTS if each <= abi)]
    size = _LANDLOCK_SIZES[max(each for each in _LANDLOCK_SIZES if each <= abi)]
    rules = struct.pack("=3Q", files, _BIND_AND_CONNECT, _SOCKETS_AND_SIGNALS)
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(size), 0)
    failed = ruleset < 0
    # Libraries import some of their parts on first use.
    for name in () if keeps_files else ("stdlib", "platstdlib", "purelib", "platlib"):
        with _folder(sysconfig.get_path(name)) as folder:
            rule = struct.pack("=Qi", _LANDLOCK_READ, folder)
            failed |= libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, rule, 0) != 0
    if listener and abi >= _LANDLOCK_PORTS_ABI:
        rule = struct.pack("=2Q", _LANDLOCK_CONNECT, listener.getsockname()[1])
        failed |= libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_NET_PORT, rule, 0) != 0
    if failed or libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock")
    os.close(ruleset)
    return True


@contextmanager
def _folder(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
