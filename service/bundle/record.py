"""The base of all manifest records. docs/reference/manifest.md specifies each field of each record, and a test keeps it complete."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen part of a manifest, in which an unknown field or a wrong type is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
