"""The command against hand-written services on unix sockets: what it prints where, and how it exits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from fractions import Fraction
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from client.cli import app
from client.contact_sheet import contact_sheet
from common.channels import DETAILS_KEY, status_details
from common.errors import MediaDamaged
from common.plan import Grid, MediaPlan, Modality, PromptPlan, Run
from common.retention import METHODS
from common.tensors import DType
from common.wire import int32_tensor, plan_messages, tensor_chunks
from framesieve.v1 import (
    encoder_pb2,
    encoder_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    preprocessing_pb2,
    preprocessing_pb2_grpc,
    prompt_pb2,
)

FRAME_PX = 56
GRID = Grid(t=2, h=2, w=2)
PLAN = PromptPlan(
    input_ids=np.arange(10, dtype=np.int32),
    positions=np.zeros((3, 10), dtype=np.int32),
    media=(
        MediaPlan(
            modality=Modality.VIDEO,
            grid=GRID,
            runs=(Run(1, 8),),
            frames=4,
            frame_height_px=FRAME_PX,
            frame_width_px=FRAME_PX,
            seconds_per_grid=Fraction(1),
            timestamps_s=(0.0, 0.5, 1.0, 1.5),
            content_hash=bytes(32),
        ),
    ),
    embed_levels=0,
    fingerprint=bytes(32),
)

# Patches of 16 px in 2 × 2, text between the slices, deepstack.
SLICES_APART = PromptPlan(
    input_ids=np.arange(24, dtype=np.int32),
    positions=np.zeros((3, 24), dtype=np.int32),
    media=(
        MediaPlan(
            modality=Modality.VIDEO,
            grid=Grid(t=2, h=2, w=3),
            runs=(Run(6, 6), Run(17, 6)),
            frames=4,
            frame_height_px=64,
            frame_width_px=96,
            seconds_per_grid=Fraction(1),
            timestamps_s=(0.0, 0.5, 1.0, 1.5),
            content_hash=bytes(32),
        ),
    ),
    embed_levels=3,
    fingerprint=bytes(32),
)


class FakeServices(
    generation_pb2_grpc.GenerationServiceServicer,
    encoder_pb2_grpc.EncoderServiceServicer,
    preprocessing_pb2_grpc.PreprocessingServiceServicer,
):
    """All three services at one address; `kept` is what the encoder answers."""

    def __init__(self) -> None:
        self.plan = PLAN
        self.kept: list[int] | None = [0, 1, 2, 3]
        self.refusal: MediaDamaged | None = None
        self.asked: list[Any] = []
        self.hang = threading.Event()
        self.cancelled = threading.Event()

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        self.asked.append(request)
        context.add_callback(self.cancelled.set)
        if self.refusal:
            details = status_details(self.refusal).SerializeToString()
            context.set_trailing_metadata(((DETAILS_KEY, details),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(self.refusal))
        video = generation_pb2.MediaUsage(
            modality=prompt_pb2.MODALITY_VIDEO,
            grid=prompt_pb2.Grid(t=2, h=2, w=2),
            kept_tokens=4,
            repaired_frames=3,
            first_slice_only=True,
        )
        usage = generation_pb2.Usage(prompt_tokens_full=12, prompt_tokens=8, media=[video])
        yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(request_id="r1", usage=usage))
        yield generation_pb2.GenerateResponse(
            progress=encoder_pb2.MediaProgress(media_index=0, decoded_slices=2, encoded_slices=1)
        )
        yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text="A red ", token_ids=[1]))
        if self.hang.is_set():
            self.cancelled.wait(20)
        yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text="ball ⚽", token_ids=[2]))
        yield generation_pb2.GenerateResponse(
            finished=generation_pb2.Finished(
                reason=generation_pb2.FINISH_REASON_STOP,
                usage=generation_pb2.Usage(prompt_tokens_full=12, prompt_tokens=8, completion_tokens=2, media=[video]),
                timings=generation_pb2.Timings(time_to_first_token_s=0.5, decode_s=0.5, generate_s=0.25),
            )
        )

    def Preprocess(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.asked.append(next(requests).prompt)
        for plan in plan_messages(self.plan):
            yield preprocessing_pb2.PreprocessResponse(plan=plan)
        assert next(requests).select.all
        for first in (0, 2):
            shape = (2, self.plan.media[0].frame_height_px, self.plan.media[0].frame_width_px, 3)
            frames = np.full(shape, 40 + 50 * first, dtype=np.uint8)
            for chunk in tensor_chunks(DType.UINT8, shape, frames.data):
                yield preprocessing_pb2.PreprocessResponse(
                    frames=preprocessing_pb2.FramesChunk(first_frame=first, chunk=chunk, repaired_frames=first)
                )

    def Encode(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.asked.append(next(requests).prompt)
        for plan in plan_messages(self.plan):
            yield encoder_pb2.EncodeResponse(plan=plan)
        assert next(requests).select.all
        count = self.plan.media[0].grid.tokens if self.kept is None else len(self.kept)
        shape = (1 + self.plan.embed_levels, count, 4)
        kept = None if self.kept is None else int32_tensor(np.array(self.kept, dtype=np.int32))
        for chunk in tensor_chunks(DType.FLOAT32, shape, np.zeros(shape, dtype=np.float32).data):
            yield encoder_pb2.EncodeResponse(embeds=encoder_pb2.EmbedsChunk(kept=kept, chunk=chunk))


@pytest.fixture
def services() -> FakeServices:
    return FakeServices()


@pytest.fixture
def address(services: FakeServices, tmp_path: Path) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(services, server)
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(services, server)
    preprocessing_pb2_grpc.add_PreprocessingServiceServicer_to_server(services, server)
    server.add_insecure_port(f"unix:{tmp_path}/all.sock")
    server.start()
    yield f"unix:{tmp_path}/all.sock"
    server.stop(0).wait()


@pytest.fixture
def clip(tmp_path: Path) -> str:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"film")
    return str(path)


@pytest.fixture
def framesieve() -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    return run


def test_ask_streams_the_answer_to_stdout_and_its_cost_to_stderr(
    framesieve: Callable[..., Result], address: str, clip: str
) -> None:
    result = framesieve("ask", clip, "What moves?", "--pruning-rate", "0.75", "--server", address)
    assert result.exit_code == 0
    assert result.stdout == "A red ball ⚽\n"
    assert "12 → 8 prompt tokens · 2 tokens in 0.75 s, the first after 0.50 s" in result.stderr
    assert "3 damaged frames" in result.stderr
    assert "no motion can be seen" in result.stderr


def test_ask_sends_what_it_was_told(
    framesieve: Callable[..., Result], services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"photo")
    settings = ["--pruning-rate", "0.5", "--method", "random", "--fps", "4", "--max-frames", "16"]
    choices = ["--max-new-tokens", "5", "--temperature", "0", "--seed", "7"]
    framesieve("ask", clip, str(photo), "What differs?", *settings, *choices, "--server", address)
    (request,) = services.asked
    video, image, text = request.prompt.messages[0].parts
    assert (video.video.data, image.image.data, text.text) == (b"film", b"photo", "What differs?")
    assert (video.video.frame_sampling.fps, video.video.frame_sampling.max_frames) == (4, 16)
    assert (request.pruning.rate, request.pruning.method) == (0.5, "random")
    assert (request.sampling.max_new_tokens, request.sampling.temperature, request.sampling.seed) == (5, 0, 7)


def test_ask_names_files_on_the_server_without_sending_them(
    framesieve: Callable[..., Result], services: FakeServices, address: str
) -> None:
    assert framesieve("ask", "films/a.mp4", "?", "--on-server", "--server", address).exit_code == 0
    assert services.asked[0].prompt.messages[0].parts[0].video.path == "films/a.mp4"


@pytest.mark.parametrize("flags", [[], ["--on-server"]])
def test_ask_sends_urls_as_they_stand(
    framesieve: Callable[..., Result], services: FakeServices, address: str, flags: list[str]
) -> None:
    urls = ["https://a.test//clip.mp4?x=1", "http://a.test/photo.jpg?x=clip.mp4", "data:image/png,x"]
    assert framesieve("ask", *urls, "?", *flags, "--fps", "4", "--server", address).exit_code == 0
    video, photo, inline, _ = services.asked[0].prompt.messages[0].parts
    assert [video.video.url, photo.image.url, inline.image.url] == urls
    assert video.video.frame_sampling.fps == 4


def test_ask_needs_no_media(framesieve: Callable[..., Result], services: FakeServices, address: str) -> None:
    assert framesieve("ask", "Hello?", "--server", address).exit_code == 0
    assert [part.text for part in services.asked[0].prompt.messages[0].parts] == ["Hello?"]


def test_json_is_one_object_and_nothing_else(framesieve: Callable[..., Result], address: str, clip: str) -> None:
    result = framesieve("ask", clip, "What moves?", "--server", address, "--json")
    assert result.stderr == ""
    told = json.loads(result.stdout)
    assert told["answer"] == "A red ball ⚽"
    assert told["finish_reason"] == "stop"
    assert told["usage"]["prompt_tokens_full"] == 12
    assert told["usage"]["media"][0] == {
        "modality": "video", "grid": {"t": 2, "h": 2, "w": 2}, "kept_tokens": 4,
        "repaired_frames": 3, "first_slice_only": True,
    }  # fmt: skip
    assert told["timings"]["decode_s"] == 0.5


def test_a_refusal_is_one_line_that_begins_with_its_reason(
    framesieve: Callable[..., Result], services: FakeServices, address: str, clip: str
) -> None:
    services.refusal = MediaDamaged("12 of 40 frames [0.30] cannot be decoded")
    result = framesieve("ask", clip, "?", "--server", address)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "MEDIA_DAMAGED: 12 of 40 frames [0.30] cannot be decoded\n"


def test_where_nothing_listens_the_error_says_how_to_start_it(
    framesieve: Callable[..., Result], tmp_path: Path
) -> None:
    result = framesieve("ask", "?", "--server", f"unix:{tmp_path}/nobody.sock")
    assert result.exit_code == 1
    assert "framesieve serve" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_file_is_named(framesieve: Callable[..., Result], address: str, tmp_path: Path) -> None:
    result = framesieve("ask", str(tmp_path / "no.mp4"), "?", "--server", address)
    assert (result.exit_code, result.stderr) == (1, f"FILE: {tmp_path}/no.mp4: No such file or directory\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("ask",),
        ("ask", "?", "--pruning-rate", "1"),
        ("ask", "?", "--pruning-rate", "nan"),
        ("ask", "?", "--method", "magic"),
        ("inspect", "clip.mp4", "--encoder", "localhost:1"),
        ("serve", "--no-such-flag"),
    ],
)
def test_wrong_usage_exits_with_2(framesieve: Callable[..., Result], arguments: tuple[str, ...]) -> None:
    assert framesieve(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["serve", "ask", "inspect"])
def test_help_ends_with_an_example(framesieve: Callable[..., Result], command: str) -> None:
    assert f"Example: framesieve {command}" in framesieve(command, "--help").stdout


@pytest.mark.parametrize("command", ["ask", "inspect"])
def test_help_says_what_each_method_keeps(framesieve: Callable[..., Result], command: str) -> None:
    told = framesieve(command, "--help").stdout
    assert [f"{method}: " in told for method in METHODS] == [True] * len(METHODS)


def test_help_says_where_a_video_gets_a_rate_of_its_own(framesieve: Callable[..., Result]) -> None:
    assert "Video(pruning=...)" in framesieve("ask", "--help").stdout


def test_ctrl_c_exits_with_130_and_cancels_the_request(services: FakeServices, address: str, clip: str) -> None:
    services.hang.set()
    code = "from client.cli import app; app()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "ask", clip, "?", "--server", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(6) == b"A red "
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert b"Traceback" not in process.stderr.read()
    assert services.cancelled.wait(5)


def test_inspect_writes_a_picture_and_prints_the_counts(
    framesieve: Callable[..., Result], services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    output = tmp_path / "kept.png"
    places = ["--preprocessing", address, "--encoder", address]
    result = framesieve("inspect", clip, "--pruning-rate", "0.5", "-o", str(output), *places)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{output}: 4 of 8 tokens kept, 2 slices of 2 × 2\n"
    with Image.open(output) as picture:
        assert picture.format == "PNG"
    encode = next(each for each in services.asked if isinstance(each, encoder_pb2.EncodePrompt))
    assert (encode.pruning.rate, encode.pruning.method) == (0.5, "evs")
    assert encode.prompt.messages[0].parts[0].video.data == b"film"


def test_inspect_names_a_url_without_its_query(
    framesieve: Callable[..., Result],
    services: FakeServices,
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captions: list[str] = []

    def drawn(*arguments: Any) -> Any:
        captions.append(arguments[4])
        return contact_sheet(*arguments)

    monkeypatch.setattr("client.cli.contact_sheet", drawn)
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    for url in ("https://a.test/clips/a%20b.mp4?signature=secret", "data:video/mp4,secret"):
        assert framesieve("inspect", url, *places).exit_code == 0
        assert {each.messages[0].parts[0].video.url for each in services.asked if hasattr(each, "messages")} >= {url}
    assert captions == ["a b.mp4", "data:"]


def test_inspect_counts_by_slice_for_machines(
    framesieve: Callable[..., Result], services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    services.kept = [0, 1, 2, 3, 5, 7]
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    told = json.loads(framesieve("inspect", clip, "--pruning-rate", "0.25", *places, "--json").stdout)
    assert (told["tokens"], told["kept_tokens"], told["kept_tokens_by_slice"]) == (8, 6, [4, 2])
    assert told["repaired_frames"] == 2


def test_inspect_understands_that_an_absent_kept_is_everything(
    framesieve: Callable[..., Result], services: FakeServices, address: str, clip: str, tmp_path: Path
) -> None:
    services.kept = None
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    assert "8 of 8 tokens kept" in framesieve("inspect", clip, "--pruning-rate", "0", *places).stdout


@pytest.mark.parametrize(
    ("method", "kept", "by_slice"),
    [
        ("evs", [0, 1, 2, 3, 4, 5], [6, 0]),
        ("vidcom2", [4, 6, 9], [1, 2]),
        ("random", [1, 3, 4, 7, 8, 11], [3, 3]),
        ("none", None, [6, 6]),
    ],
)
def test_inspect_draws_slices_that_stand_apart_by_every_method(
    framesieve: Callable[..., Result],
    services: FakeServices,
    address: str,
    clip: str,
    tmp_path: Path,
    method: str,
    kept: list[int] | None,
    by_slice: list[int],
) -> None:
    services.plan, services.kept = SLICES_APART, kept
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    told = json.loads(
        framesieve("inspect", clip, "--method", method, "--pruning-rate", "0.75", *places, "--json").stdout
    )
    assert told["kept_tokens_by_slice"] == by_slice
    assert told["pruning"] == {"rate": 0.75, "method": method, "seed": None}
    encode = next(each for each in services.asked if isinstance(each, encoder_pb2.EncodePrompt))
    assert encode.pruning.method == method
    with Image.open(tmp_path / "kept.png") as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize("kept", [[0, 1, 2], [0, 1, 3, 2], [0, 1, 2, 8]])
def test_inspect_refuses_an_encoder_that_breaks_the_contract(
    framesieve: Callable[..., Result],
    services: FakeServices,
    address: str,
    clip: str,
    tmp_path: Path,
    kept: list[int],
) -> None:
    services.kept = kept
    places = ["--preprocessing", address, "--encoder", address, "-o", str(tmp_path / "kept.png")]
    result = framesieve("inspect", clip, "--pruning-rate", "0.5", *places)
    assert result.exit_code == 1
    assert result.stderr.startswith("PEER_CONTRACT: the encoder kept")
