"""The asyncio client: send a question about media, receive its events one by one or the complete answer.

    async with GridsieveClient("127.0.0.1:50053") as client:
        answer = await client.ask("clip.mp4", "What moves?", pruning_rate=0.75)
        async for event in client.stream("clip.mp4", "What moves?", pruning_rate=0.75):
            ...

It owns the gRPC call and the mapping of its errors; `messages` converts to protobuf, and `events` from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeAlias, Unpack

import numpy as np

from gridsieve.client.answer import (
    Accepted,
    Answer,
    Delta,
    Event,
    Finished,
    Model,
    PruningMethod,
    choice_of,
    cost_of,
)
from gridsieve.client.credentials import Access, credentials_of
from gridsieve.client.events import event_of, usage_of
from gridsieve.client.live import LiveSession
from gridsieve.client.messages import embed_request, generate_request, live_open, python_remedies, score_request
from gridsieve.client.prompt import LiveOptions, Message, Options, PartLike, ReadOptions, user_turn
from gridsieve.client.vectors import Content, Embedding, Score, parts_of, together
from gridsieve.common.affinity import Affinity, media_key
from gridsieve.common.channels import REQUEST_ID_KEY, open_channel, read_from, upstream_errors
from gridsieve.common.contract.errors import PeerContract, Unavailable
from gridsieve.common.contract.wire import pruning_of
from gridsieve.common.retries import Attempts, Retries
from gridsieve.v1 import generation_pb2, generation_pb2_grpc, prompt_pb2

# Not "localhost", which names two addresses: a server that finds one of them taken listens on the other alone, and a
# client may then reach a different process.
DEFAULT_ADDRESS = "127.0.0.1:50053"

_TASKS = {
    generation_pb2.TASK_UNSPECIFIED: "generate",
    generation_pb2.TASK_GENERATE: "generate",
    generation_pb2.TASK_EMBED: "embed",
    generation_pb2.TASK_SCORE: "score",
}

Metadata: TypeAlias = Sequence[tuple[str, str]]


class GridsieveClient:
    """A connection to the generation service, for any number of concurrent questions. An async context manager.

    address: host:port or unix:/path, or several replicas separated by commas. Questions about the same media go to the
        same replica.
    access: see `Access`: GridsieveClient("gpu-1:50053", tls_ca="ca.pem", token="…").
    Raises StartupError for an unusable address, file or token, and for a token that would be sent to another machine
        unencrypted.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, **access: Unpack[Access]) -> None:
        credentials = credentials_of(access)
        self.address = address
        self._token = credentials.metadata
        self._channel = open_channel(address, credentials, by_media=True)
        self._affinity = Affinity()
        self._retries = Retries("generation", by_media=True)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels running requests and closes the connection."""
        await self._channel.close()

    async def models(self, *, metadata: Metadata = ()) -> tuple[Model, ...]:
        """The names of the checkpoint that is served, then each adapter. Raises a subclass of GridsieveError."""
        with upstream_errors("generation"):
            call = self._generation.ListModels(generation_pb2.ListModelsRequest(), metadata=(*metadata, *self._token))
            return tuple([_model(each) async for each in call])

    async def ask(
        self,
        media: PartLike | Sequence[PartLike] | None,
        question: str,
        *,
        history: Sequence[Message] = (),
        **options: Unpack[Options],
    ) -> Answer:
        """Returns the complete answer; with n > 1, all completions are in `Answer.choices`.

        Takes the same arguments and raises the same errors as `stream`.
        """
        return await self.answer([*history, user_turn(media, question)], options)

    async def stream(
        self,
        media: PartLike | Sequence[PartLike] | None,
        question: str,
        *,
        history: Sequence[Message] = (),
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event]:
        """Yields the events of a request as they arrive; leaving the loop early cancels the request.

        media: the path or URL of a file, a Video, an Image, a sequence of these (which may contain Text), or None.
        question: text placed after the media; "" adds nothing.
        history: the earlier turns, starting with the system message if there is one. The services keep no
            conversation state, so pass the media of earlier turns again; they are pruned again in the same way:

                first = await client.ask("clip.mp4", "What moves?", pruning_rate=0.75)
                earlier = (
                    Message("user", (Video("clip.mp4"), Text("What moves?"))),
                    Message("assistant", (Text(first.text),)),
                )
                await client.ask("photo.jpg", "And here?", history=earlier, pruning_rate=0.75)

        options: see `Options`.
        Raises a subclass of GridsieveError with the service's message, InvalidRequest for more files and
        embeddings than the service takes (64 MiB by default), OSError for a file that cannot be read.
        """
        async with aclosing(self.events([*history, user_turn(media, question)], options)) as events:
            async for event in events:
                yield event

    async def embed(
        self,
        media: PartLike | Sequence[PartLike] | None,
        text: str = "",
        *,
        instruction: str | None = None,
        dimensions: int | None = None,
        **options: Unpack[ReadOptions],
    ) -> Embedding:
        """The vector of media and text, by a model that embeds.

        media, text: as the media and the question of `stream`.
        instruction: what the vector is for. Default: the model's own (`Model.instruction`).
        dimensions: how many of the first values the vector has. Default: all.
        Raises the same errors as `stream`; InvalidRequest if the model does not embed.
        """
        return await self.embedding([user_turn(media, text)], instruction, dimensions, options)

    async def embedding(
        self,
        messages: Sequence[Message],
        instruction: str | None,
        dimensions: int | None,
        options: ReadOptions,
        *,
        metadata: Metadata = (),
    ) -> Embedding:
        """`embed` for a conversation that is given whole."""
        request = await asyncio.to_thread(embed_request, messages, instruction, dimensions, options)
        key = media_key(request.prompt)
        response = await self._read(self._generation.Embed, request, key, options, metadata)
        values = np.array(response.embedding, np.float32)
        return Embedding(values, response.request_id, usage_of(response.usage))

    async def score(
        self,
        query: Content,
        documents: Sequence[Content],
        *,
        instruction: str | None = None,
        **options: Unpack[ReadOptions],
    ) -> list[Score]:
        """How well each document answers a query, by a model that scores; in the order of the documents.

        query, documents: a string is text, a Path is media; see `Content`.
        instruction: what a document must do. Default: the model's own (`Model.instruction`).
        Raises the same errors as `stream`; InvalidRequest if the model does not score.
        """
        asked = Message("user", parts_of(query))
        return await together(
            self.scored(asked, Message("user", parts_of(each)), instruction, options) for each in documents
        )

    async def scored(
        self,
        query: Message,
        document: Message,
        instruction: str | None,
        options: ReadOptions,
        *,
        metadata: Metadata = (),
    ) -> Score:
        """`score` for one document. query, document: turns of the user."""
        request = await asyncio.to_thread(score_request, query, document, instruction, options)
        both = prompt_pb2.Message(parts=[*request.query, *request.document])
        key = media_key(prompt_pb2.Prompt(messages=[both]))
        response = await self._read(self._generation.Score, request, key, options, metadata)
        return Score(response.score, response.request_id, usage_of(response.usage))

    async def _read(
        self,
        method: Callable[..., Awaitable[Any]],
        request: Any,
        key: str | None,
        options: ReadOptions,
        given: Metadata,
    ) -> Any:
        """The response to a request about the media of this key, which is sent again as `events` does."""
        with python_remedies(), self._affinity.of(key) as same_replica:
            sent = (*_named(request.request_id), *given, *same_replica, *self._token)
            attempts = Attempts(self._retries, sent, options.get("timeout_s"))
            while True:
                try:
                    with upstream_errors("generation"):
                        response = await method(request, timeout=attempts.left_s, metadata=attempts.metadata)
                except Unavailable as lost:
                    await attempts.next(lost, answered=False)
                else:
                    self._retries.succeeded()
                    return response

    def live(self, **options: Unpack[LiveOptions]) -> LiveSession:
        """A conversation that watches; see `LiveSession`.

        Raises InvalidRequest for a value that its field cannot hold. Entering it raises a subclass of GridsieveError:
        InvalidRequest for a value outside its range, and for models that are not served live, Overloaded where no room
        is left for the session.
        """
        opened = live_open(options)
        sent = (*_named(opened.request_id), *self._token)
        return LiveSession(lambda: self._generation.Live(metadata=sent), opened)

    async def answer(self, messages: Sequence[Message], options: Options, *, metadata: Metadata = ()) -> Answer:
        """`ask` for a conversation that is given whole, as `events`."""
        return await self.collected(self.events(messages, options, metadata=metadata), options)

    async def collected(self, events: AsyncGenerator[Event], options: Options) -> Answer:
        """The answer that all events of a request with these options add up to."""
        accepted: Accepted | None = None
        finished: list[Finished] = []
        deltas: list[Delta] = []
        async with aclosing(events):
            async for event in events:
                match event:
                    case Accepted():
                        accepted = event
                    case Delta():
                        deltas.append(event)
                    case Finished():
                        finished.append(event)
        choices = sorted(finished, key=lambda event: event.choice_index)
        if accepted is None or [each.choice_index for each in choices] != list(range(options.get("n") or 1)):
            raise PeerContract(f"the stream from {self.address} ended before all completions were finished")
        usage, timings = cost_of(finished)
        return Answer(accepted.request_id, tuple(choice_of(each, deltas) for each in choices), usage, timings)

    async def events(
        self, messages: Sequence[Message], options: Options, *, metadata: Metadata = ()
    ) -> AsyncGenerator[Event]:
        """`stream` for a conversation that is given whole.

        metadata: of the gRPC call, beside the request id and this client's own token.
        """
        request = await asyncio.to_thread(generate_request, messages, options)
        del messages  # their media may be large, and are in the request now
        with python_remedies(), self._affinity.of(media_key(request.prompt)) as same_replica:
            sent = (*_named(request.request_id), *metadata, *same_replica, *self._token)
            attempts = Attempts(self._retries, sent, options.get("timeout_s"))
            answered = False
            while True:
                call = self._generation.Generate(request, timeout=attempts.left_s, metadata=attempts.metadata)
                try:
                    while (response := await read_from(call, "generation")) is not None:
                        answered = True
                        yield event_of(response)
                except Unavailable as lost:
                    if answered:
                        raise
                    await attempts.next(lost, answered=False)
                else:
                    self._retries.succeeded()
                    return
                finally:
                    call.cancel()


def _named(request_id: str) -> Metadata:
    """gRPC metadata holds printable ASCII only. Any other id is sent in the request alone; the service rejects it."""
    return ((REQUEST_ID_KEY, request_id),) if request_id.isascii() and request_id.isprintable() and request_id else ()


def _model(told: generation_pb2.ListModelsResponse) -> Model:
    pruning, methods = pruning_of(told.pruning), told.pruning_methods
    return Model(
        told.name,
        told.adapter,
        told.max_model_len,
        pruning.rate,
        pruning.method,
        pruning.threshold,
        tuple(
            PruningMethod(
                each.name,
                each.before_tower,
                each.suggested_threshold if each.HasField("suggested_threshold") else None,
            )
            for each in methods
        ),
        _TASKS.get(told.task, "unknown"),
        told.instruction,
        told.sounds,
    )
