"""Questions of a load: workload files, alternating rates, and synthetic clips."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.errors import InvalidRequest
from common.contract.retention import EVS, Pruning
from framesieve.bench.clips import FPS, KINDS, clips, draw, stamped
from framesieve.bench.workload import Entry, Workload, read_workload, synthesised
from framesieve.client.prompt import Image, Video

PLAIN = Pruning(0.0)
PRUNED = Pruning(0.75)


def write(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "load.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_workload_file_has_one_entry_per_line(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"film")
    (tmp_path / "photo.bin").write_bytes(b"photo")
    path = write(
        tmp_path,
        {"video": "clip.mp4", "question": "What\u2028moves?"},
        "",
        {"image": "photo.bin", "question": "Who?", "pruning_rate": 0, "max_new_tokens": 5, "weight": 2},
        {"url": "https://a.test/photo.png", "question": "Where?", "method": "vidcom2"},
        {"url": "https://a.test/film", "question": "When?", "pruning_rate": 0.5},
        {"question": "Why?"},
    )
    assert read_workload(path) == [
        Entry(Video(tmp_path / "clip.mp4"), "What\u2028moves?"),
        Entry(Image(tmp_path / "photo.bin"), "Who?", pruning_rate=0, max_new_tokens=5, weight=2),
        Entry(Image(url="https://a.test/photo.png"), "Where?", method="vidcom2"),
        Entry(Video(url="https://a.test/film"), "When?", pruning_rate=0.5),
        Entry(None, "Why?"),
    ]


def test_paths_on_the_server_need_not_exist_here(tmp_path: Path) -> None:
    path = write(tmp_path, {"video": "far/away.mp4", "question": "?"})
    assert read_workload(path, on_server=True) == [Entry(Video(server_path="far/away.mp4"), "?")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"video": "no.mp4", "question": "?"}, ["video", "'no.mp4'", "must name a file"]),
        ({"question": "?", "pruning_rate": 1}, ["pruning_rate", "less than 1", "got 1"]),
        ({"question": "?", "pruning_rate": "0.5"}, ["pruning_rate", "number", "'0.5'"]),
        ({"question": "?", "method": "magic"}, ["method", "'vidcom2'", "'magic'"]),
        ({"question": "?", "max_new_tokens": 0}, ["max_new_tokens", "greater than or equal to 1", "got 0"]),
        ({"question": "?", "weight": 0}, ["weight", "greater than 0", "got 0"]),
        ({"question": ""}, ["question", "at least 1", "''"]),
        ({"url": "https://a.test/x.mp4"}, ["question", "required"]),
        ({"question": "?", "vdieo": "x"}, ["vdieo", "unknown field", "video, image, url, question"]),
        ({"question": "?", "video": "a", "image": "b"}, ["at most one", "got video, image"]),
        ({"question": "?", "url": "ftp://a.test"}, ["url", "https://", "'ftp://a.test'"]),
        ('{"question": "?"', ["Invalid JSON", '{"question"']),
        ("[]", ["object", "[]"]),
    ],
)
def test_an_invalid_line_is_named_with_field_value_and_limit(
    tmp_path: Path, line: dict[str, Any] | str, words: list[str]
) -> None:
    path = write(tmp_path, {"question": "Fine?"}, "", line)
    with pytest.raises(InvalidRequest) as raised:
        read_workload(path)
    message = str(raised.value)
    assert message.startswith(f"{path}, line 3: ")
    assert [word for word in words if word not in message] == []


def test_empty_and_binary_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least 1 line"):
        read_workload(write(tmp_path, "", "  "))
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b"{}\xff")
    with pytest.raises(InvalidRequest, match="UTF-8 text, byte 2"):
        read_workload(path)


def test_every_question_is_asked_at_all_rates() -> None:
    load = Workload([Entry(None, "A"), Entry(None, "B")], [PLAIN, PRUNED])
    asked = [load.question(number) for number in range(6)]
    assert [each.text for each in asked] == list("AABBAA")
    assert [each.pruning for each in asked] == [PLAIN, PRUNED] * 3


def test_settings_of_a_line_override_those_of_the_run() -> None:
    entries = [Entry(None, "A", pruning_rate=0.0), Entry(None, "B", method="random", max_new_tokens=3)]
    load = Workload(entries, [PRUNED])
    assert [load.question(number).pruning for number in (0, 1)] == [Pruning(0.0, EVS), Pruning(0.75, "random")]
    assert [load.question(number).max_new_tokens for number in (0, 1)] == [None, 3]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_entry_has_its_share_in_any_interval(weights: list[int]) -> None:
    load = Workload([Entry(None, str(index), weight=float(weight)) for index, weight in enumerate(weights)], [PLAIN])
    total = sum(weights)
    asked = [load.question(number).text for number in range(2 * total)]
    for first in (0, total):
        counts = Counter(asked[first : first + total])
        assert [counts[str(index)] for index in range(len(weights))] == weights
    for length in range(1, total):
        counts = Counter(asked[:length])
        for index, weight in enumerate(weights):
            assert abs(counts[str(index)] - length * weight / total) < len(weights)


def test_a_question_depends_on_its_number_alone() -> None:
    entries = [Entry(None, text, weight=weight) for text, weight in (("A", 1), ("B", 2.5), ("C", 0.3))]
    forwards, backwards = Workload(entries, [PLAIN]), Workload(entries, [PLAIN])
    last_first = [backwards.question(number) for number in reversed(range(20))]
    assert [forwards.question(number) for number in range(20)] == last_first[::-1]


# --- clips ------------------------------------------------------------------------------------------------------


def decoded(clip: bytes) -> np.ndarray:
    with av.open(io.BytesIO(clip)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.fixture(scope="module")
def films() -> list[bytes]:
    return clips(3)


def test_clips_have_their_lengths_sizes_and_some_motion(films: list[bytes]) -> None:
    for film, (seconds, width, height) in zip(films, KINDS, strict=True):
        frames = decoded(film)
        assert frames.shape == (seconds * FPS, height, width, 3)
        changed = (abs(frames[-1].astype(int) - frames[0].astype(int)).max(-1) > 40).mean()
        assert 0.01 < changed < 0.4  # squares move over a static background


def test_drawn_pixels_are_determined_by_the_seed() -> None:
    first, second, other = (np.stack([*draw(4, 320, 240, np.random.default_rng(seed))]) for seed in (3, 3, 4))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_a_stamped_clip_has_new_bytes_and_the_same_frames(films: list[bytes]) -> None:
    first, second = stamped(films[0]), stamped(films[0])
    assert len({films[0], first, second}) == 3
    assert np.array_equal(decoded(first), decoded(films[0]))


def test_synthetic_clips_are_unique_unless_they_repeat() -> None:
    entries = synthesised(0)
    assert len(entries) >= len(KINDS)
    first = [entry.media.data for entry in entries[: len(KINDS)] if isinstance(entry.media, Video)]
    assert len(set(first)) == len(KINDS)  # consecutive questions have clips of different kinds

    def films(load: Workload) -> list[bytes | None]:
        media = [load.question(number).media for number in range(2 * len(entries))]
        return [each.data for each in media if isinstance(each, Video)]

    assert len(set(films(Workload(entries, [PLAIN], unique=True)))) == 2 * len(entries)
    assert len(set(films(Workload(entries, [PLAIN, PRUNED], unique=True)))) == 2 * len(entries)
    assert len(set(films(Workload(entries, [PLAIN])))) == len(KINDS)
