"""Which media items a caller asks for, as `Preprocess` and `Encode` both understand it.

Nothing is selected by silence: a call that is cancelled looks, for a moment, like one that was half-closed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from common.contract.errors import InvalidRequest
from framesieve.v1.encoder_pb2 import EncodeRequest
from framesieve.v1.preprocessing_pb2 import PreprocessRequest


async def selections(
    requests: AsyncIterator[PreprocessRequest] | AsyncIterator[EncodeRequest], media: int
) -> AsyncIterator[int]:
    """Indices of the selected items, in the order of their selection, until the caller half-closes.

    requests: those after the prompt. media: how many items the plan has.
    Raises InvalidRequest for an index outside the plan, one that was selected before, and a second prompt.
    """
    selected: set[int] = set()
    async for request in requests:
        if not request.HasField("select"):
            raise InvalidRequest("after the prompt, every request of a stream must be a select")
        if request.select.all:
            indices = [index for index in range(media) if index not in selected]
        else:
            indices = [_checked(request.select.media_index, media, selected)]
        for index in indices:
            selected.add(index)
            yield index


def _checked(index: int, media: int, selected: set[int]) -> int:
    if not 0 <= index < media:
        raise InvalidRequest(f"select.media_index must be below the plan's {media} media, got {index}")
    if index in selected:
        raise InvalidRequest(f"select.media_index {index} was selected before, each is sent once")
    return index
