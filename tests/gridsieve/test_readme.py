"""The README's commands, word for word, in a copy of the checkout: each works as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from demo.example import QUESTIONS
from tests.gridsieve.checkout import ROOT, copy_to
from tests.gridsieve.test_wheel import environment, site_packages

MOVES, HAPPENS = (question.answer for question in QUESTIONS)
MARK = "--- next command ---"
# A network of its own: its ports are nobody else's, and it fetches nothing.
UNSHARE = ("unshare", "--map-root-user", "--net")
UP = "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 1))"  # SIOCSIFFLAGS
# README: "in another terminal".
OTHER_TERMINAL = """%s &
server=$!
trap 'kill $server && wait $server' EXIT
until curl --silent --fail --output /dev/null 127.0.0.1:8000/health; do kill -0 $server; sleep 0.2; done
"""


def commands() -> Iterator[str]:
    """Of the README's blocks of shell and Python, in order. A shell's command ends where its quotes are closed."""
    readme = (ROOT / "README.md").read_text()
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE):
        if language == "python":
            yield f"python - <<'END'\n{block}END"
            continue
        command = ""
        for line in block.splitlines():
            command += line
            try:
                shlex.split(command, comments=True)
            except ValueError:
                command += "\n"
            else:
                yield command
                command = ""


def installed(folder: Path) -> None:
    """What `make setup` would install: an environment with the packages of the tests' own, and the generated code."""
    programs = environment(folder / ".venv")
    (site_packages(folder / ".venv") / "checkout.pth").write_text(str(folder))
    command = Path(sys.prefix, "bin", "gridsieve").read_text().replace(sys.prefix, str(folder / ".venv"))
    (programs / "gridsieve").write_text(command)
    (programs / "gridsieve").chmod(0o755)
    shutil.copytree(ROOT / "gridsieve/v1", folder / "gridsieve/v1")


@pytest.mark.parametrize(
    "ready",
    [
        pytest.param(True, marks=pytest.mark.timeout(600), id="installed"),
        pytest.param(False, marks=[pytest.mark.deep, pytest.mark.timeout(1800)], id="from nothing"),
    ],
)
def test_the_first_commands_of_the_readme_work_as_they_stand(tmp_path: Path, ready: bool) -> None:
    """Ready: without `make demo`, which installs everything. test_demo.py of integration/ runs what it shows."""
    folder = tmp_path / "gridsieve"
    copy_to(folder)
    if ready:
        installed(folder)
    asked = list(commands())[1:10] if ready else list(commands())[:12]
    script = ["set -e"]
    for command in asked:
        served = re.match(r"gridsieve serve [^#]*", command)
        script += [OTHER_TERMINAL % served[0] if served else command, f"echo; echo '{MARK}'"]
    output = run("\n".join(script), folder, alone=ready)
    results = dict(zip(asked, output.split(MARK), strict=False))

    def of(beginning: str) -> str:
        (result,) = (result for command, result in results.items() if command.startswith(beginning))
        return result

    if not ready:
        demo = of("make demo")
        *_, whole, pruned = next(re.findall(r"\d+", line) for line in demo.splitlines() if "first token" in line)
        assert int(pruned) < int(whole), demo  # of the larger model
        rows = [line.split() for line in of("gridsieve bench").splitlines()]
        assert ["Successful", "requests:", "32", "32"] in rows
    assert of("gridsieve ask").strip() == of("python examples/ask.py").splitlines()[1].strip() == MOVES
    assert of("gridsieve live").splitlines()[-2].endswith(f" s: {HAPPENS}")
    assert of("python -").strip().startswith(MOVES)
    with Image.open(folder / "kept.png") as sheet:
        assert sheet.format == "PNG"
    chat = json.loads(of("curl 127.0.0.1:8000/v1/chat/completions"))
    assert chat["choices"][0]["message"]["content"] == MOVES
    assert chat["usage"]["gridsieve"]["media"][0]["pruning_rate"] == 0.75
    assert json.loads(of("curl 127.0.0.1:8000/v1/files"))["id"].startswith("file-")


def run(script: str, folder: Path, *, alone: bool) -> str:
    """Standard output of a script of bash."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    if alone:
        ours["GRIDSIEVE_COMPILE"] = "off"  # half a minute of processor time
    command = ["bash", "-c", script]
    if alone:
        if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode:  # in many containers
            pytest.skip("no network of its own: the ports of this machine may be taken")
        command = [*UNSHARE, "bash", "-c", f'{sys.executable} -c "{UP}" && exec "$@"', "bash", *command]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=ours, start_new_session=True, **streams) as shell:
        try:
            output, errors = shell.communicate()
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, f"{output}\n{errors}"
    return output


def test_an_example_has_defaults_and_names_what_is_missing_in_a_line() -> None:
    """The others end alike."""
    command = [sys.executable, "examples/ask.py", "nowhere.mp4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r".*'nowhere\.mp4'\n", done.stderr)
