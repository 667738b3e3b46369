"""What the documented commands install, and how the targets for GPUs run without an index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.services import ROOT

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MAKEFILE, DOCKERFILE = ((ROOT / name).read_text() for name in ("Makefile", "Dockerfile"))


def packages(extra: str) -> Iterator[str]:
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == "gridsieve":
            for each in requirement.extras:
                yield from packages(each)
        else:
            yield requirement.name


def test_one_extra_installs_every_service_with_flash_infer() -> None:
    found = set(packages("all-cuda"))
    assert {"flashinfer-python", *packages("all")} <= found
    assert "flashinfer-python" not in set(packages("all"))  # it needs a GPU and gigabytes


def test_the_extras_install_the_torch_that_the_tests_and_the_images_run() -> None:
    pins = re.findall(r"^(?:TORCH \?= |ARG TORCH=)(torch==.*)$", f"{MAKEFILE}\n{DOCKERFILE}", re.MULTILINE)
    assert len(pins) == 2
    (pin,) = {next(iter(Requirement(each).specifier)).version for each in pins}
    asked = (each for extra in EXTRAS.values() for each in map(Requirement, extra))
    (allowed,) = {each.specifier for each in asked if each.name == "torch"}
    major, minor, _ = map(int, pin.split("."))
    assert f"{major}.{minor}.99" in allowed
    assert f"{major}.{minor + 1}.0" not in allowed


@pytest.mark.parametrize("page", ["README.md", "docs/gpus.md"])
def test_documented_extras_exist(page: str) -> None:
    named = re.findall(r"pip install \S*?\[([\w,-]+)\]", (ROOT / page).read_text())
    assert "all-cuda" in named
    assert {extra for each in named for extra in each.split(",")} <= EXTRAS.keys()


def test_targets_for_gpus_install_nothing_where_the_bundle_is_unpacked(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".gpu").mkdir()
    command = ["make", "--dry-run", "test-gpu", "bench-gpu", "PYTHON=python-with-torch"]
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }  # of `make test`
    done = subprocess.run(command, cwd=tmp_path, env=ours, capture_output=True, text=True, check=True)
    testing, measuring = done.stdout.splitlines()
    python = f"PYTHONPATH={tmp_path}/.gpu FLASHINFER_DISABLE_JIT=1 python-with-torch -m "
    assert f"do {python}pytest" in testing
    assert measuring.strip() == f"{python}benchmarks.gpu"
