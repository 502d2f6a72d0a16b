"""ForeignBody: what the bodies of other services' formats share."""

from __future__ import annotations

from typing import Any, ClassVar

from bertserve.service.tasks.body import TaskBody


class ForeignBody(TaskBody):
    """Base of these bodies, which have no `parameters`. Some clients send null for what was not set, known here or not."""

    null_is_nothing: ClassVar[bool] = True

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps the names."""
        cls.names = frozenset(cls.model_fields) - {"parameters"}
