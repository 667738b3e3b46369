"""How the planner reads media: functions that run in this process, or in workers for untrusted files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gridsieve.services.preprocessing.sound.track import SoundIndex, read_sound
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.packets import PacketIndex, read_packets
from gridsieve.services.preprocessing.video.pictures import PictureIndex, read_pictures
from gridsieve.services.preprocessing.video.shots import find_shots


@dataclass(frozen=True, slots=True)
class Readers:
    """Functions that read a video's packets and pictures' headers, find the shots of a part of a video, and read a
    sound track.

    check_cancelled: called between steps of the plan; an exception from it ends the plan.
    """

    packets: Callable[[Source], PacketIndex] = read_packets
    pictures: Callable[[Source, tuple[int, ...]], PictureIndex] = read_pictures
    check_cancelled: Callable[[], None] = lambda: None
    shots: Callable[[Source, PacketIndex, int, int], Sequence[int]] = find_shots
    sound: Callable[[Source], SoundIndex | None] = read_sound


IN_PROCESS = Readers()
