"""Traces of requests. `tracer` needs OpenTelemetry, an extra, so it is imported only if tracing is enabled."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bertserve.service.errors import SettingsError, install_command

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
            f"--otlp-endpoint needs OpenTelemetry, which is not installed: `{install_command('otel')}`, or leave the setting out."
        ) from error
    return Tracer


def create_tracer(endpoint: str | None) -> Tracer | None:
    """Returns a tracer that sends to a collector; None without an endpoint, or if OTEL_SDK_DISABLED is set.

    A process that forks must call this after the fork.

    Raises:
        SettingsError: OpenTelemetry is not installed.
    """
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    return tracer_class()(endpoint)
