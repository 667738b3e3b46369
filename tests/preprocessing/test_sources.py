"""What may be reached: bytes, and files below the media root, nothing else."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from common.contract.errors import MediaForbidden, MediaRejected, Overloaded, Unavailable
from services.preprocessing.sources.source import bytes_source, path_source
from tests.preprocessing.pool_asks import no_descriptor_left, open_descriptors


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A media root with a clip in it, beside a folder that is not part of it."""
    (tmp_path / "media" / "inner").mkdir(parents=True)
    (tmp_path / "media" / "inner" / "clip.mp4").write_bytes(b"clip")
    (tmp_path / "media-secret").mkdir()
    (tmp_path / "media-secret" / "clip.mp4").write_bytes(b"secret")
    return tmp_path / "media"


@pytest.mark.parametrize("path", ["inner/clip.mp4", "./inner/../inner/clip.mp4", "{root}/inner/clip.mp4"])
def test_a_file_below_the_root_is_read(root: Path, path: str) -> None:
    source = path_source("video", path.format(root=root), root)
    with source.open() as file:
        assert file.read() == b"clip"
    assert source.digest == hashlib.sha256(b"clip").digest()
    source.close()


def test_a_link_that_stays_below_the_root_is_followed(root: Path) -> None:
    (root / "link.mp4").symlink_to(root / "inner" / "clip.mp4")
    source = path_source("video", "link.mp4", root)
    with source.open() as file:
        assert file.read() == b"clip"
    source.close()


@pytest.mark.parametrize(
    "path",
    [
        "../media-secret/clip.mp4",
        "/etc/passwd",
        "inner/../../media-secret/clip.mp4",
        "../nothing-here",
        "{root}-secret/clip.mp4",
    ],
)
def test_what_lies_outside_the_root_is_forbidden_whether_it_exists_or_not(root: Path, path: str) -> None:
    with pytest.raises(MediaForbidden, match="outside --media-root"):
        path_source("video", path.format(root=root), root)


@pytest.mark.parametrize("target", ["media-secret/clip.mp4", "media-secret"])
def test_a_link_out_of_the_root_is_forbidden(root: Path, target: str) -> None:
    (root / "link").symlink_to(root.parent / target)
    path = "link" if target.endswith(".mp4") else "link/clip.mp4"
    with pytest.raises(MediaForbidden, match="outside --media-root"):
        path_source("video", path, root)


def test_links_in_a_circle_are_refused(root: Path) -> None:
    (root / "a").symlink_to(root / "b")
    (root / "b").symlink_to(root / "a")
    with pytest.raises((MediaForbidden, MediaRejected)):
        path_source("video", "a", root)


def test_without_a_root_no_path_is_opened(root: Path) -> None:
    with pytest.raises(MediaForbidden, match="without --media-root"):
        path_source("video", "inner/clip.mp4", None)


@pytest.mark.parametrize(
    ("path", "why"), [("gone.mp4", "No such file"), ("inner", "not a regular file"), ("", "got ''"), ("a\0b", "got")]
)
def test_what_is_no_file_is_rejected(root: Path, path: str, why: str) -> None:
    with pytest.raises(MediaRejected, match=why):
        path_source("video", path, root)


def test_a_service_without_a_free_descriptor_is_overloaded_and_the_file_is_not_to_blame(root: Path) -> None:
    with (
        no_descriptor_left(),
        pytest.raises(Overloaded, match=r"^video\.path cannot be opened now: Too many open files"),
    ):
        path_source("video", "inner/clip.mp4", root)
    path_source("video", "inner/clip.mp4", root).close()


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_the_machine_lacks_is_no_fault_of_the_file(root: Path, monkeypatch: pytest.MonkeyPatch, lack: int) -> None:
    def lacking(*_: object) -> int:
        raise OSError(lack, os.strerror(lack))

    monkeypatch.setattr(os, "open", lacking)
    with pytest.raises(Overloaded, match=os.strerror(lack)):
        path_source("video", "inner/clip.mp4", root)


def test_a_file_that_nobody_wants_any_more_is_not_read_to_its_end(root: Path) -> None:
    os.truncate(root / "inner" / "clip.mp4", 8 * 2**20)
    asked = 0

    def check_cancelled() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise Unavailable("the request was cancelled", "preprocessing")

    before = open_descriptors()
    with pytest.raises(Unavailable, match="was cancelled"):
        path_source("video", "inner/clip.mp4", root, check_cancelled)
    assert asked == 3
    assert open_descriptors() == before


def test_a_file_that_is_too_large_is_refused_before_a_byte_of_it_is_read(root: Path) -> None:
    os.truncate(root / "inner" / "clip.mp4", 2**40)  # of which nothing lies on the disk

    def check_cancelled() -> None:
        raise AssertionError("it is read")

    with pytest.raises(MediaRejected, match=rf"^video has {2**40} bytes, at most {2**34} are allowed$"):
        path_source("video", "inner/clip.mp4", root, check_cancelled, max_bytes=2**34)
    with pytest.raises(AssertionError, match="it is read"):
        path_source("video", "inner/clip.mp4", root, check_cancelled, max_bytes=2**40)


def test_a_pipe_is_rejected_and_hangs_nobody(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(MediaRejected, match="not a regular file"):
        path_source("video", "pipe", root)


def test_readers_of_one_file_do_not_disturb_each_other(root: Path) -> None:
    source = path_source("video", "inner/clip.mp4", root)
    with source.open() as first, source.open() as second:
        assert first.read(2) == b"cl"
        assert second.read() == b"clip"
        assert first.read() == b"ip"
        assert second.seek(-2, os.SEEK_END) == 2
        assert second.read() == b"ip"
    source.close()


def test_what_was_planned_is_what_is_read_even_if_the_path_changes(root: Path) -> None:
    source = path_source("video", "inner/clip.mp4", root)
    (root / "inner" / "clip.mp4").unlink()
    (root / "inner" / "clip.mp4").write_bytes(b"other")
    with source.open() as file:
        assert file.read() == b"clip"
    source.close()


def test_no_bytes_are_no_media() -> None:
    with pytest.raises(MediaRejected, match=r"video\.data is empty"):
        bytes_source("video", b"")
