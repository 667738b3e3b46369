"""Videos whose rate varies: slide shows, screen recordings, phone clips that pause, pictures with their times.

So many frames as transformers takes at the average rate, none twice, at even times in which a frame that is shown for
longer than a step counts one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.preprocessing.planner import PlannedPrompt, Planner
from tests import media
from tests.families import minicpm
from tests.preprocessing.planning import pictures, planned, video
from tests.preprocessing.preprocessing_media import clip, transformers_indices

TAIL_MS = 33  # of the last frame of an encoded clip, 1/30 s in ticks of a millisecond
_RANDOM = np.random.default_rng(7)


def times_of(steps: Any) -> tuple[int, ...]:
    return (0, *np.cumsum(steps).astype(int).tolist())


ACTION_MS = (0, *range(57_000, 60_000, 100))
SLIDES_MS = (0, 400, 9_000, 9_100, 31_000, 31_050, 31_400, 60_000, 61_000, 140_000)
JITTER_MS = times_of(33 + _RANDOM.integers(-12, 13, 89))
PAUSE_MS = (*range(0, 1_000, 40), *range(9_000, 10_000, 40))
SCREEN_MS = times_of(_RANDOM.choice([10, 33, 150, 900, 4_000], 199))
CLIPS = {"action": ACTION_MS, "slides": SLIDES_MS, "jitter": JITTER_MS, "pause": PAUSE_MS, "screen": SCREEN_MS}
every_clip = pytest.mark.parametrize("name", CLIPS)


@cache
def planner_of(checkpoint: Path) -> Planner:
    return Planner(Checkpoint(checkpoint), None)


@cache
def encoded(times_ms: tuple[int, ...]) -> bytes:
    return clip(len(times_ms), container="matroska", pts=times_ms, time_base=Fraction(1, 1000))


@cache
def picture(number: int) -> bytes:
    return media.picture(56, 56, number)


def plan(checkpoint: Path, times_ms: tuple[int, ...], as_pictures: bool = False, **wish: Any) -> PlannedPrompt:
    """The plan of an encoded clip, or of pictures, with these times."""
    if as_pictures:
        files = [picture(number) for number in range(len(times_ms))]
        shown = pictures(files, [each / 1000 for each in times_ms], **wish)
    else:
        shown = video(encoded(times_ms), **wish)
    made = planned(planner_of(checkpoint), shown)
    made.files.close()
    return made


def sent(made: PlannedPrompt) -> list[int]:
    """The frames before padding."""
    (item,) = made.media
    places: list[int] = list(item.places)  # type: ignore[union-attr]
    return places[:-1] if places[-2:-1] == places[-1:] else places


def shown_of(times_ms: Sequence[int], as_pictures: bool = False) -> NDArray[np.float64]:
    """How long each frame is shown, in milliseconds; the last picture as long as the others on average."""
    shown = np.diff(np.array(times_ms, float))
    return np.array([*shown, shown.mean() if as_pictures else TAIL_MS])


def spread(shown: NDArray[np.float64], count: int, where: str) -> list[int]:
    """The frames at even times, each of which counts at most a step; where: in its step a time is."""
    step = shown.sum() / count
    for _ in range(5_000):  # approaches the step whose `count` is all that is counted
        before, step = step, np.minimum(shown, step).sum() / count
        if step == before:
            break
    begins = np.cumsum([0, *np.minimum(shown, step)[:-1]])
    times = {
        "start": np.arange(count) * step,
        "middle": (np.arange(count) + 0.5) * step,
        "ends": np.linspace(0, count * step, count),
    }[where]
    found: list[int] = (np.searchsorted(begins, times + 1e-6, side="right") - 1).tolist()
    return found


@pytest.mark.parametrize(("fps", "as_pictures"), [(2.0, False), (10.0, False), (0.2, True)])
@every_clip
def test_frames_are_at_even_times_and_as_many_as_of_transformers(
    family: str, family_checkpoint: Path, name: str, fps: float, as_pictures: bool
) -> None:
    times_ms = CLIPS[name]
    shown, total = shown_of(times_ms, as_pictures), len(times_ms)
    count = len(transformers_indices(total, 1000 * total / shown.sum(), fps, 4, 768, family))
    made = plan(family_checkpoint, times_ms, as_pictures, fps=fps)
    assert sent(made) == spread(shown, count, "ends" if family.startswith("qwen3") else "start")
    assert len(set(sent(made))) == count
    (item,) = made.plan.media
    times_s = [times_ms[place] / 1000 for place in made.media[0].places]  # type: ignore[union-attr]
    assert item.timestamps_s == tuple(times_s)
    assert float(item.seconds_per_grid or 0) == pytest.approx(2 * (times_s[-1] - times_s[0]) / (count - 1))


@pytest.mark.parametrize(
    ("kind", "where", "most"),
    [("llava_onevision", "start", 32), ("internvl", "middle", 32), ("2.6", "middle", 64), ("4.5", "middle", 540)],
)
def test_families_without_a_sampling_of_transformers_follow_the_same_rule(
    checkpoints: Callable[[str], Path], tmp_path: Path, kind: str, where: str, most: int
) -> None:
    """MiniCPM-V counts as its published code does: a frame of each so many, or (4.5) so many of a rounded rate."""
    if kind in minicpm.QUERIES:
        minicpm.write(tmp_path, 1, kind)
    folder = tmp_path if kind in minicpm.QUERIES else checkpoints(kind)
    for times_ms in CLIPS.values():
        shown, total = shown_of(times_ms), len(times_ms)
        rate = 1000 * total / shown.sum()
        wished = {"2.6": -(-total // max(1, round(rate))), "4.5": round(min(3, round(rate) or rate) * total / rate)}
        count = min(wished.get(kind, int(total / rate)), most, total)
        assert sent(plan(folder, times_ms)) == spread(shown, count, where)


@pytest.mark.parametrize("as_pictures", [False, True], ids=["file", "pictures"])
@every_clip
def test_num_frames_of_all_frames_or_more_sends_each_once(tiny_checkpoint: Path, name: str, as_pictures: bool) -> None:
    """Also where their number is no multiple of a temporal patch."""
    for total in (len(CLIPS[name]), 7):
        times_ms = CLIPS[name][:total]
        for asked in (total, total + 1, 768):
            assert sent(plan(tiny_checkpoint, times_ms, as_pictures, num_frames=asked)) == list(range(total))


def test_num_frames_of_a_constant_rate_sends_all_where_there_are_no_more(tiny_checkpoint: Path) -> None:
    for total in (5, 7, 8):
        times_ms = tuple(range(0, 100 * total, 100))
        assert sent(plan(tiny_checkpoint, times_ms, as_pictures=True, num_frames=768)) == list(range(total))


@pytest.mark.parametrize("as_pictures", [False, True], ids=["file", "pictures"])
@every_clip
def test_num_frames_of_fewer_sends_so_many_at_even_times(
    checkpoints: Callable[[str], Path], name: str, as_pictures: bool
) -> None:
    for count in (2, 5, len(CLIPS[name]) - 1):
        made = plan(checkpoints("qwen3_vl"), CLIPS[name], as_pictures, num_frames=count)
        assert sent(made) == spread(shown_of(CLIPS[name], as_pictures), count, "ends")


@pytest.mark.parametrize(
    ("start_s", "end_s", "places", "times_s"),
    [
        (30.0, 57.35, [0, 1, 2, 3, 4], [30.0, 57.0, 57.1, 57.2, 57.3]),
        (10.0, 20.0, [0], [10.0]),
        (57.0, 57.2, [1, 2], [57.0, 57.1]),
        (59.91, None, [30], [59.91]),
    ],
)
def test_a_part_begins_with_the_frame_on_screen_and_ends_with_its_end(
    checkpoints: Callable[[str], Path], start_s: float, end_s: float | None, places: list[int], times_s: list[float]
) -> None:
    made = plan(checkpoints("qwen3_vl"), ACTION_MS, start_s=start_s, end_s=end_s, fps=10.0)
    assert sent(made) == places
    assert list(made.plan.media[0].timestamps_s[: len(places)]) == times_s


def test_a_still_end_behind_the_part_counts_no_frames(tiny_checkpoint: Path) -> None:
    """Of PAUSE_MS the first 2 s: 25 frames in the first, then a still one; at 4 a second they are 8, not 36."""
    assert len(sent(plan(tiny_checkpoint, PAUSE_MS, end_s=2.0, fps=4.0))) == 8
    slides_ms = (0, 10_000, 20_000, 30_000)  # at a constant rate: the one on screen, where none appears
    made = plan(tiny_checkpoint, slides_ms, as_pictures=True, start_s=12.0, end_s=18.0)
    assert (sent(made), made.plan.media[0].timestamps_s) == ([1], (12.0, 12.0))
