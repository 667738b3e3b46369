"""The command `gridsieve inspect`: draws which tokens of an image or video are kept, and which an answer attends to.

The frames come from preprocessing and the kept tokens from the encoder. Both services are asked at the same time about
the same prompt; their plans must agree. Generation answers a question afterwards.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Unpack

import numpy as np
import typer
from numpy.typing import NDArray

from gridsieve.cli.contact_sheet import contact_sheet, side_by_side, sliced_sheet
from gridsieve.cli.launcher import SERVICES, LocalStack
from gridsieve.cli.options import (
    AccessFlags,
    DrawnRateOption,
    FrameFlags,
    JsonOption,
    MethodsOption,
    ThresholdOption,
    in_flags,
    of_output,
    print_json,
    said_pruning,
)
from gridsieve.cli.signals import unwind_on_signals
from gridsieve.cli.terminal import reported_errors, stderr
from gridsieve.client.answer import Answer
from gridsieve.client.attention import Attention
from gridsieve.client.client import GridsieveClient
from gridsieve.client.credentials import Access, credentials_of
from gridsieve.client.encoding import SELECT_ALL, encode, responses
from gridsieve.client.messages import add_messages
from gridsieve.client.prompt import Image, Message, Pruning, Video, file_name
from gridsieve.common.channels import open_channel, upstream_errors
from gridsieve.common.contract.errors import InvalidRequest, PeerContract
from gridsieve.common.contract.plan import Grid, Int32Array, MediaPlan, Modality, PromptPlan
from gridsieve.common.contract.received import check_media, received_plan
from gridsieve.common.contract.retention import BEFORE_TOWER, NONE, SUGGESTED, ItemPruning
from gridsieve.common.contract.tensors import TensorBuffer
from gridsieve.common.contract.wire import add_chunk, buffer_for
from gridsieve.common.security.credentials import Credentials
from gridsieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc

_services = partial(typer.Option, rich_help_panel="Services")
_ANSWER_CHARACTERS = 60  # of an answer, in the caption
_SUFFIXES = (".png", ".jpg", ".jpeg")


def inspect(
    *,
    media: Annotated[str, typer.Argument(help="A video or an image: a file or a URL.")],
    pruning_rate: DrawnRateOption = None,
    pruning_method: MethodsOption = None,
    pruning_threshold: ThresholdOption = None,
    output: Annotated[Path, of_output("--output", "-o", help="The PNG or JPEG file to write.")] = Path("kept.png"),
    answer: Annotated[
        str | None, of_output(help="Ask this question, and dim the kept patches by the attention of the answer.")
    ] = None,
    max_new_tokens: Annotated[int | None, of_output(help="Maximum number of tokens of the answer.")] = None,
    frames: FrameFlags,
    preprocessing: Annotated[str | None, _services(help="Address of preprocessing.")] = None,
    encoder: Annotated[str | None, _services(help="Address of the encoder.")] = None,
    generation: Annotated[str | None, _services(help="Address of generation, for --answer.")] = None,
    model: Annotated[
        Path | None, _services(help="Checkpoint of the services that this command starts. Default: the demo model.")
    ] = None,
    as_json: JsonOption = False,
    access: AccessFlags,
) -> None:
    """Draw which patches of a video pruning keeps: all frames, with pruned patches dimmed; one sheet per method.

    Without --preprocessing and --encoder, this command starts the services that it needs and stops them afterwards.

    Example: gridsieve inspect clip.mp4

    Example: gridsieve inspect clip.mp4 --answer "What moves?" -o attention.png

    Example: gridsieve inspect clip.mp4 --pruning-rate 0.75 --pruning-method evs --pruning-method vcast -o kept.png
    """
    suggested = pruning_rate is None and pruning_threshold is None
    if suggested:
        prunings = [_suggested(each) for each in dict.fromkeys(pruning_method or [SUGGESTED.method])]
    else:
        named = dict.fromkeys(pruning_method or ()) or (None,)
        prunings = [said_pruning(pruning_rate, each, pruning_threshold) for each in named]
    part = frames.part(media)
    if output.suffix.lower() not in _SUFFIXES:
        raise typer.BadParameter(f"--output must end with {', '.join(_SUFFIXES)}, got {output}")
    if max_new_tokens is not None and answer is None:
        raise typer.BadParameter("--max-new-tokens is of the answer, and needs --answer")
    if (preprocessing is None) != (encoder is None):
        raise typer.BadParameter("--preprocessing and --encoder must be given together")
    if (generation is None) != (preprocessing is None or answer is None):
        raise typer.BadParameter("--generation must be given with --preprocessing and --answer, and without them not")
    with reported_errors(as_json=as_json):
        given = access.access()
        try:
            if preprocessing is not None and encoder is not None:
                inspected = asyncio.run(inspect_media(preprocessing, encoder, part, prunings, **given))
                if answer is not None and generation is not None:
                    inspected = asyncio.run(_answered(generation, part, answer, max_new_tokens, inspected, **given))
            else:
                unwind_on_signals()
                stack = LocalStack(model, services=SERVICES[: 2 if answer is None else 3], report=stderr.print)
                with stderr.status(f"starting {', '.join(stack.services)} for this command …"), stack:
                    addresses = stack.addresses["preprocessing"], stack.addresses["encoder"]
                    inspected = asyncio.run(inspect_media(*addresses, part, prunings, **given))
                    if answer is not None:
                        asked = _answered(stack.address, part, answer, max_new_tokens, inspected, **given)
                        inspected = asyncio.run(asked)
        except InvalidRequest as error:
            if suggested and error.field == "--pruning-method":
                error.remedy = "give a rate, which takes a method of this model: --pruning-rate 0.75"
            raise
        sheets = [_draw(each, file_name(media)) for each in inspected]
        side_by_side(sheets).save(output)
    _print_counts(inspected, output, as_json)


def _suggested(method: str) -> Pruning:
    """What is drawn of a method where nobody says how much to drop. Raises BadParameter for one that needs a rate."""
    if method not in (SUGGESTED.method, NONE):
        said_pruning(None, method, None)  # refuses a method that does not exist
        raise typer.BadParameter(f"--pruning-method {method} needs --pruning-rate, such as 0.75")
    return Pruning(method=method, threshold=None if method == NONE else SUGGESTED.threshold)


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """The frames that the model is shown of a media item, and the tokens that pruning keeps.

    frames: as `plan.frames` says, each [height, width, 3], RGB, uint8, rounded; an image's tiles may have another size
        than the first.
    kept: int32 [K], strictly increasing indices into the plan's grid.
    question, answer: what was asked, and the answer with its attention; None if nothing was.
    """

    pruning: ItemPruning
    plan: MediaPlan
    frames: Sequence[NDArray[np.uint8]]
    kept: Int32Array
    repaired_frames: int
    question: str = ""
    answer: Answer | None = None

    @property
    def attention(self) -> Attention | None:
        """Of the answer, on the one media item of its prompt."""
        return self.answer.attention if self.answer else None


async def inspect_media(
    preprocessing: str, encoder: str, media: Image | Video, prunings: Sequence[Pruning], **access: Unpack[Access]
) -> list[Inspection]:
    """Asks the services at the two addresses: the frames once, the kept tokens for each pruning.

    access: as for `GridsieveClient`, for both services.
    Raises subclasses of GridsieveError (InvalidRequest for embeds), and OSError for an unreadable file.
    """
    if media.embeds is not None:
        raise InvalidRequest("cannot be drawn: they have no frames", field=f"{type(media).__name__}.embeds")
    with in_flags([Message("user", (media,))]):
        encodings = asyncio.gather(*(encode(encoder, media, said, **access) for said in prunings))
        (plan, frames, repaired), found = await asyncio.gather(
            _frames(preprocessing, media, credentials_of(access)), encodings
        )
    if any((plan.fingerprint, plan.media[0]) != (encoded.fingerprint, encoded.plan) for (encoded,) in found):
        raise PeerContract("preprocessing and the encoder planned the prompt differently: do both run the same model?")
    return [Inspection(encoded.pruning, encoded.plan, frames, encoded.kept, repaired) for (encoded,) in found]


async def _answered(
    address: str,
    media: Image | Video,
    question: str,
    max_new_tokens: int | None,
    inspected: Sequence[Inspection],
    **access: Unpack[Access],
) -> list[Inspection]:
    """Asks generation at this address, with each pruning."""
    found = []
    async with GridsieveClient(address, **access) as client:
        for each in inspected:
            said = each.pruning
            pruning = Pruning(said.rate, said.method, said.seed, said.threshold)
            part = dataclasses.replace(media, pruning=pruning) if each.plan.modality is Modality.VIDEO else media
            with in_flags([Message("user", (part,))]):
                answer = await client.ask(part, question, attention=True, max_new_tokens=max_new_tokens)
            if answer.attention is None or not np.array_equal(answer.attention.media[0].kept, each.kept):
                raise PeerContract("the encoder and generation kept different tokens: do both run the same model?")
            found.append(dataclasses.replace(each, question=question, answer=answer))
    return found


async def _frames(
    address: str, media: Image | Video, credentials: Credentials
) -> tuple[PromptPlan, list[NDArray[np.uint8]], int]:
    """The plan, the frames of its one item, and how many of them were repaired."""
    first = preprocessing_pb2.PreprocessRequest()
    await asyncio.to_thread(add_messages, first.prompt, [Message("user", (media,))])
    select_all = preprocessing_pb2.PreprocessRequest(select=SELECT_ALL)
    buffer: TensorBuffer | None = None
    frames: list[NDArray[np.uint8]] = []
    repaired = 0
    async with open_channel(address, credentials) as channel:
        stub = preprocessing_pb2_grpc.PreprocessingServiceStub(channel)
        with upstream_errors("preprocessing"):
            answers = responses(stub.Preprocess(metadata=credentials.metadata), first, select_all)
            plan, _ = await received_plan(lambda: anext(answers, None))
            check_media(plan, first.prompt)
            async for response in answers:
                piece, item = response.frames, plan.media[0]
                repaired += piece.repaired_frames
                shape = (*piece.chunk.shape[:1], *item.frame_px(len(frames)), 3)
                buffer = buffer or buffer_for(piece.chunk, [item.frames.dtype], shape)
                add_chunk(buffer, piece.chunk)
                if buffer.complete:
                    values = np.frombuffer(buffer.data, buffer.dtype.label).reshape(buffer.shape)
                    frames.extend(values.round().clip(0, 255).astype(np.uint8))
                    buffer = None
    if len(frames) != plan.media[0].frames.count:
        raise PeerContract("preprocessing's stream ended before all frames were sent")
    return plan, frames, repaired


# --- output -----------------------------------------------------------------------------------------------------


def _draw(inspected: Inspection, name: str) -> Any:
    plan, frames = inspected.plan, inspected.frames
    grid, kept = plan.grid, inspected.kept.size
    shown = _shown(plan).replace("×", "by")  # which the font of the drawing has not
    caption = (
        f"{_described(inspected.pruning)} keeps {kept} of {grid.tokens} tokens ({kept / grid.tokens:.1%})  ·  {shown}"
    )
    weights = None
    if attention := inspected.attention:
        weights = attention.media[0].weights
        share = f"{1 - attention.text_share:.0%} of the attention is on them"
        caption += f"  ·  {share}  ·  {_shortened(str(inspected.answer))}"
    if plan.frames.tile_columns:
        return sliced_sheet(frames[0], np.stack(frames[1:]), plan.frames.tile_columns, name, caption)
    kept_tokens = inspected.kept
    if not _has_places(plan):
        # Tokens of tiles and of a resampler are in no frame's grid, and all are kept.
        grid, kept_tokens = Grid(plan.slices, 1, 1), np.arange(plan.slices, dtype=np.int32)
        weights = None if weights is None else weights.reshape(plan.slices, 1, 1, -1).sum(axis=3)
    stacked, in_groups = np.stack(frames), bool(plan.frames.group_frames)
    return contact_sheet(
        stacked, grid, kept_tokens, plan.timestamps_s, name, caption, plan.slice_frames, in_groups, weights
    )


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _ANSWER_CHARACTERS else f"{line[:_ANSWER_CHARACTERS]} ..."


def _described(pruning: ItemPruning) -> str:
    where = ", before the tower," if pruning.method in BEFORE_TOWER else ""
    rate = f"rate {pruning.rate:g}" if pruning.rate or pruning.threshold is None else ""
    threshold = "" if pruning.threshold is None else f"threshold {pruning.threshold:g}"
    return f"{pruning.method}{where} at {' and '.join(filter(None, (rate, threshold)))}"


def _has_places(plan: MediaPlan) -> bool:
    """Whether each token is a square of a frame."""
    height, width = plan.frames.size_px
    alone = plan.modality is Modality.VIDEO or plan.frames.count == 1
    return alone and height * plan.grid.w == width * plan.grid.h


def _print_counts(inspected: Sequence[Inspection], output: Path, as_json: bool) -> None:
    """As JSON: an object, or a list of them for several methods."""
    if as_json:
        counts = [_counts(each, output) for each in inspected]
        print_json(counts if len(counts) > 1 else counts[0])
        return
    for each in inspected:
        grid, kept = each.plan.grid, int(each.kept.size)
        place = f"{output}, {each.pruning.method}" if len(inspected) > 1 else output
        typer.echo(f"{place}: {kept} of {grid.tokens} tokens kept, {_shown(each.plan)}")
        if attention := each.attention:
            typer.echo(
                f"{each.answer}\n{1 - attention.text_share:.1%} of the attention is on the {each.plan.modality.value}"
            )


def _counts(inspected: Inspection, output: Path) -> dict[str, Any]:
    grid = inspected.plan.grid
    return {
        "output": str(output),
        "modality": inspected.plan.modality,
        "grid": dataclasses.asdict(grid),
        "tokens": grid.tokens,
        "kept_tokens": int(inspected.kept.size),
        "kept_tokens_by_slice": np.bincount(inspected.kept // grid.slice_tokens, minlength=grid.t).tolist(),
        "pruning": {name: getattr(inspected.pruning, name) for name in ("rate", "method", "seed", "threshold")},
        "repaired_frames": inspected.repaired_frames,
        **_told(inspected),
    }


def _told(inspected: Inspection) -> dict[str, Any]:
    """The answer and its attention, if there is one."""
    if inspected.attention is None:
        return {}
    (item,) = inspected.attention.media
    return {
        "question": inspected.question,
        "answer": str(inspected.answer),
        "attention": {
            "text_share": inspected.attention.text_share,
            "media_share": item.share,
            "kept": item.kept.tolist(),
            "weights": item.weights.reshape(-1)[item.kept].tolist(),
            "tokens": [
                {"text": text, "media_share": share}
                for text, share in zip(inspected.attention.tokens, item.token_shares.tolist(), strict=True)
            ],
        },
    }


def _shown(plan: MediaPlan) -> str:
    """What the tokens are of."""
    grid, slices, group, columns = plan.grid, plan.grid.t, plan.frames.group_frames, plan.frames.tile_columns
    if columns:
        each = f", {grid.w} tokens each" if grid.h == plan.frames.count else ""
        return f"source and {columns} × {(plan.frames.count - 1) // columns} slices{each}"
    if group:
        frames = f"up to {group} frames" if group > 1 else "1 frame"
        return f"{slices} group{'' if slices == 1 else 's'} of {frames}, {grid.slice_tokens} tokens each"
    what = "1 picture" if plan.modality is Modality.IMAGE else f"{slices} slice{'' if slices == 1 else 's'}"
    return f"{what} of {grid.h} × {grid.w} tokens"
