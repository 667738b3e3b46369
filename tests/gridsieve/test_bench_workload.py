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

from gridsieve.bench.clips import FPS, KINDS, clips, stamped
from gridsieve.bench.workload import Entry, Question, Workload, read_workload
from gridsieve.client.prompt import Image, Text, Video
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.retention import Pruning

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
        Entry((Video(tmp_path / "clip.mp4"), Text("What\u2028moves?"))),
        Entry((Image(tmp_path / "photo.bin"), Text("Who?")), pruning_rate=0, max_new_tokens=5, weight=2),
        Entry((Video(url="https://a.test/photo.png"), Text("Where?")), method="vidcom2"),
        Entry((Video(url="https://a.test/film"), Text("When?")), pruning_rate=0.5),
        Entry((Text("Why?"),)),
    ]


def test_paths_on_the_server_need_not_exist_here(tmp_path: Path) -> None:
    path = write(tmp_path, {"video": "far/away.mp4", "question": "?"})
    assert read_workload(path, on_server=True) == [Entry((Video(server_path="far/away.mp4"), Text("?")))]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"video": "no.mp4", "question": "?"}, ["video", "'no.mp4'", "must name a file"]),
        ({"question": "?", "pruning_rate": 1}, ["pruning_rate", "less than 1", "got 1"]),
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


def conversation(*values: str, **fields: Any) -> dict[str, Any]:
    """Turns of a human and of gpt, one after the other."""
    speakers = ("human", "gpt") * len(values)
    turns = [{"from": speaker, "value": value} for speaker, value in zip(speakers, values, strict=False)]
    return {"id": "1", "conversations": turns, **fields}


def test_a_sharegpt_file_is_asked_by_its_first_turns_with_media_in_place_of_placeholders(tmp_path: Path) -> None:
    clip, photo = tmp_path / "clips" / "a.mp4", tmp_path / "b.jpg"
    clip.parent.mkdir()
    clip.write_bytes(b"film")
    photo.write_bytes(b"photo")
    path = tmp_path / "sharegpt.json"
    entries = [
        conversation("<video>\nWhat moves?", "A circle.", "And then?", "Nothing.", video="clips/a.mp4"),
        conversation("What <image> is <image>?", "Two.", image=["b.jpg", "https://a.test/c.jpg"]),
        conversation("Where?", "There.", video=f"file://{clip}"),
        conversation("What does <video> mean in HTML?", "A film."),
        conversation("Alone"),
    ]
    path.write_text("\n" + json.dumps(entries))
    assert read_workload(path) == [
        Entry((Video(clip), Text("What moves?"))),
        Entry((Text("What"), Image(photo), Text("is"), Image(url="https://a.test/c.jpg"), Text("?"))),
        Entry((Video(clip), Text("Where?"))),
        Entry((Text("What does <video> mean in HTML?"),)),
    ]


def test_an_invalid_conversation_is_named_with_field_value_and_limit(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps([conversation("Fine?", "Yes."), conversation("?", "!", video="no.mp4")]))
    with pytest.raises(InvalidRequest, match=rf"^{path}: 1\.video: must name a file, got 'no\.mp4'"):
        read_workload(path)


def test_settings_of_a_line_override_those_of_the_run() -> None:
    """A line with a rate or a method of its own has no threshold."""
    automatic = Pruning(0.5, "pixel_change", threshold=0.04)
    entries = [
        Entry((Text("A"),)),
        Entry((Text("B"),), pruning_rate=0.25),
        Entry((Text("C"),), method="evs", max_new_tokens=3),
    ]
    load = Workload(entries)
    assert [load.question(number, automatic) for number in range(3)] == [
        Question((Text("A"),), automatic),
        Question((Text("B"),), Pruning(0.25, "pixel_change")),
        Question((Text("C"),), Pruning(0.5, "evs"), 3),
    ]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_entry_has_its_share_and_a_question_depends_on_its_number_alone(weights: list[int]) -> None:
    entries = [Entry((Text(str(index)),), weight=float(weight)) for index, weight in enumerate(weights)]
    load = Workload(entries)
    total = sum(weights)
    asked = [load.question(number, PLAIN).parts for number in range(2 * total)]
    for first in (0, total):
        counts = Counter(asked[first : first + total])
        assert [counts[entry.parts] for entry in entries] == weights
    backwards = Workload(entries)
    assert [backwards.question(number, PRUNED).parts for number in reversed(range(2 * total))] == asked[::-1]


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


def test_mp4_files_of_a_workload_are_made_unique_and_others_are_left(tmp_path: Path) -> None:
    film = clips(0)[0]
    (tmp_path / "clip.mp4").write_bytes(film)
    (tmp_path / "clip.mkv").write_bytes(b"no boxes")
    parts = (Video(tmp_path / "clip.mp4"), Video(tmp_path / "clip.mkv"), Image(tmp_path / "photo.png"), Text("?"))
    first, second = (Workload([Entry(parts)], unique=True).question(0, PLAIN).read() for _ in range(2))
    assert isinstance(first[0], Video)
    assert isinstance(second[0], Video)
    assert first[0].data is not None
    assert first[0].data.startswith(film)
    assert first[0].data != second[0].data
    assert first[1:] == second[1:] == (Video(data=b"no boxes"), *parts[2:])
