"""The present turn of a live session: what its slices have shown, and what the next one builds on.

    begin    [slice, whole][what changed][what changed][text][text]( still )   question, answer │ begin
             last_whole                                 wait to be computed; shown, cut: of the last one

It knows neither how slices are encoded nor the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gridsieve.common.contract.plan import PromptPlan
from gridsieve.services.generation.live.frames import FramePair
from gridsieve.services.generation.request import live_cuts
from gridsieve.services.generation.request.live_cuts import SliceSegment
from gridsieve.services.generation.request.session import Segment, Session

# Slices of text alone that wait to be computed with what comes next: a forward reads all weights, however few its rows.
MAX_TEXTS = 3


@dataclass(frozen=True, slots=True)
class Base:
    """What a slice builds on.

    shown: the slice before this one in the turn; None: this slice begins the turn. cut: the segment of `shown`.
    reference: what was last shown of each place; empty: the slice is compared with `shown`.
    is_gone: what the slice would build on is not held any more, so the whole slice is encoded.
    """

    shown: FramePair | None
    cut: SliceSegment | None
    reference: bytes
    is_gone: bool

    def keeps_nothing_of(self, pair: FramePair) -> bool:
        """Whether a slice shows the same files as `shown`, after which these files keep nothing."""
        return bool(self.shown and self.cut and self.cut.settled and not self.is_gone and pair.repeats(self.shown))


class Turn:
    """texts: segments of slices of text alone that are not computed yet, MAX_TEXTS at most."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.texts: list[Segment] = []
        self._shown: FramePair | None = None  # the last slice of the turn; None before its first one
        self._cut: SliceSegment | None = None  # of that slice, without its embeddings
        self._still: FramePair | None = None  # the last slice after it that shows the same files and added no rows
        self._last_whole = 0  # the last segment of the session whose slice was taken whole

    @property
    def seen(self) -> Sequence[FramePair]:
        """The last slice of the turn, and one that repeats it and added no rows."""
        return [each for each in (self._shown, self._still) if each]

    @property
    def text_rows(self) -> int:
        return sum(each.ids.size for each in self.texts)

    def begin(self) -> None:
        """The next slice begins another turn: a question has its answer, and no text waits."""
        self._shown = self._cut = self._still = None
        self.texts.clear()

    def begin_again(self) -> None:
        """The session has no rows any more."""
        self.begin()
        self._last_whole = 0

    def base_of(self, pair: FramePair) -> Base:
        """What the next slice builds on."""
        shown, cut = self._shown, self._cut
        # Slices build on the last whole one of their stream. It is evicted; segment 0 is not before segment 1 is.
        is_gone = self._session.first > max(self._last_whole, 1) or bool(shown and shown.stream != pair.stream)
        reference = cut.reference if cut and not is_gone else b""
        if shown and not shown.size_bytes and not reference:  # they were given up, and a whole slice needs their times
            is_gone, shown = True, shown.showing(pair.first.picture, pair.last.picture)
        return Base(shown, cut, reference, is_gone)

    def append(self, pair: FramePair, cut: SliceSegment, number: int, whole: bool) -> None:
        """The turn has another slice. number: of its segment."""
        if whole and cut.segment.ids.size:
            self._last_whole = number
        self._shown, self._still = pair, None
        self._cut = replace(cut, segment=replace(cut.segment, embeds=None))
        self._session.next_position = cut.segment.next_position

    def stand_still(self, pair: FramePair) -> None:
        """Another slice repeats the last one, and adds no rows."""
        self._still = pair

    def settle(self, plan: PromptPlan) -> None:
        """Makes the slice that added no rows the last one of the turn, if there is one: what follows has positions
        after it. plan: has the slices of `seen`."""
        if self._still and self._cut:
            # The slices of the plan are stand-ins of another size.
            passed = live_cuts.next_slice(plan, None, self._session, self._cut)
            self._cut = replace(passed, grid=self._cut.grid)
            self._session.next_position = passed.segment.next_position
            self._shown, self._still = self._still, None

    def give_up_pictures(self) -> None:
        """Forgets all pictures. Without a reference the next slice is taken whole."""
        self._shown, self._still = (each and each.showing(b"", b"") for each in (self._shown, self._still))
