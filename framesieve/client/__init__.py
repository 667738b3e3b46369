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
from framesieve.client.prompt import Embeds, Frames, Image, Message, Pruning, Text, Video
from framesieve.client.tools import Tool, ToolCall, ToolCallDelta
from framesieve.common.contract.errors import (
    DeadlinePassed,
    FramesieveError,
    InvalidRequest,
    MediaDamaged,
    MediaForbidden,
    MediaRejected,
    Overloaded,
    PeerContract,
    PromptTooLong,
    StartupError,
    Unauthenticated,
    Unavailable,
)
from framesieve.common.contract.plan import Grid

__all__ = [
    "Accepted",
    "Answer",
    "Choice",
    "DeadlinePassed",
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
    "InvalidRequest",
    "MediaDamaged",
    "MediaForbidden",
    "MediaRejected",
    "MediaUsage",
    "Message",
    "Overloaded",
    "PeerContract",
    "Progress",
    "PromptTooLong",
    "Pruning",
    "StartupError",
    "Text",
    "Timings",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "Video",
    "encode",
]
