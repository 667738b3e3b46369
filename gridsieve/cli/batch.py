"""The command `gridsieve batch`: asks many questions through a gateway, and writes a row for each answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gridsieve.cli.launcher import GATEWAY, SERVICES, LocalStack, check_packages, listens
from gridsieve.cli.options import AccessFlags, JsonOption, PruningFlags, of_output, print_json
from gridsieve.cli.signals import unwind_on_signals
from gridsieve.cli.terminal import reported_errors, stderr, warn
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.media_files import kind_of
from gridsieve.jobs.answers import Answers, opened
from gridsieve.jobs.http import HttpAsker
from gridsieve.jobs.job import Job
from gridsieve.jobs.lines import Row, failure_of, tokens_of
from gridsieve.jobs.requests import FileRequests, FolderRequests, Requests

_server = partial(typer.Option, rich_help_panel="Server")
_table = partial(typer.Option, rich_help_panel="A question about each clip of a folder")

_LISTEN = "127.0.0.1:8000"


def batch(
    *,
    requests: Annotated[
        Path | None,
        typer.Argument(
            metavar="[REQUESTS]",
            help="JSONL in the format of OpenAI's Batch API: custom_id, method, url and body in each line.",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File of the answers. Requests that it has rows of are done, and not asked again."
        ),
    ],
    folder: Annotated[
        Path | None,
        _table(help="Folder of videos, images and sounds, in place of REQUESTS. Its subfolders count, too."),
    ] = None,
    question: Annotated[str | None, _table("--question", "-q", help="The question about each of them.")] = None,
    schema: Annotated[Path | None, _table(help="JSON schema, in a file, that every answer satisfies.")] = None,
    on_server: Annotated[
        bool, _table("--on-server", help="Send paths: preprocessing has the folder below its --media-root.")
    ] = False,
    pruning: PruningFlags,
    max_new_tokens: Annotated[int | None, _table(min=1, help="Maximum number of tokens of an answer.")] = None,
    ordered: Annotated[
        bool, of_output("--ordered", help="Write rows in the order of the requests. Default: as they are answered.")
    ] = False,
    as_json: JsonOption = False,
    gateway: Annotated[
        str | None,
        _server(
            envvar="GRIDSIEVE_GATEWAY",
            help=f"URL of the gateway. Default: http://{_LISTEN} if a server listens there (gridsieve serve), "
            "otherwise as with --start.",
        ),
    ] = None,
    start: Annotated[
        bool,
        _server(
            "--start",
            help="Start the services and a gateway for this run, and stop them afterwards. They may read the files "
            "below --folder, or below the folder of REQUESTS.",
        ),
    ] = False,
    model: Annotated[
        Path | None, _server(help="Checkpoint folder or repository; implies --start. Default: the embedded demo model.")
    ] = None,
    access: AccessFlags,
) -> None:
    """Ask many questions, such as one about each clip of a folder; a run that was interrupted continues.

    As many requests are in flight as the services take. They yield to other requests (`service_tier` is `flex`, where
    a line has no other).

    The output is the state of the run. After a crash or Ctrl-C, the same command asks what is missing. A request that
    fails is a row with the reason, and is not asked again unless you delete its row. What can pass is not a failure:
    a request that the services have no room for waits, and if they are gone for two minutes the run ends.

    Exit status: 0; 1 if a request of this run failed, or the run ended early; 130 after Ctrl-C.

    Example: gridsieve batch requests.jsonl -o answers.jsonl

    Example: gridsieve batch --folder clips -q "What happens?" --schema schema.json --pruning-rate 0.75 -o answers.jsonl
    """
    _check_flags(requests, folder, question, gateway, start or model is not None)
    if folder is None:
        said = {f"--pruning-{name.partition('_')[2]}": value for name, value in pruning.options().items()}
        said |= {"--schema": schema, "--max-new-tokens": max_new_tokens, "--on-server": on_server or None}
        if given := next((name for name, value in said.items() if value is not None), None):
            raise typer.BadParameter(f"{given} is of a --folder: the lines of REQUESTS say all of their requests")
    with reported_errors(as_json=as_json):
        starts = start or model is not None or (gateway is None and not listens(_LISTEN))
        asked = _requests(requests, folder, question, schema, pruning, max_new_tokens, on_server or starts)
        with opened(output) as answers:
            missing = [number for number, name in enumerate(asked.ids) if name not in answers.done]
            sounds = {number for number in missing if folder and kind_of(PurePath(asked.ids[number])) == "audio"}
            sums = _Sums(done_before=len(asked.ids) - len(missing))
            if missing:
                root = (folder or (requests or Path()).absolute().parent).absolute() if starts else None
                with _served(gateway, root, model) as url:
                    asyncio.run(_run(url, access, asked, missing, sounds, answers, ordered, sums))
    _print(sums, as_json)
    if sums.failed:
        raise typer.Exit(1)


async def _run(
    url: str,
    access: AccessFlags,
    asked: Requests,
    numbers: Sequence[int],
    sounds: Collection[int],
    answers: Answers,
    ordered: bool,
    sums: _Sums,
) -> None:
    """sounds: those of the numbers that only a model that hears is asked about."""
    async with HttpAsker(url, **access.access()) as asker:
        if not await asker.hears():
            sums.skipped = [asked.ids[number] for number in numbers if number in sounds]
            numbers = [number for number in numbers if number not in sounds]
        with _Bar(sums, len(numbers)) as bar:
            job = Job(asked, asker.ask, answers.write, ordered=ordered, on_row=bar.add, on_wait=bar.waits)
            await job.run(numbers)


def _check_flags(
    requests: Path | None, folder: Path | None, question: str | None, gateway: str | None, starts: bool
) -> None:
    if (requests is None) is (folder is None):
        raise typer.BadParameter("either REQUESTS or --folder must be given")
    if folder is not None and not (question or "").strip():
        raise typer.BadParameter("--folder needs a --question")
    if folder is None and question is not None:
        raise typer.BadParameter("--question is about the clips of a --folder")
    if gateway is not None and starts:
        raise typer.BadParameter("--gateway excludes --start and --model")


def _requests(
    requests: Path | None,
    folder: Path | None,
    question: str | None,
    schema: Path | None,
    pruning: PruningFlags,
    max_new_tokens: int | None,
    on_server: bool,
) -> Requests:
    """Raises InvalidRequest, OSError."""
    if folder is None:
        assert requests is not None
        try:
            return FileRequests.read(requests)
        except InvalidRequest as error:
            raise InvalidRequest(f"{requests}: {error}") from None
    fields: dict[str, Any] = {}
    said = pruning.options()
    how = {"rate": said["pruning_rate"], "method": said["pruning_method"], "threshold": said["pruning_threshold"]}
    if given := {name: value for name, value in how.items() if value is not None}:
        fields["pruning"] = given
    if max_new_tokens is not None:
        fields["max_completion_tokens"] = max_new_tokens
    if schema is not None:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": schema.stem, "schema": _schema(schema)},
        }
    return FolderRequests.find(folder, question or "", fields, on_server)


def _schema(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidRequest(f"--schema {path} is not JSON: {error}") from None


@contextlib.contextmanager
def _served(gateway: str | None, root: Path | None, model: Path | None) -> Iterator[str]:
    """The URL of the gateway. root: what services that are started for this run may read; None: none are."""
    if root is None:
        yield gateway or f"http://{_LISTEN}"
        return
    unwind_on_signals()
    services = (*SERVICES, GATEWAY)
    check_packages(services)
    stack = LocalStack(model, services=services, media_root=root, report=stderr.print)
    with contextlib.ExitStack() as started:
        with stderr.status("starting three services and a gateway …"):
            started.enter_context(stack)
        yield stack.url


@dataclass(slots=True)
class _Sums:
    """Of the rows of this run. done_before: requests that the output had rows of. first_failure: with its request.
    skipped: files that the model does not take, which have no row."""

    done_before: int
    skipped: list[str] = field(default_factory=list)
    answered: int = 0
    failed: int = 0
    first_failure: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    requests_per_s: float = 0.0

    def add(self, row: Row, seconds: float) -> None:
        """seconds: since the first request was sent."""
        failure = failure_of(row)
        if failure:
            self.failed += 1
            self.first_failure = self.first_failure or f"{row['custom_id']}: {failure}"
        self.answered += not failure
        prompt, completion = tokens_of(row)
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self.seconds = seconds
        self.requests_per_s = (self.answered + self.failed) / seconds

    def words(self) -> str:
        tokens = f"{self.prompt_tokens} → {self.completion_tokens} tokens"
        failed = f"{self.failed} failed · " if self.failed else ""
        return f"{failed}{self.requests_per_s:.2f}/s · {tokens}"


class _Bar(Progress):
    """How far the run is, if stderr is a terminal: requests, their rate, tokens, and the time that is left."""

    def __init__(self, sums: _Sums, total: int) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        super().__init__(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
        self._sums = sums
        self._began_s = 0.0
        self._requests = self.add_task("", total=total)

    def start(self) -> None:
        self._began_s = time.monotonic()
        super().start()

    def add(self, row: Row) -> None:
        self._sums.add(row, time.monotonic() - self._began_s)
        self.update(self._requests, advance=1, description=escape(self._sums.words()))

    def waits(self, why: str) -> None:
        self.update(self._requests, description=escape(f"{self._sums.words()} · waits: {why}"))


def _print(sums: _Sums, as_json: bool) -> None:
    if as_json:
        print_json(asdict(sums))
        return
    before = f"{sums.done_before} done before · " if sums.done_before else ""
    stderr.print(f"{before}{sums.answered} answered in {sums.seconds:.1f} s · {sums.words()}", soft_wrap=True)
    if sums.skipped:
        warn(f"skipped, because the model takes no sounds: {', '.join(sums.skipped)}")
    if sums.first_failure:
        warn(f"the first failure: {sums.first_failure}")
