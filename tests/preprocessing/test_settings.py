"""Flags become the fetch policy and the limits of a job; wrong values are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gridsieve.common.contract.errors import StartupError
from gridsieve.services.preprocessing.__main__ import check_sandbox
from gridsieve.services.preprocessing.fetch.policy import AllowedDomain, FetchPolicy
from gridsieve.services.preprocessing.settings import PreprocessingSettings
from gridsieve.services.preprocessing.workers.limits import Limits


def domains(*texts: str) -> tuple[AllowedDomain, ...]:
    return tuple(AllowedDomain.parse(text) for text in texts)


def test_every_flag_reaches_the_policy() -> None:
    assert PreprocessingSettings.load([]).fetch_policy == FetchPolicy()
    assert PreprocessingSettings.load(["--fetch-schemes", ""]).fetch_policy.schemes == frozenset()
    what = ["--allow-media-domain", "a.test", "--fetch-schemes", "https", "--fetch-ports", "443, 9000"]
    limits = ["--fetch-timeout-s", "2.5", "--fetch-max-bytes", "7", "--fetch-disk-bytes", "9"]
    assert PreprocessingSettings.load([*what, *limits]).fetch_policy == FetchPolicy(
        schemes=frozenset({"https"}),
        ports=frozenset({443, 9000}),
        domains=domains("a.test"),
        max_bytes=7,
        disk_bytes=9,
        total_s=2.5,
    )


def test_every_flag_reaches_the_limits_of_a_job() -> None:
    cost = ["--decode-timeout-s", "1.5", "--decode-frame-s", "2.5", "--decode-memory-bytes", str(2**27)]
    limits = PreprocessingSettings.load([*cost, "--media-max-bytes", "8", "--media-max-s", "9"]).limits
    assert limits == Limits(1.5, 2.5, memory_bytes=2**27, file_bytes=8, frames=limits.frames, length_s=9)


def test_two_processes_use_a_card_unless_a_flag_says_how_many() -> None:
    given = ([], ["--decode-workers", "5"])
    assert [PreprocessingSettings.load(["--decoder", "nvdec", *each]).decode_workers for each in given] == [2, 5]


def test_domains_come_in_several_flags_or_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = domains("a.test", "*.b.test", "minio=10.20.0.0/16", "here=fd00::/8")
    texts = ["a.test", "*.b.test,minio=10.20.0.0/16", "here=fd00::/8"]
    flags = [part for text in texts for part in ("--allow-media-domain", text)]
    assert PreprocessingSettings.load(flags).fetch_policy.domains == expected
    monkeypatch.setenv("GRIDSIEVE_ALLOW_MEDIA_DOMAIN", ",".join(texts))
    assert PreprocessingSettings.load([]).fetch_policy.domains == expected


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--allow-media-domain", "10.0.0.1/8"], r"--allow-media-domain.*got '10\.0\.0\.1/8'"),
        (["--fetch-schemes", "ftp"], "--fetch-schemes.*got 'ftp'"),
        (["--fetch-ports", "80,0"], "--fetch-ports.*got '0'"),
        (["--fetch-max-bytes", "10", "--fetch-disk-bytes", "9"], "--fetch-max-bytes 10 must be at most"),
        (["--decoder", "nvdec", "--require-sandbox"], "--require-sandbox excludes --decoder nvdec"),
    ],
)
def test_a_wrong_value_is_refused_with_its_flag(flags: list[str], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        PreprocessingSettings.load(flags)


STARTING = """
import sys
for name in ("torch", "torchvision", "transformers"):
    sys.modules[name] = None
import gridsieve.services.preprocessing.__main__, gridsieve.services.preprocessing.workers.worker
"""


def test_the_service_starts_without_torch_and_transformers_which_its_image_lacks() -> None:
    ended = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_required_sandbox_must_be_whole() -> None:
    check_sandbox(frozenset({"namespaces", "landlock"}), required=True)
    check_sandbox(frozenset(), required=False)
    text = "--require-sandbox: this kernel does not confine workers by landlock"
    with pytest.raises(StartupError, match=text):
        check_sandbox(frozenset({"namespaces"}), required=True)
