"""The asyncio client: a question about media in, the answer's events or the whole answer out.

    async with FramesieveClient("127.0.0.1:50053") as client:
        answer = await client.ask("clip.mp4", "What moves?", pruning_rate=0.75)
        async for event in client.stream("clip.mp4", "What moves?", pruning_rate=0.75):
            ...

It owns the call and its errors; what is said on the wire is `client.wire`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, Unpack

from client.answer import Accepted, Answer, Delta, Event, Finished
from client.prompt import Message, PartLike, user_turn
from client.wire import Options, event_of, generate_request
from common.channels import REQUEST_ID_KEY, open_channel, upstream_errors
from common.errors import PeerContract
from framesieve.v1 import generation_pb2_grpc

# Not localhost: where only one of its two addresses is free, gRPC listens there and clients may reach a stranger.
DEFAULT_ADDRESS = "127.0.0.1:50053"


class FramesieveClient:
    """A connection to the generation service, for any number of questions at once. An async context manager.

    address: host:port or unix:/path.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        self._channel = open_channel(address)
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
        """The whole answer. Arguments and errors are those of `stream`."""
        accepted: Accepted | None = None
        finished: Finished | None = None
        deltas: list[Delta] = []
        async for event in self.stream(media, question, history=history, **options):
            match event:
                case Accepted():
                    accepted = event
                case Delta():
                    deltas.append(event)
                case Finished():
                    finished = event
        if accepted is None or finished is None:
            raise PeerContract(f"the stream from {self.address} ended before its answer did")
        return Answer(
            request_id=accepted.request_id,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            logprobs=tuple(value for delta in deltas for value in delta.logprobs),
            reason=finished.reason,
            usage=finished.usage,
            timings=finished.timings,
        )

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
        metadata = ((REQUEST_ID_KEY, name),) if name.isascii() and name.isprintable() and name else None
        with upstream_errors("generation"):
            call = self._generation.Generate(request, timeout=options.get("timeout_s"), metadata=metadata)
            try:
                async for response in call:
                    yield event_of(response)
            finally:
                call.cancel()
