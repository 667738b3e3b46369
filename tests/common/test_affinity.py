"""Which metadata a question about media gets, so that the next one finds the same replica."""

from __future__ import annotations

from contextlib import ExitStack

from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Frames, Image, Message, PartLike, Text, Video
from gridsieve.common.affinity import MAX_TOGETHER, Affinity, media_key
from gridsieve.common.channels import MEDIA_KEY
from gridsieve.common.contract.requests import detach_files
from gridsieve.v1 import prompt_pb2

FILE = bytes(range(256)) * 2**13  # 2 MiB
SECRET_URL = "https://example.org/clip.mp4?token=hunter2"


def prompt_of(*parts: PartLike) -> prompt_pb2.Prompt:
    return generate_request([Message("user", (*parts, Text("What moves?")))], {}).prompt


def key_of(*parts: PartLike) -> str | None:
    return media_key(prompt_of(*parts))


def test_a_key_names_the_first_file_whatever_is_asked_about_it() -> None:
    video = key_of(Video(data=FILE))
    assert video == key_of(Video(data=FILE, start_s=3, end_s=5), Video(data=b"another"))
    assert video == media_key(*detach_files(prompt_of(Text("Look:"), Video(data=FILE))))
    frames = Video(frames=Frames((FILE, FILE[1:]), (0.0, 1.0)))
    growing = Video(frames=Frames((FILE, FILE[1:], FILE), (0.0, 1.0, 2.0)))
    assert key_of(frames) == key_of(growing) == media_key(*detach_files(prompt_of(growing)))
    others = [
        Video(frames=Frames((FILE[1:], FILE), (0.0, 1.0))),
        Video(data=FILE[:-1]),
        Video(data=b"x" + FILE[1:]),
        Video(data=FILE[:-1] + b"x"),
        Image(data=b"another"),
        Video(server_path="clip.mp4"),
        Video(url=SECRET_URL),
    ]
    assert len({video, *map(key_of, others)}) == 1 + len(others)
    assert key_of(Video(url=SECRET_URL)) == key_of(Video(url=SECRET_URL))
    assert key_of() is None


def test_media_that_many_ask_about_at_once_go_to_further_replicas() -> None:
    affinity = Affinity()
    with affinity.of(None) as none:
        assert none == ()
    with ExitStack() as many:
        sent = [many.enter_context(affinity.of("clip")) for _ in range(2 * MAX_TOGETHER)]
        with affinity.of("another") as alone:
            assert alone not in sent
    assert sent[0][0][0] == MEDIA_KEY
    assert [sent.count(each) for each in dict.fromkeys(sent)] == [MAX_TOGETHER, MAX_TOGETHER]
    with affinity.of("clip") as later:
        assert later == sent[0]
