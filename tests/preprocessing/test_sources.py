"""Media come from bytes or from files below the media root; no other path can be opened."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from gridsieve.common.contract.errors import MediaForbidden, MediaRejected, Overloaded
from gridsieve.services.preprocessing.sources.source import path_source


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A media root with a clip and links, beside a folder that is not part of it."""
    root = tmp_path / "media"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "clip.mp4").write_bytes(b"clip")
    (tmp_path / "media-secret").mkdir()
    (tmp_path / "media-secret" / "clip.mp4").write_bytes(b"secret")
    (root / "inside.mp4").symlink_to(root / "inner" / "clip.mp4")
    (root / "outside.mp4").symlink_to(tmp_path / "media-secret" / "clip.mp4")
    (root / "outside").symlink_to(tmp_path / "media-secret")
    (root / "circle").symlink_to(root / "circle")
    os.mkfifo(root / "pipe")
    return root


@pytest.mark.parametrize("path", ["inner/clip.mp4", "./inner/../inner/clip.mp4", "{root}/inner/clip.mp4", "inside.mp4"])
def test_a_file_below_the_root_is_read(root: Path, path: str) -> None:
    source = path_source("video", path.format(root=root), root)
    with source.open() as file:
        assert file.read() == b"clip"
    assert source.digest == hashlib.sha256(b"clip").digest()
    source.close()


OUTSIDE = """
    ../media-secret/clip.mp4 inner/../../media-secret/clip.mp4 ../nothing-here /etc/passwd {root}-secret/clip.mp4
    outside.mp4 outside/clip.mp4
"""


@pytest.mark.parametrize("path", OUTSIDE.split())
def test_a_path_outside_the_root_is_forbidden_whether_it_exists_or_not(root: Path, path: str) -> None:
    with pytest.raises(MediaForbidden, match="outside --media-root"):
        path_source("video", path.format(root=root), root)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("gone.mp4", "No such file"),
        ("inner", "not a regular file"),
        ("pipe", "not a regular file"),  # opening it must not block
        ("", "got ''"),
        ("a\0b", "got"),
    ],
)
def test_a_path_without_a_regular_file_is_rejected(root: Path, path: str, why: str) -> None:
    with pytest.raises(MediaRejected, match=why):
        path_source("video", path, root)


def test_a_circle_of_links_is_refused(root: Path) -> None:
    with pytest.raises((MediaForbidden, MediaRejected)):
        path_source("video", "circle", root)


def test_without_a_root_no_path_is_opened() -> None:
    for flag in ("--media-root", "--upload-root"):
        with pytest.raises(MediaForbidden, match=f"without {flag}"):
            path_source("video", "inner/clip.mp4", None, flag=flag)


@pytest.mark.parametrize("shortage", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT])
def test_shortages_of_the_machine_are_overloaded(root: Path, monkeypatch: pytest.MonkeyPatch, shortage: int) -> None:
    def fail(*_: object) -> int:
        raise OSError(shortage, os.strerror(shortage))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(Overloaded, match=os.strerror(shortage)):
        path_source("video", "inner/clip.mp4", root)


def test_a_file_that_is_too_large_is_rejected_unread(root: Path) -> None:
    os.truncate(root / "inner" / "clip.mp4", 2**40)  # a sparse file

    def check_cancelled() -> None:
        raise AssertionError("it is read")

    with pytest.raises(MediaRejected, match=rf"^video has {2**40} bytes, at most {2**34} are allowed$"):
        path_source("video", "inner/clip.mp4", root, check_cancelled, max_bytes=2**34)
    with pytest.raises(AssertionError, match="it is read"):
        path_source("video", "inner/clip.mp4", root, check_cancelled, max_bytes=2**40)


def test_readers_of_one_file_are_independent_and_survive_its_replacement(root: Path) -> None:
    source = path_source("video", "inner/clip.mp4", root)
    (root / "inner" / "clip.mp4").unlink()
    (root / "inner" / "clip.mp4").write_bytes(b"other")
    with source.open() as first, source.open() as second:
        assert first.read(2) == b"cl"
        assert second.read() == b"clip"
        assert first.read() == b"ip"
        assert second.seek(-2, os.SEEK_END) == 2
        assert second.read() == b"ip"
    source.close()
