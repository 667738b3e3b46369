"""What real services answer to what is wrong: the caller's own words and the limit, and nothing of the inside.

A path may be told as it was given, never as it lies on the server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from common.channels import upstream_errors
from common.contract import errors
from common.serving.status import ERROR_DOMAIN, status_details
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Image, Video
from tests import media

INSIDE = re.compile(
    r"0x[0-9a-f]{6,}|site-packages|<\S.* object at|Traceback|\.py\b|memfd|/proc/|\[Errno|errno|\bNone\b"
)
LEAVES: tuple[type[errors.FramesieveError], ...] = (
    errors.InvalidRequest,
    errors.MediaDamaged,
    errors.MediaForbidden,
    errors.MediaRejected,
    errors.PromptTooLong,
)


def tree(root: type[errors.FramesieveError]) -> Iterator[type[errors.FramesieveError]]:
    yield root
    for each in root.__subclasses__():
        yield from tree(each)


def test_a_status_says_reason_domain_and_stage_and_no_more() -> None:
    """Whatever else an error object holds stays where it was raised."""
    leaves = list(tree(errors.FramesieveError))
    assert len(leaves) > 10
    for leaf in leaves:
        error = leaf("words", "encoder") if leaf is errors.Unavailable else leaf("words")  # type: ignore[call-arg]
        error.add_note("/srv/models/secret")
        error.__cause__ = OSError("/srv/media/secret")
        status = status_details(error)
        assert status.message == "words"
        assert b"secret" not in status.SerializeToString()
        assert {leaf.reason.encode(), ERROR_DOMAIN.encode()} <= set(
            re.findall(rb"[A-Za-z_]{4,}", status.details[0].value)
        )


@pytest.fixture(scope="session")
def bad_root(media_root: Path) -> Path:
    """The media root with files in it that nobody can look at."""
    (media_root / "broken.mp4").write_bytes(media.clip_without_its_end())
    (media_root / "noise.mp4").write_bytes(b"\x00\x01\x02" * 500)
    (media_root / "empty.mp4").write_bytes(b"")
    (media_root / "sound.wav").write_bytes(media.sound())
    (media_root / "folder.mp4").mkdir()
    (media_root / "circle.mp4").symlink_to("circle.mp4")
    (media_root / "out.mp4").symlink_to("/etc/passwd")
    return media_root


FILES = ("broken.mp4", "noise.mp4", "empty.mp4", "sound.wav", "folder.mp4", "circle.mp4", "out.mp4", "nobody.mp4")
BAD: dict[str, Callable[[], list[Video | Image]]] = {
    **{f"the path {path[:20]!r}": lambda path=path: [Video(server_path=path)] for path in FILES},
    **{f"the picture {path[:20]!r}": lambda path=path: [Image(server_path=path)] for path in FILES},
    "a path above the root": lambda: [Video(server_path="../x.mp4")],
    "a path elsewhere": lambda: [Video(server_path="/etc/shadow")],
    "a very long path": lambda: [Video(server_path="a" * 5000)],
    "a path with a zero": lambda: [Video(server_path="clip.mp4\0")],
    "a file as a folder": lambda: [Video(server_path="clip.mp4/clip.mp4")],
    "noise": lambda: [Video(data=b"\x00\x01\x02" * 1000)],
    "a picture of noise": lambda: [Image(data=b"\x89PNG\r\n\x1a\n" + bytes(100))],
    "a picture cut short": lambda: [Image(data=media.picture(64, 64)[:200])],
    "half a video": lambda: [Video(data=media.clip_without_its_end())],
    "a picture as a video of no rate": lambda: [Video(data=media.picture(8, 8), fps=-1)],
    "this very machine": lambda: [Video(url="http://127.0.0.1:1/x.mp4")],
    "another scheme": lambda: [Video(url="file:///etc/passwd")],
    "a name of nobody": lambda: [Video(url="http://nobody.invalid/x.mp4")],
    "an empty data URI": lambda: [Image(url="data:image/png;base64,")],
    "a broken data URI": lambda: [Image(url="data:image/png;base64,%%%")],
}


@pytest.mark.parametrize("name", BAD)
async def test_a_refusal_tells_nothing_of_the_inside(
    stack: LocalStack, bad_root: Path, checkpoint: Path, name: str
) -> None:
    async with FramesieveClient(stack.address) as client:
        with pytest.raises(LEAVES) as refused:
            await client.ask(BAD[name](), "What moves?", timeout_s=60)
    told = str(refused.value)
    assert told.startswith("prompt.messages[0].parts[0]"), told
    assert not INSIDE.search(told), told
    for path in (bad_root, checkpoint, Path(__file__).parent.parent.parent, Path.home()):
        assert str(path) not in told
    assert len(told) < 1600


PATHS = {
    "preprocessing": "/framesieve.v1.PreprocessingService/Preprocess",
    "encoder": "/framesieve.v1.EncoderService/Encode",
    "generation": "/framesieve.v1.GenerationService/Generate",
}


@pytest.mark.parametrize("service", PATHS)
async def test_a_message_above_the_receive_limit_is_refused_and_one_at_it_is_read(
    stack: LocalStack, service: str
) -> None:
    """Of a caller that has no limit of its own: at the edge it is read, and found to be no request."""
    limit_bytes = 20 * 2**20
    unlimited = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(stack.addresses[service], unlimited) as channel:
        for size_bytes, why in (
            (limit_bytes + 1, rf"at most {limit_bytes} bytes: .*\({limit_bytes + 1} vs\. {limit_bytes}\)$"),
            (limit_bytes, rf"^a request of {limit_bytes} bytes is no message"),
        ):
            call = channel.unary_stream(PATHS[service])(b"\xff" * size_bytes, timeout=60)
            with pytest.raises(errors.InvalidRequest, match=why), upstream_errors(service):
                await call.read()
