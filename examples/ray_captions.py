"""Asks the same question about every mp4 file of a bucket or a folder, with the machines of a Ray cluster.

    gridsieve serve &
    python examples/ray_captions.py s3://bucket/clips s3://bucket/captions "What happens?"

Both are folders that all machines share, or URIs of fsspec, whose package for S3 is s3fs. Answers are Parquet files.
If the job is begun again, clips that have an answer there are not asked about again.
"""

import os
import sys

import fsspec
import pyarrow.dataset

import gridsieve.ray
from gridsieve import GridsieveError


def main(clips: str = "demo", captions: str = "captions", question: str = "What happens?") -> None:
    files, folder = fsspec.url_to_fs(clips)
    uris = [files.unstrip_protocol(name) for name in sorted(files.glob(f"{folder}/**/*.mp4"))]
    services = os.environ.get("GRIDSIEVE_SERVER", "127.0.0.1:50053")
    gridsieve.ray.run(uris, captions, question, services=services, pruning_rate=0.75, max_new_tokens=64)

    files, folder = fsspec.url_to_fs(captions)
    rows = pyarrow.dataset.dataset(folder, filesystem=files)
    failed = rows.count_rows(filter=pyarrow.dataset.field("error").is_valid())
    print(f"{rows.count_rows()} clips, {failed} of them without an answer")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (GridsieveError, OSError) as error:
        sys.exit(f"{error}")
