"""The names that requests may give as `model`: the served checkpoint and its adapters, as generation tells them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gridsieve.client.answer import Model
from gridsieve.client.client import GridsieveClient, Metadata
from gridsieve.services.gateway.http.body import unless_left
from gridsieve.services.gateway.http.errors import NotFound
from gridsieve.services.gateway.http.request_guard import Call

_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Named:
    """The model of a request.

    name: the id that its answer carries; of a checkpoint with several names, the first. adapter: the name for
    generation; None: the checkpoint's own weights.
    """

    name: str
    adapter: str | None


class Models:
    """Asks generation at the first request, and again for a name that it did not know."""

    def __init__(self, client: GridsieveClient) -> None:
        self._client = client
        self._known: tuple[Model, ...] = ()
        self._since = int(time.time())

    async def find(self, name: str | None, metadata: Metadata) -> Named:
        """The model of this name; the checkpoint for None. Raises NotFound."""
        if not self._known or (name is not None and self._named(name) is None):
            self._known = await self._client.models(metadata=metadata)
        found = self._known[0] if name is None else self._named(name)
        if found is None:
            served = ", ".join(each.name for each in self._known)
            raise NotFound(field="model", limit=f"one of {served}", value=name or "")
        return Named(found.name, found.name) if found.is_adapter else Named(self._known[0].name, None)

    def _named(self, name: str) -> Model | None:
        return next((each for each in self._known if each.name == name), None)

    async def endpoint(self, request: Request) -> Response:
        """GET /v1/models and /v1/models/{model}."""
        self._known = await unless_left(request, self._client.models(metadata=Call.of(request).metadata))
        if (name := request.path_params.get("model")) is None:
            return JSONResponse({"object": "list", "data": [self._object(each) for each in self._known]})
        found = self._named(name)
        if found is None:
            raise NotFound(f"{name[:_NAME_CHARACTERS]!r} is not served", field="model", value=name)
        return JSONResponse(self._object(found))

    def _object(self, model: Model) -> dict[str, object]:
        """OpenAI's fields, vLLM's, the task, the instruction of prompts that have none, whether they may have sounds,
        the pruning of videos for which a request names none, and the methods."""
        return {
            "id": model.name,
            "object": "model",
            "created": self._since,
            "owned_by": "gridsieve",
            "root": model.name,
            "parent": self._known[0].name if model.is_adapter else None,
            "max_model_len": model.max_model_len,
            "task": model.task,
            "instruction": model.instruction or None,
            "sounds": model.sounds,
            "pruning": {
                "rate": model.pruning_rate,
                "method": model.pruning_method,
                "threshold": model.pruning_threshold,
            },
            "pruning_methods": [asdict(each) for each in model.pruning_methods],
        }
