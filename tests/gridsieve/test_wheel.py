"""The sdist, the wheel that is built from it, and the wheel in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.gridsieve.checkout import ROOT, copy_to, files

# Packages of this checkout and of the tests' own environment must not be found.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

Run = Callable[..., subprocess.CompletedProcess[str]]


def environment(folder: Path, *, alone: bool = False) -> Path:
    """The `bin` folder of a new virtual environment. alone: without the packages of the tests' own."""
    venv.create(folder)
    if not alone:
        (site_packages(folder) / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def site_packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def install(programs: Path, *packages: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, *packages], env=ENVIRONMENT, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which is built in a copy of the working tree."""
    folder = tmp_path_factory.mktemp("build")
    copy_to(folder / "copy")
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    programs = environment(folder / "builder")
    install(programs, *requires)

    def build(what: str, source: Path) -> Path:
        program = (
            f"import sys; sys.path.insert(0, 'protos'); from build_backend import *; build_{what}({str(folder)!r})"
        )
        subprocess.run([programs / "python", "-c", program], cwd=source, env=ENVIRONMENT, check=True)
        return next(folder.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[what]))

    shutil.unpack_archive(build("sdist", folder / "copy"), folder / "sdist", filter="data")
    return build("wheel", next((folder / "sdist").iterdir()))


def runs(programs: Path, folder: Path) -> Run:
    """Runs a program of an environment in an empty folder."""
    folder.mkdir()

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(programs / program), *arguments]
        return subprocess.run(
            command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of an environment with the files of the wheel beside the packages of the tests' own."""
    folder = tmp_path_factory.mktemp("user")
    programs = environment(folder / "venv")
    ZipFile(wheel).extractall(site_packages(folder / "venv"))
    return runs(programs, folder / "empty")


def test_the_wheel_holds_every_file_of_its_packages_and_the_code_of_the_protos(wheel: Path) -> None:
    generated = {
        f"gridsieve/v1/{Path(name).stem}{end}"
        for name in files("protos")
        if name.endswith(".proto")
        for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    }
    assert len(generated) == 15
    own = {name for name in files("gridsieve") if not (ROOT / name).is_symlink()}
    shipped = files(*(f"demo/gridsieve-demo{end}" for end in ("", "-draft", "-embedder", "-tones")), "demo/clip.mp4")
    demo = {f"gridsieve/{name.removeprefix('demo/')}" for name in shipped}
    expected = {*own, *demo, *generated, "gridsieve/v1/__init__.py"}
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_the_package_is_imported_beside_modules_of_the_names_of_its_folders(unpacked: Run, tmp_path: Path) -> None:
    for name in ("common", "services", "demo"):
        (tmp_path / f"{name}.py").write_text("raise ImportError(__file__)")
    beside = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    client = unpacked("python", "-c", f"{beside}from gridsieve import GridsieveClient; import gridsieve.sync")
    assert (client.returncode, client.stderr) == (0, "")
    assert unpacked("python", "-m", "gridsieve", "--version").stdout == "gridsieve 0.1.0\n"


@pytest.mark.deep
def test_the_command_is_installed_from_an_index_and_names_the_extras_of_the_services_at_once(
    wheel: Path, tmp_path: Path
) -> None:
    programs = environment(tmp_path / "venv", alone=True)
    install(programs, f"gridsieve[client] @ {wheel.as_uri()}")
    installed = runs(programs, tmp_path / "empty")
    assert "inspect" in installed("gridsieve", "--help").stdout
    serve = installed("gridsieve", "serve")
    assert serve.returncode == 2
    assert serve.stderr.splitlines()[-1].endswith("pip install 'gridsieve[preprocessing,encoder,generation,gateway]'")
    assert "Traceback" not in serve.stderr
