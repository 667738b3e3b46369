"""The README's commands, word for word, in a copy of the checkout: each works as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from PIL import Image

from demo.example import QUESTIONS
from tests.gridsieve.checkout import ROOT, copy_to

MOVES, HAPPENS = (question.answer for question in QUESTIONS)
MARK = "--- next command ---"
BENCH = "gridsieve bench"
# README: "in another terminal".
OTHER_TERMINAL = """%s &
server=$!
trap 'kill $server && wait $server' EXIT
until curl --silent --fail --output /dev/null 127.0.0.1:8000/health; do kill -0 $server; sleep 0.2; done
"""


def commands() -> list[str]:
    return list(_commands())


def _commands() -> Iterator[str]:
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


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_the_first_commands_of_the_readme_work_as_they_stand(tmp_path: Path) -> None:
    """Everything is installed first. integration/test_serve.py runs the commands that ask, against its own services."""
    folder = tmp_path / "gridsieve"
    copy_to(folder)
    asked = commands()[:12]
    script = ["set -e"]
    for command in asked:
        served = re.match(r"gridsieve serve [^#]*", command)
        script += [OTHER_TERMINAL % served[0] if served else command, f"echo; echo '{MARK}'"]
    results = dict(zip(asked, run("\n".join(script), folder).split(MARK), strict=False))
    (demo,), (bench,) = ([results[name] for name in asked if name.startswith(begin)] for begin in ("make demo", BENCH))
    *_, whole, pruned = next(re.findall(r"\d+", line) for line in demo.splitlines() if "first token" in line)
    assert int(pruned) < int(whole), demo  # of the larger model
    assert ["Successful", "requests:", "32", "32"] in [line.split() for line in bench.splitlines()]
    check_answers(asked[3:10], [results[command] for command in asked[3:10]], folder)


def check_answers(asked: Sequence[str], told: Sequence[str], folder: Path) -> None:
    """Of the commands that ask services. folder: with the picture that one of them has drawn."""

    def of(beginning: str) -> str:
        (found,) = (output for command, output in zip(asked, told, strict=True) if command.startswith(beginning))
        return found

    assert of("gridsieve ask").strip() == of("python examples/ask.py").strip().splitlines()[0] == MOVES
    assert of("gridsieve live").strip().splitlines()[-1].endswith(f" s: {HAPPENS}")
    assert of("python -").strip().startswith(MOVES)
    with Image.open(folder / "kept.png") as sheet:
        assert sheet.format == "PNG"
    chat = json.loads(of("curl 127.0.0.1:8000/v1/chat/completions"))
    assert chat["choices"][0]["message"]["content"] == MOVES
    assert chat["usage"]["gridsieve"]["media"][0]["pruning_rate"] == 0.75
    assert json.loads(of("curl 127.0.0.1:8000/v1/files"))["id"].startswith("file-")


def run(script: str, folder: Path) -> str:
    """Standard output of a script of bash."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-c", script], cwd=folder, env=ours, start_new_session=True, **streams) as shell:
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
