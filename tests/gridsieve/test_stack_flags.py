"""Flags of the services through `gridsieve serve` and `gridsieve settings`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gridsieve.__main__ import app
from gridsieve.cli.stack_flags import TABLES, service_flags
from gridsieve.common.contract.errors import StartupError


def settings(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["settings", *arguments])


def test_settings_prints_every_value_of_services_and_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRIDSIEVE_LOG_LEVEL", "debug")
    config = tmp_path / "stack.toml"
    config.write_text('[generation]\nmax-num-seqs = 7\ndtype = "float16"\n[encoder]\nmetrics_tls = false\n')
    flags = ["--config", str(config), "--generation-dtype", "bfloat16"]
    printed = json.loads(settings(*flags, "--json").stdout)
    rows = {service: {row["flag"]: row for row in each} for service, each in printed.items()}
    assert rows["generation"]["--dtype"]["value"] == "bfloat16"  # the command line is above the file
    places = rows["generation"]["--max-num-seqs"]
    assert (places["variable"], places["value"], places["source"]) == ("GRIDSIEVE_MAX_NUM_SEQS", 7, "file")
    assert rows["encoder"]["--metrics-tls"]["source"] == "file"
    assert {rows[service]["--log-level"]["source"] for service in TABLES} == {"environment"}
    assert [rows[service]["--dtype"]["source"] for service in ("encoder", "generation")] == ["default", "flag"]
    printed = settings(*flags).stdout
    assert re.search(r"--max-num-seqs +7 +file\b", printed)


@pytest.mark.parametrize(
    ("toml", "extra", "complaint"),
    [
        ("", ["--foo", "1"], "--foo is unknown; a flag of a service begins with its name"),
        ("", ["clip.mp4"], "unexpected argument clip.mp4"),
        ("x = [", [], "is not TOML"),
        ("[serve]", [], "expected the tables preprocessing, encoder, generation, gateway, got 'serve'"),
        ('[encoder]\nlisten = "a:1"', [], "encoder.listen is set by `gridsieve serve`"),
    ],
)
def test_flags_of_no_service_and_broken_files_are_refused(
    tmp_path: Path, toml: str, extra: list[str], complaint: str
) -> None:
    (tmp_path / "stack.toml").write_text(toml)
    with pytest.raises(StartupError, match=complaint):
        service_flags(tmp_path / "stack.toml", extra)


def test_a_wrong_value_ends_settings_with_2_and_names_the_flag(capfd: pytest.CaptureFixture[str]) -> None:
    result = settings("--generation-dtype", "float8")
    assert (result.exit_code, result.stdout) == (2, "")
    assert capfd.readouterr().err.startswith("STARTUP: --dtype: ")
