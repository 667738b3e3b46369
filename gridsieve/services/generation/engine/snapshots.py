"""Chooses after which tokens the recurrent state is kept, so that other requests begin there."""

from __future__ import annotations

from gridsieve.services.generation.request.batch import Chunk


def snapshot_places(chunk: Chunk, block_tokens: int) -> set[int]:
    """The places within a chunk where other requests may begin with its state, in tokens of the sequence.

    Each is the end of a block: before and after a media item; where another request's prompt was found to part from
    this one; the last two of the prompt, because chat templates end it with tokens, such as `<think>`, that they leave
    out of earlier turns; and the last one of the answer. None of live sessions, which no other request finds.
    """
    request, prompt = chunk.request, chunk.request.prompt
    if not request.holding.grows:
        return set()
    wanted = [end for end in (chunk.known_end, chunk.end) if end > prompt.tokens]
    if chunk.start < prompt.tokens:
        end = prompt.tokens - 1 if prompt.complete else prompt.ready
        wanted += [end, end - block_tokens, request.holding.shared_tokens]
        for span in prompt.spans:
            if not span.first_row:
                wanted.append(span.offset)
            if span.first_row + span.length == prompt.num_kept[span.media_index]:
                wanted.append(span.end)
    whole = {tokens - tokens % block_tokens for tokens in wanted}
    return {tokens for tokens in whole if chunk.start < tokens <= chunk.end}
