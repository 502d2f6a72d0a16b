"""The base of all manifest records."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of all manifest records: they are frozen, and an unknown field or a wrong type is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
