"""Whether traces can be made: OpenTelemetry is an extra. Imports it only where it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.service.errors import SettingsError

if TYPE_CHECKING:
    from bertserve.service.tracing.tracer import Tracer


def tracer_class() -> type[Tracer]:
    """Returns the class of tracers.

    Raises:
        SettingsError: OpenTelemetry is not installed.
    """
    try:
        from bertserve.service.tracing.tracer import Tracer  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise SettingsError(
            "--otlp-endpoint needs OpenTelemetry, which is not installed; pip install 'bertserve[otel]', or leave the setting out."
        ) from error
    return Tracer


def tracer_to(endpoint: str | None) -> Tracer | None:
    """Returns a tracer that sends to a collector, if there is one; a process that forks calls this afterwards.

    Raises:
        SettingsError: OpenTelemetry is not installed.
    """
    return None if endpoint is None else tracer_class().to(endpoint)
