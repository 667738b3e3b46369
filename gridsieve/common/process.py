"""What a process asks of its system: memory that malloc keeps, its share of the cores, open files, free ports, the end
of its parent; and the status it exits with.

Sources: mallopt(3), malloc_trim(3), setpriority(2), sched(7) on autogroups, getrlimit(2), pidfd_open(2), cgroups(7).
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from itertools import count
from pathlib import Path

# From glibc's malloc.h. 32 MiB is the largest threshold that glibc accepts.
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 32 * 2**20
_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES = -1, 512 * 2**20
_M_TOP_PAD, _TOP_PAD_BYTES = -2, 64 * 2**20

_NICE = 10
_HOST = "127.0.0.1"
# Below the range of ephemeral ports: an outgoing connection may hold one of those at any time.
_PORTS = range(10_000, 32_768)
_TRIES = 1_000

LAUNCHER = "GRIDSIEVE_LAUNCHER"
"""The variable that tells a service the pid of the launcher whose end is its own."""

_LIBC = ctypes.CDLL(None)
_places = count(random.randrange(len(_PORTS)))  # noqa: S311  (no secret)


class ExitStatus(IntEnum):
    """Exit status of a service and of `gridsieve serve`. Beside these: 128 + n after signal n, see `at_once`."""

    FINISHED = 0  # stopped by a signal, and every running request finished
    FAILED = 1  # a bug, or a service of `gridsieve serve` that ended by itself
    CANNOT_START = 2  # a StartupError
    CUT_OFF = 3  # stopped by a signal, and requests that outlasted the grace period were cancelled
    STUCK = 4  # a step or a forward that took longer than --step-timeout-s


def cores() -> float:
    """The cores that this process may use: those that it may run on, or its container's share of them."""
    count = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):  # "max": no limit
        quota_us, period_us = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())  # cgroup v2
        count = min(count, quota_us / period_us)
    return count


def memory_bytes() -> int:
    """The memory that this process may use: the machine's, or its container's."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # cgroup v2 and v1
        with suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(Path(path).read_text()))
    return min(limits)


def at_once(number: int) -> int:
    """Exit status of a process that signal `number` ended at once: a second signal, or one before it was ready."""
    return 128 + number


def keep_freed_memory() -> bool:
    """Makes malloc keep up to half a GiB of freed memory. Returns False, and does nothing, without glibc.

    Services allocate and free tensors of megabytes with every message and layer. Memory that goes back to the kernel
    costs a page fault per 4 KiB when it is allocated again.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(option, size_bytes)
        for option, size_bytes in (
            (_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
            (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES),
            (_M_TOP_PAD, _TOP_PAD_BYTES),
        )
    )


def give_back_freed_memory() -> None:
    """Returns freed memory to the kernel once, for processes that will idle. Does nothing without glibc."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def leave_cores_to_others() -> None:
    """Lowers the priority of this thread, and of threads and processes that it starts from now on.

    Cores that nobody else wants are still their own. Where Linux groups processes by session, priorities count within a
    session only, and the group has one of its own.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    if os.getsid(0) == os.getpid():  # otherwise the group is a terminal's or a script's
        with suppress(OSError):  # not Linux, or built without autogroups
            Path("/proc/self/autogroup").write_text(str(_NICE))


def allow_open_files() -> None:
    """Raises the soft limit of open files to the hard limit. The usual 1024 is for programs that use select(2)."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def when_parent_ends(parent: int, end: Callable[[], object]) -> None:
    """Calls `end`, from a thread, once the process that started this one has ended; `parent` is the pid that it had."""
    handle = os.pidfd_open(os.getppid())
    if os.getppid() != parent:  # it has ended already, and another process has adopted this one
        end()

    def watch() -> None:
        ends = select.poll()
        ends.register(handle, select.POLLIN)
        ends.poll()
        end()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on, a different one with each call. It is not reserved.

    Raises OSError after 1000 ports that are in use.
    """
    for _ in range(_TRIES):
        port = _PORTS[next(_places) % len(_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {_TRIES} ports of {_HOST} from {_PORTS.start} to {_PORTS.stop - 1} is free")
