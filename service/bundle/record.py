"""The base of all records of a manifest."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of all manifest records: frozen, and an unknown or mistyped field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
