"""What all live sessions of a generation service share."""

from __future__ import annotations

from dataclasses import dataclass

from gridsieve.services.generation.answers.events import Inbox
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.live.sessions import LiveSessions
from gridsieve.services.generation.live.source_metrics import Sources
from gridsieve.services.generation.served_model import ServedModel
from gridsieve.services.generation.upstream.media import MediaClient


@dataclass(frozen=True, slots=True, eq=False)
class LiveService:
    """What all live sessions of a service share.

    inbox: receives the events of the engine, of all requests. sources: the streams that sessions watch, for metrics.
    sessions: the open ones, and the bytes that their pictures hold.
    """

    engine: Engine
    media: MediaClient
    model: ServedModel
    inbox: Inbox
    sources: Sources
    sessions: LiveSessions
