"""A request that follows an answer and computes its rows once more, to see what they attend to.

    tokens   [ prompt ............. N − 1 ][ answer: 0 … n − 2 ][ n − 1 ]
    rows                            └── the n rows that tokens were drawn from ──┘ never computed

It begins with what the prefix cache has before row N − 1, as a preempted request does. With recurrent states this is
the last snapshot before that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.compute.transfers import ToHost
from gridsieve.services.generation.request.batch import Chunk, Int64Array
from gridsieve.services.generation.request.request import Attended, FinishReason, Request
from gridsieve.services.generation.sampling.rows import Float32Array
from gridsieve.services.generation.sampling.sampler import SampledToken, SamplingParams

# Weights of each token of an answer on each media token that are told; of more, their sums.
MAX_TOKEN_WEIGHTS = 2**18
# All other values of an answer: a client takes 8 MiB in one response.
MAX_VALUES = 2**19


@dataclass(frozen=True, slots=True)
class _Part:
    """What rows of the sequence up to `end` attend to: see `Attending.add`."""

    end: int
    means: ToHost


class Attending(Request):
    """Its events are `Attended`, with the sums of its rows, and `Finished`, with the reason why the answer ended."""

    def __init__(self, answered: Request, reason: FinishReason) -> None:
        """answered: a request that has its whole answer, and still its blocks."""
        answer = answered.output_ids
        super().__init__(
            f"{answered.id}#attention",
            answered.prompt,
            answered.media_keys,
            SamplingParams(max_new_tokens=len(answer)),
            None,
            answered.on_event,
            answered.adapter,
            answered.cache_salt,
            yields=answered.yields,
        )
        self.arrival = answered.arrival
        self.embeds, self.encoded_media = answered.embeds, answered.encoded_media
        self.draft_tokens, self.accepted_draft_tokens = answered.draft_tokens, answered.accepted_draft_tokens
        self.prefill_announced = True
        *self.output_ids, self._last_id = answer
        self._reason = reason
        self._parts: list[_Part] = []

    @property
    def reusable_tokens(self) -> int:
        return self.prompt.tokens - 1

    @property
    def keeps(self) -> bool:
        """Whether the weights of each token of the answer are kept, and not their sums alone."""
        return self.sampling.max_new_tokens * sum(self.prompt.num_kept) <= MAX_TOKEN_WEIGHTS

    def media(self) -> Int64Array:
        """int64 [M]: the tokens of the prompt that are media, item by item, also where runs of two items take turns."""
        spans = sorted(self.prompt.spans, key=attrgetter("media_index"))
        places = [np.arange(span.offset, span.end) for span in spans]
        return np.concatenate([np.empty(0, np.int64), *places])

    def rows_of(self, chunk: Chunk) -> int:
        """How many of the last rows of a chunk are rows of the answer."""
        return max(0, chunk.end - max(chunk.start, self.prompt.tokens - 1))

    def add(self, chunk: Chunk, means: Sequence[Tensor]) -> None:
        """Adds the rows of a chunk. What was added of them before is dropped: it is computed again after preemption,
        and if a step failed.

        means: over heads and layers, float32: [R, items], of each item; [M], the sum over the rows; if `keeps`, [R, M].
        """
        first = chunk.end - self.rows_of(chunk)
        self._parts = [*(each for each in self._parts if each.end <= first), _Part(chunk.end, ToHost(means))]

    def append(self, sampled: SampledToken) -> tuple[Attended, FinishReason]:
        self.output_ids.append(self._last_id)
        by_item, totals, *by_token = zip(*(each.means.wait() for each in self._parts), strict=True)
        kept = self.prompt.kept_tokens()
        return Attended(
            token_ids=tuple(self.output_ids),
            kept=tuple(kept[index] for index in range(len(kept))),
            weights=_array(torch.stack(totals).sum(dim=0) / len(self.output_ids)),
            token_shares=_array(torch.cat(by_item)),
            token_weights=_array(torch.cat(by_token[0])) if by_token else None,
        ), self._reason


def check_size(request: Request) -> None:
    """Raises InvalidRequest if there may be too much to tell: a weight of each media token, and for each token of the
    answer its text and its share of each item."""
    tokens, items = request.sampling.max_new_tokens, len(request.prompt.num_kept)
    values = sum(request.prompt.num_kept) + tokens * (1 + items)
    if values > MAX_VALUES:
        raise InvalidRequest(
            f"may have {values} values, of an answer of {tokens} tokens about {items} media items; at most "
            f"{MAX_VALUES} are sent",
            field="sampling.attention",
            value=values,
            limit=MAX_VALUES,
            remedy="lower `sampling.max_new_tokens`, or send fewer media",
        )


def _array(values: Tensor) -> Float32Array:
    found: Float32Array = values.numpy()
    return found
