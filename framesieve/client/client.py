"""The asyncio client: a question about media in, the answer's events or the whole answer out.

    async with FramesieveClient("127.0.0.1:50053") as client:
        answer = await client.ask("clip.mp4", "What moves?", pruning_rate=0.75)
        async for event in client.stream("clip.mp4", "What moves?", pruning_rate=0.75):
            ...

It owns the call and its errors; what is said on the wire is `framesieve.client.wire`'s and `framesieve.client.events`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, Unpack

from common.channels import REQUEST_ID_KEY, open_channel, upstream_errors
from common.contract.errors import PeerContract
from framesieve.client.answer import Accepted, Answer, Delta, Event, Finished, choice_of, cost_of
from framesieve.client.credentials import Access, credentials_of
from framesieve.client.events import event_of
from framesieve.client.prompt import Message, PartLike, user_turn
from framesieve.client.wire import Options, generate_request
from framesieve.v1 import generation_pb2_grpc

# Not localhost: where only one of its two addresses is free, gRPC listens there and clients may reach a stranger.
DEFAULT_ADDRESS = "127.0.0.1:50053"


class FramesieveClient:
    """A connection to the generation service, for any number of questions at once. An async context manager.

    address: host:port or unix:/path, or several replicas behind commas, which take turns.
    access: see `Access`: FramesieveClient("gpu-1:50053", tls_ca="ca.pem", token="…").
    Raises StartupError where that cannot be used, or a token would go to another machine in plain text.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, **access: Unpack[Access]) -> None:
        credentials = credentials_of(access)
        self.address = address
        self._token = credentials.metadata
        self._channel = open_channel(address, credentials)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what still runs and closes the connection."""
        await self._channel.close()

    async def ask(
        self,
        media: PartLike | Sequence[PartLike] | None,
        question: str,
        *,
        history: Sequence[Message] = (),
        **options: Unpack[Options],
    ) -> Answer:
        """The whole answer, `Answer.choices` where `n` asks for several. Arguments and errors are those of `stream`."""
        accepted: Accepted | None = None
        finished: list[Finished] = []
        deltas: list[Delta] = []
        async for event in self.stream(media, question, history=history, **options):
            match event:
                case Accepted():
                    accepted = event
                case Delta():
                    deltas.append(event)
                case Finished():
                    finished.append(event)
        choices = sorted(finished, key=lambda event: event.choice_index)
        if accepted is None or [each.choice_index for each in choices] != list(range(options.get("n") or 1)):
            raise PeerContract(f"the stream from {self.address} ended before its answer did")
        usage, timings = cost_of(finished)
        return Answer(accepted.request_id, tuple(choice_of(each, deltas) for each in choices), usage, timings)

    async def stream(
        self,
        media: PartLike | Sequence[PartLike] | None,
        question: str,
        *,
        history: Sequence[Message] = (),
        **options: Unpack[Options],
    ) -> AsyncIterator[Event]:
        """The answer's events as they happen; leaving the loop early cancels the request.

        media: the path of a file on this machine, a Video, an Image, a sequence of them (Text may stand between them),
            or None.
        question: stands after the media; "" adds nothing.
        history: the turns before this one, a system message first if there is one. Media of earlier turns are given
            again and pruned again; what an answer needs from them is in the prompt, never in the service:

                first = await client.ask("clip.mp4", "What moves?", pruning_rate=0.75)
                earlier = (
                    Message("user", (Video("clip.mp4"), Text("What moves?"))),
                    Message("assistant", (Text(first.text),)),
                )
                await client.ask("photo.jpg", "And here?", history=earlier, pruning_rate=0.75)

        options: see `Options`.
        Raises a leaf of FramesieveError with the service's own words, InvalidRequest for more than 16 MiB of files and
        embeddings, OSError for a file that cannot be read.
        """
        messages = [*history, user_turn(media, question)]
        request = await asyncio.to_thread(generate_request, messages, options)
        # Metadata carries nothing else than printable ASCII; the service refuses such an id in its own words.
        name = request.request_id
        named = ((REQUEST_ID_KEY, name),) if name.isascii() and name.isprintable() and name else ()
        with upstream_errors("generation"):
            call = self._generation.Generate(request, timeout=options.get("timeout_s"), metadata=(*named, *self._token))
            try:
                async for response in call:
                    yield event_of(response)
            finally:
                call.cancel()
