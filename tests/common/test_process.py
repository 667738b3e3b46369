"""Process settings: free ports, cores, and memory that malloc keeps."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gridsieve.common.process import cores, free_port


def test_free_ports_differ_and_lie_below_the_ephemeral_range() -> None:
    lowest, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == len(ports)
    assert all(1024 <= port < lowest for port in ports)


def test_a_port_in_use_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_port()
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setattr("gridsieve.common.process._PORTS", [taken, free])
        assert {free_port() for _ in range(2)} == {free}
        monkeypatch.setattr("gridsieve.common.process._PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match="none of 1000 ports"):
            free_port()


PROGRAM = """
import resource, sys
import numpy as np
from gridsieve.common.process import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def touch():
    for number in range(4):
        several = [np.ones(mebibytes << 20, np.uint8) for mebibytes in (8, 20, 31, 12)]
touch()
before = faults()
touch()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt belongs to glibc")
def test_kept_memory_is_reused_without_page_faults() -> None:
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "leave")
    )
    assert kept < returned / 10


LEAVES = """
from gridsieve.common.process import leave_cores_to_others
import os
def group():  # "/autogroup-7 nice 0"; nothing for a session that the kernel itself began
    return open("/proc/self/autogroup").read()
before = group()
leave_cores_to_others()
print(os.nice(0), before != group())
"""


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="Linux was built without autogroups")
@pytest.mark.parametrize("leads", [True, False])
def test_a_process_that_leaves_cores_to_others_lowers_the_session_that_it_leads(leads: bool) -> None:
    ran = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, start_new_session=leads)
    assert ran.stdout.split() == [str(max(10, os.nice(0))), str(leads)]


@pytest.mark.parametrize(("written", "limit"), [("150000 100000\n", 1.5), ("max 100000\n", None), (None, None)])
def test_a_container_has_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, written: str | None, limit: float | None
) -> None:
    """As Kubernetes sets it from `limits.cpu`: the process may run on every core, for a part of the time."""

    def read_text(path: Path) -> str:
        assert path == Path("/sys/fs/cgroup/cpu.max")
        if written is None:
            raise FileNotFoundError(path)
        return written

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(Path, "read_text", read_text)
    assert cores() == (limit or 64)
