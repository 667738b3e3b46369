"""Prints a vector for each moment of a video, as lines of JSON that a vector store loads.

    gridsieve serve &
    python examples/vectors.py demo/clip.mp4 > vectors.jsonl

A vector is the mean of a temporal slice's embeddings, of length 1. Similar pictures have near vectors. Only the encoder
is called (GRIDSIEVE_ENCODER, 127.0.0.1:50052 by default); no text is generated. Vectors of different checkpoints cannot
be compared.
"""

import asyncio
import json
import os
import sys

import numpy as np

from gridsieve import GridsieveError, encode


async def main(*clips: str) -> None:
    encoder = os.environ.get("GRIDSIEVE_ENCODER", "127.0.0.1:50052")
    for clip in clips or ("demo/clip.mp4",):
        (item,) = await encode(encoder, clip)
        embeds = item.as_embeds()
        slices = item.values[0].astype(np.float32).reshape(embeds.grid.t, -1, item.values.shape[-1])  # [t, h·w, D]
        vectors = slices.mean(axis=1)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        step_s = float(embeds.seconds_per_slice or 0)
        times_s = embeds.timestamps_s or [index * step_s for index in range(len(vectors))]
        for time_s, vector in zip(times_s, vectors, strict=True):
            print(json.dumps({"id": f"{clip}#{time_s:.3f}", "clip": clip, "time_s": time_s, "vector": vector.tolist()}))


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except (GridsieveError, OSError) as error:
        sys.exit(f"{error}")
