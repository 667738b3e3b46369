"""The body of POST /v1/batches, and the query of GET /v1/batches.

Source: OpenAI's API reference, "batches".
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gridsieve.jobs.lines import Url
from gridsieve.services.gateway.http.fields import Strict

_METADATA = 16


class BatchRequest(Strict):
    """endpoint: the url of every line. completion_window: the only one that OpenAI's client sends."""

    input_file_id: str
    endpoint: Url
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=_METADATA)] | None = None


class BatchListing(BaseModel):
    """after: the id of the last batch of the page before."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
