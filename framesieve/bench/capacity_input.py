"""What `framesieve bench --json` printed, read back: the part of it that a request's cost is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BaseModel, Field, ValidationError

from common.contract.errors import InvalidRequest
from framesieve.bench.capacity_plan import HOPS, Cost, Request

_WORKERS_STAGES = ("decode", "resize")

_Amount: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Run(BaseModel):
    command: str
    began: str


class _All(BaseModel):
    answered: int = Field(ge=1)
    held_s: _Amount
    kv_token_s: _Amount


class _Service(BaseModel):
    service: str
    busy_s: dict[str, _Amount]
    processor_s: _Amount
    received_bytes: _Amount
    sent_bytes: _Amount
    workers: int = Field(ge=0)


class Measured(BaseModel):
    """A bench's result. What else it holds is left alone."""

    run: _Run
    all: _All
    services: list[_Service]

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Raises InvalidRequest naming the field that is missing or wrong, OSError where there is no such file."""
        try:
            measured = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            raise InvalidRequest(f"{path}: {at + ': ' if at else ''}{first['msg']}") from error
        missing = HOPS.keys() - {each.service for each in measured.services}
        if missing:
            names = ", ".join(sorted(missing))
            raise InvalidRequest(f"{path}: services: {names} missing; bench needs --start, or --metrics of all three")
        return measured

    @property
    def request(self) -> Request:
        """What one answered request cost; those that failed cost it too."""
        by_name = {each.service: each for each in self.services}
        return Request(
            {service: self._cost(by_name[service]) for service in HOPS},
            kv_token_s=self.all.kv_token_s,
            embeds_byte_s=by_name["encoder"].sent_bytes / self.all.answered * self.all.held_s,
        )

    def _cost(self, service: _Service) -> Cost:
        answered = self.all.answered
        busy_s = {stage: seconds / answered for stage, seconds in service.busy_s.items()}
        # Worker processes count no processor time; what they are busy with is nothing else.
        workers_s = sum(busy_s.get(stage, 0.0) for stage in _WORKERS_STAGES)
        return Cost(
            busy_s,
            at_once=service.workers or 1,
            processor_s=service.processor_s / answered + workers_s,
            hop_bytes=(service.received_bytes + service.sent_bytes) / answered,
        )
