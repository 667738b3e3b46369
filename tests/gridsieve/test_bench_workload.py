"""Questions of a load: ShareGPT files, and synthetic clips."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from gridsieve.bench.clips import FPS, KINDS, clips, stamped
from gridsieve.bench.workload import Workload, read_sharegpt
from gridsieve.client.prompt import Image, Text, Video
from gridsieve.common.contract.errors import InvalidRequest


def write(folder: Path, text: str) -> Path:
    path = folder / "sharegpt.json"
    path.write_text(text)
    return path


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
    entries = [
        conversation("<video>\nWhat moves?", "A circle.", "And then?", "Nothing.", video="clips/a.mp4"),
        conversation("What <image> is <image>?", "Two.", image=["b.jpg", "https://a.test/c.jpg"]),
        conversation("Where?", "There.", video="file:///far/away.mp4"),
        conversation("What does <video> mean in HTML?", "A film."),
        conversation("Alone"),
    ]
    questions = (
        (Video(clip), Text("What moves?")),
        (Text("What"), Image(photo), Text("is"), Image(url="https://a.test/c.jpg"), Text("?")),
        (Video(url="file:///far/away.mp4"), Text("Where?")),
        (Text("What does <video> mean in HTML?"),),
    )
    assert read_sharegpt(write(tmp_path, "\n" + json.dumps(entries))) == questions
    workload = Workload(questions)
    assert [workload.question(number) for number in range(6)] == [*questions, *questions[:2]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            json.dumps([conversation("Fine?", "Yes."), conversation("?", "!", video="no.mp4")]),
            "1.video: must name a file, got 'no.mp4'",
        ),
        ('[{"conversations": [{"value": "?"}]}]', "0.conversations.0.from: Field required"),
        ('[{"video": 7}]', "got 7"),
        ('{"question": "?"', "Invalid JSON"),
        (json.dumps([conversation("Alone")]), "must have at least 1 conversation"),
    ],
)
def test_an_invalid_conversation_is_named_with_field_value_and_limit(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_sharegpt(write(tmp_path, text))
    assert str(raised.value).startswith(f"{tmp_path}/sharegpt.json")
    assert words in str(raised.value)


# --- clips ------------------------------------------------------------------------------------------------------


def decoded(clip: bytes) -> np.ndarray:
    with av.open(io.BytesIO(clip)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.fixture(scope="module")
def film() -> bytes:
    return clips()[0]


def test_a_clip_has_its_length_and_size_and_the_same_frames_with_new_bytes_when_stamped(film: bytes) -> None:
    seconds, width, height = KINDS[0]
    first, second = stamped(film), stamped(film)
    assert len({film, first, second}) == 3
    assert decoded(film).shape == (seconds * FPS, height, width, 3)
    assert np.array_equal(decoded(first), decoded(film))


def test_mp4_files_of_a_workload_are_made_unique_and_others_are_left(tmp_path: Path, film: bytes) -> None:
    (tmp_path / "clip.mp4").write_bytes(film)
    (tmp_path / "clip.mkv").write_bytes(b"no boxes")
    parts = (Video(tmp_path / "clip.mp4"), Video(tmp_path / "clip.mkv"), Image(tmp_path / "photo.png"), Text("?"))
    first, second = (Workload((parts,), has_new_bytes=True).question(0) for _ in range(2))
    assert isinstance(first[0], Video)
    assert isinstance(second[0], Video)
    assert first[0].data is not None
    assert first[0].data.startswith(film)
    assert first[0].data != second[0].data
    assert first[1:] == second[1:] == (Video(data=b"no boxes"), *parts[2:])
