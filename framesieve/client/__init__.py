"""The Python client: import these names from `framesieve`."""

from framesieve.client.answer import (
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
from framesieve.client.client import FramesieveClient
from framesieve.client.encoding import Encoded, encode
from framesieve.client.prompt import Embeds, Frames, Image, Message, Text, Video
from framesieve.client.tools import Tool, ToolCall, ToolCallDelta
from framesieve.common.contract.errors import FramesieveError
from framesieve.common.contract.plan import Grid
from framesieve.common.contract.retention import Pruning

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
    "Frames",
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
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "Video",
    "encode",
]
