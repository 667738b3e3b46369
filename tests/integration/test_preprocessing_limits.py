"""What the process of preprocessing may have open, and what it does not read: limits that it sets as it starts."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from framesieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc, prompt_pb2

from common.channels import upstream_errors
from common.contract import errors
from tests.integration.fleet import Service, children

SOFT_LIMIT = 200
WORKERS_LIMIT = 32
LARGE_BYTES = 2**40
LEAST_LARGE_BYTES = 2**30


@pytest.fixture
def service(checkpoint: Path, tmp_path: Path) -> Iterator[Service]:
    """Started by somebody whose processes may have few files open, unless they ask for more."""
    flags = ("--decode-workers", "1", "--media-root", str(tmp_path), "--media-max-bytes", str(LEAST_LARGE_BYTES))
    made = Service("preprocessing", checkpoint, tmp_path, flags)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard))
    try:
        made.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    yield made
    made.close()


async def test_a_service_may_open_what_the_system_allows_and_its_workers_no_more_than_they_need(
    service: Service,
) -> None:
    service.ready()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert resource.prlimit(service.pid, resource.RLIMIT_NOFILE) == (most, most)
    workers = children(service.pid)
    assert len(workers) == 3
    for each in workers:
        assert resource.prlimit(each, resource.RLIMIT_NOFILE) == (WORKERS_LIMIT, WORKERS_LIMIT)


async def test_a_file_above_the_limit_is_refused_at_once_however_large(service: Service, tmp_path: Path) -> None:
    (tmp_path / "large.mp4").touch()
    os.truncate(tmp_path / "large.mp4", LARGE_BYTES)  # to read it would take an hour
    video = prompt_pb2.Part(video=prompt_pb2.Media(path="large.mp4"))
    message = prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=[video])
    service.ready()
    async with grpc.aio.insecure_channel(service.address) as channel:
        call = preprocessing_pb2_grpc.PreprocessingServiceStub(channel).Preprocess(timeout=60)
        await call.write(preprocessing_pb2.PreprocessRequest(prompt=prompt_pb2.Prompt(messages=[message])))
        told = rf"\]\.video has {LARGE_BYTES} bytes, at most {LEAST_LARGE_BYTES} are allowed"
        with pytest.raises(errors.MediaRejected, match=told), upstream_errors("preprocessing"):
            await call.read()
