"""The Python client. `from client import FramesieveClient` is all that most callers need."""

from client.answer import (
    Accepted,
    Answer,
    Choice,
    Delta,
    Event,
    Finished,
    FinishReason,
    MediaUsage,
    Progress,
    Timings,
    Usage,
)
from client.client import FramesieveClient
from client.encoding import Encoded, encode
from client.prompt import Embeds, Image, Message, Text, Video
from common.errors import FramesieveError
from common.plan import Grid
from common.retention import Pruning

__all__ = [
    "Accepted",
    "Answer",
    "Choice",
    "Delta",
    "Embeds",
    "Encoded",
    "Event",
    "FinishReason",
    "Finished",
    "FramesieveClient",
    "FramesieveError",
    "Grid",
    "Image",
    "MediaUsage",
    "Message",
    "Progress",
    "Pruning",
    "Text",
    "Timings",
    "Usage",
    "Video",
    "encode",
]
