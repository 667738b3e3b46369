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
    """inbox: takes the engine's events of all requests. sources: what is told of watched streams. sessions: those that
    are open, and the bytes of their pictures."""

    engine: Engine
    media: MediaClient
    model: ServedModel
    inbox: Inbox
    sources: Sources
    sessions: LiveSessions
