"""The worker process of `--decoder nvdec`: its card decodes videos, and it is confined less than others.

Pictures, and videos that the card does not decode, are decoded as in other workers.
"""

from __future__ import annotations

from gridsieve.services.preprocessing.workers import worker


def main() -> None:
    """Serves a connection, as `worker.main` does."""
    worker.main(on_card=True)
