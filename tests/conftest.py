"""Fixtures that many tests share, and how the tests run side by side under pytest-xdist."""

from __future__ import annotations

import os

from gridsieve.services.compute.prepare import prepare

prepare()
# One core a worker, and one for each service that tests start. Set before torch is imported, which reads it once.
os.environ["OMP_NUM_THREADS"] = "1"
# promtool, Prometheus and kubectl are Go programs: two of them on two cores have spun for minutes with more threads.
os.environ["GOMAXPROCS"] = "1"

import random
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from gridsieve.common import process
from tests import families

settings.register_profile("gridsieve", deadline=None, derandomize=True)
settings.load_profile("gridsieve")
# By default structlog prints all variables of each frame of a traceback, which for a model takes seconds.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

# One worker runs all tests of these folders, which share services, or a second one would start them again.
SHARED = ("deploy", "integration")
# In generation/ these share the processes of ranks.
RANKS = ("fp8_products", "int4", "quantised", "quantised_experts", "tensor_parallel")
# Long files go first, so that no worker is left with one at the end. Folders that are not named here come last.
LONGEST_FIRST = ("integration", "generation", "encoder", "gridsieve", "preprocessing")


# Deep ones differ from the others in parts that tests of the encoder and of preprocessing cover.
FAMILIES = ("llava", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe")
DEEP_FAMILIES = sorted(families.FAMILIES.keys() - FAMILIES)
FAMILY_PARAMS = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP_FAMILIES)]


def pytest_configure() -> None:
    """Gives each worker ports of its own: `free_port` gives each port once, but only within one process."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = len(process._PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    process._places = count(worker * share + random.randrange(share // 2))


class FileScheduling(LoadScopeScheduling):
    """Gives a worker all tests of a file, or of files that share services, so that their fixtures are made once.

    xdist's own `--dist loadgroup` has no effect with pytest 9.2, which ignores the node ids that it sets.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.split("::")[0])
        folder, name = path.parent.name, path.stem.removeprefix("test_")
        if folder in SHARED:
            return folder
        return "ranks" if folder == "generation" and name in RANKS else str(path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    config.option.loadscopereorder = False  # keep our own order
    return FileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """Lets SIGINT end processes that tests start. Children of a shell's background job inherit an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5-VL checkpoint in float32."""
    from demo.checkpoint import TINY, write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, seed=1)


@pytest.fixture(scope="session", params=FAMILY_PARAMS)
def family(request: pytest.FixtureRequest) -> str:
    """The name of each family in turn."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny random checkpoints in float32 by model type, each written once."""
    return cache(lambda name: families.FAMILIES[name].write(tmp_path_factory.mktemp(name), 1))


@pytest.fixture(scope="module")  # modules may override `family`, and a session would keep the path of another's
def family_checkpoint(family: str, checkpoints: Callable[[str], Path]) -> Path:
    """A tiny random checkpoint of that family in float32."""
    return checkpoints(family)


@pytest.fixture(scope="session")
def promtool() -> str:
    return _debian("promtool", "prometheus")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return _debian("prometheus", "prometheus")


@pytest.fixture(scope="session")
def chromium() -> str:
    return _debian("chromium-headless-shell", "chromium-headless-shell")


@pytest.fixture(scope="session")
def mosquitto() -> str:
    return _debian("mosquitto", "mosquitto")


def _debian(program: str, package: str) -> str:
    """The path of a program that comes with a Debian package. Without it the test is skipped, in CI it fails."""
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        how = f"{program} is not installed: apt-get install {package}"
        if os.environ.get("CI"):
            pytest.fail(how)
        pytest.skip(how)
    return found
