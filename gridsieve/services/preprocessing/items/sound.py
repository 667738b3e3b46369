"""The item of a sound: of a file by itself, or of a video that is heard."""

from __future__ import annotations

import math
from fractions import Fraction

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import FrameShape, Grid, Modality
from gridsieve.common.contract.tensors import DType
from gridsieve.services.preprocessing.items.item import Item
from gridsieve.services.preprocessing.items.readers import Readers
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.sound.planned import PlannedSound
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.sampling import FrameSampling


def sound_item(
    family: Family,
    source: Source,
    sampling: FrameSampling,
    readers: Readers,
    field: str | None = None,
    begin_s: Fraction | None = None,
) -> Item:
    """field: of a video, which asks for its sound. begin_s: where the part begins that is heard; None: where `sampling`
    says, or with the track.

    Raises InvalidRequest for a file without sound and for a part that is too long or too short for the model, and what
    the readers raise.
    """
    log_mel = family.log_mel
    assert log_mel is not None
    index = readers.sound(source)
    if index is None:
        raise InvalidRequest("is not possible: the file has no sound track", field=field)
    if begin_s is None:
        begin_s = index.start_s if sampling.start_s is None else Fraction(str(sampling.start_s))
    end_s = index.start_s + index.duration_s
    if sampling.end_s is not None:
        end_s = min(end_s, Fraction(str(sampling.end_s)))
    samples = max(0, math.floor((end_s - begin_s) * log_mel.rate))
    if log_mel.max_samples is not None and samples > log_mel.max_samples:
        most_s = f"{log_mel.max_samples / log_mel.rate:g}"
        raise InvalidRequest(
            f"lasts {samples / log_mel.rate:.3f} s, this model hears at most {most_s} s",
            field=field,
            value=samples / log_mel.rate,
            limit=most_s,
            remedy="set `frame_sampling.start_s` and `frame_sampling.end_s`",
        )
    planned = PlannedSound(source, index, begin_s, samples, log_mel)
    tokens = family.sound_tokens(log_mel.frames_of(samples))
    if not tokens:
        text = f"has {samples / log_mel.rate:.3f} s of sound from {float(begin_s):g} s on, too little for a token"
        raise InvalidRequest(text, field=field, value=samples / log_mel.rate)
    return Item(
        modality=Modality.AUDIO,
        planned=planned,
        frames=FrameShape(1, planned.shape[1:3], dtype=DType.FLOAT32),
        grid=Grid(1, 1, tokens),
        expansion=family.sound(tokens),
        content=(b"sound", source.digest, f"{begin_s} {samples}".encode()),
        heard_s=float(planned.length_s),
    )
