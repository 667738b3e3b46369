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
from framesieve.bench.clips import FPS, KINDS, clips, stamped
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
        Entry(Video(url="https://a.test/photo.png"), "Where?", method="vidcom2"),
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
        ({"url": "https://a.test/x.mp4"}, ["question", "required"]),
        ({"question": "?", "vdieo": "x"}, ["vdieo", "unknown field", "video, image, url, question"]),
        ({"question": "?", "video": "a", "image": "b"}, ["at most one", "got video, image"]),
        ({"question": "?", "url": "ftp://a.test"}, ["url", "https://", "'ftp://a.test'"]),
        ('{"question": "?"', ["Invalid JSON", '{"question"']),
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


def test_every_question_is_asked_at_all_rates_and_settings_of_a_line_override_those_of_the_run() -> None:
    entries = [Entry(None, "A", pruning_rate=0.25), Entry(None, "B", method="random", max_new_tokens=3)]
    load = Workload(entries, [PLAIN, PRUNED])
    asked = [load.question(number) for number in range(6)]
    assert [each.text for each in asked] == list("AABBAA")
    assert [each.pruning for each in asked[:2]] == [Pruning(0.25, EVS)] * 2
    assert [each.pruning for each in asked[2:4]] == [Pruning(0.0, "random"), Pruning(0.75, "random")]
    assert [each.max_new_tokens for each in asked] == [None, None, 3, 3, None, None]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_entry_has_its_share_and_a_question_depends_on_its_number_alone(weights: list[int]) -> None:
    entries = [Entry(None, str(index), weight=float(weight)) for index, weight in enumerate(weights)]
    load = Workload(entries, [PLAIN])
    total = sum(weights)
    asked = [load.question(number).text for number in range(2 * total)]
    for first in (0, total):
        counts = Counter(asked[first : first + total])
        assert [counts[str(index)] for index in range(len(weights))] == weights
    backwards = Workload(entries, [PLAIN])
    assert [backwards.question(number).text for number in reversed(range(2 * total))] == asked[::-1]


# --- clips ------------------------------------------------------------------------------------------------------


def decoded(clip: bytes) -> np.ndarray:
    with av.open(io.BytesIO(clip)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_a_clip_has_its_length_and_size_and_the_same_frames_with_new_bytes_when_stamped() -> None:
    film = clips(3)[0]
    seconds, width, height = KINDS[0]
    first, second = stamped(film), stamped(film)
    assert len({film, first, second}) == 3
    assert decoded(film).shape == (seconds * FPS, height, width, 3)
    assert np.array_equal(decoded(first), decoded(film))


def test_synthetic_clips_are_unique_unless_they_repeat() -> None:
    entries = synthesised(0)

    def films(unique: bool) -> set[bytes | None]:
        load = Workload(entries, [PLAIN, PRUNED], unique=unique)
        media = [load.question(number).media for number in range(2 * len(entries))]
        return {each.data for each in media if isinstance(each, Video)}

    assert (len(films(True)), len(films(False))) == (2 * len(entries), len(KINDS))
