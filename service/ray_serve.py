"""Replicas under Ray Serve, each a complete bertserve: `serve run bertserve.service.ray_serve:app models=/models`. See docs/how-to/ray.md.

Ray starts and replaces replicas, and its HAProxy distributes requests. Everything else is the same as in a single process.
"""

import logging
import math
import os
import time
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingContext
from starlette.types import ASGIApp

from bertserve.service.api.application import Application
from bertserve.service.build import build
from bertserve.service.command_line import clean_environment
from bertserve.service.errors import SettingsError
from bertserve.service.logs import configure_logging
from bertserve.service.process import check_requirements, raise_file_limit, read_keys
from bertserve.service.settings import ENV_PREFIX, Settings
from bertserve.service.sources import with_sources

logger = logging.getLogger("bertserve.ray")

# Settings without effect in a replica -> their replacement. Such a setting is an error, because the operator would not notice.
RAY_REPLACEMENTS = {
    **dict.fromkeys(("host", "port", "keep_alive_s"), "http_options of the Serve configuration"),
    **dict.fromkeys(("tls_cert", "tls_key", "header_timeout_s", "body_timeout_s"), "the proxy in front of Ray"),
    **dict.fromkeys(("max_header_bytes", "forwarded_allow_ips"), "the proxy in front of Ray"),
    **dict.fromkeys(("shutdown_timeout_s", "pre_stop_delay_s"), "graceful_shutdown_timeout_s of the deployment"),
    "workers": "num_replicas of the deployment",
    "admin_key_file": "a new configuration, because a change by request would reach only one replica",
}
# The Dockerfile sets these variables for its own command. In an image that is based on it, they are not the operator's settings.
SET_BY_IMAGE = ("HOST", "PORT")
MAX_QUEUE_S = 1.0  # predicted work per replica above which more replicas are needed
MAX_BUSY = 0.8  # maximum share of their time that threads should run


def read_settings(args: dict[str, Any]) -> Settings:
    """Reads settings from arguments by name, and variables like the command.

    Raises:
        SettingsError: A variable is unknown, or Ray replaces a setting.
        ValidationError: A value is wrong.
    """
    for name in SET_BY_IMAGE:
        os.environ.pop(ENV_PREFIX + name, None)
    clean_environment()
    settings = Settings(**args)
    for name, replacement in RAY_REPLACEMENTS.items():
        if name in settings.model_fields_set:
            raise SettingsError(f"`{name}` has no effect under Ray Serve; remove it, and use {replacement}.")
    return settings


# its own admission limits the requests at a replica; Ray's default of 5 would leave batches almost empty
@serve.deployment(name="bertserve", max_ongoing_requests=10_000, health_check_period_s=2)
@serve.ingress()
class Replica:
    """A replica of bertserve."""

    def __init__(self, settings: Settings) -> None:
        """Loads the models; an inference thread runs on each CPU that Ray assigned."""
        configure_logging(settings.log_format)
        resources = ray.get_runtime_context().get_assigned_resources()
        if settings.threads is None and "GPU" not in resources:
            settings = settings.model_copy(update={"threads": max(1, int(resources.get("CPU", 1)))})
        raise_file_limit()
        check_requirements(settings)
        auth = read_keys(settings)  # before an export, which takes minutes
        self._state = build(with_sources(settings), auth)
        self._seen = (time.monotonic(), 0.0)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application. Ray adds the request id to answers, because it sets the id first."""
        return Application(self._state, sends_request_id=False)

    def __del__(self) -> None:
        """Exports the last traces. Ray calls this once, when it stops a drained replica."""
        if (state := getattr(self, "_state", None)) is not None and state.tracer is not None:
            state.tracer.close()

    def check_health(self) -> None:
        """Ends the process if the GPU failed, an inference thread is dead or all hang, because Ray then replaces it soonest."""
        if self._state.scheduler.failure is not None:
            logger.critical("%s; this replica ends, and Ray starts another", self._state.scheduler.failure)
            os._exit(1)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the predicted seconds of the queue, and the share of time since the last call in which threads ran."""
        (then, run_s_then), now, run_s = self._seen, time.monotonic(), self._state.scheduler.total_run_s
        self._seen = (now, run_s)
        busy = (run_s - run_s_then) / max(now - then, 1e-3) / self._state.scheduler.queue.threads
        return {"queue_s": self._state.scheduler.wait_s, "busy": busy}


def autoscaling_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Returns the number of replicas for at most MAX_QUEUE_S of queue and MAX_BUSY of busy time each, as Ray's autoscaling policy.

    With too few replicas, the queue shows how many are missing; without a queue, the busy time shows how many are needed.
    """
    metrics = context.aggregated_metrics or {}
    by_queue, by_time = (sum(metrics.get(name, {}).values()) / limit for name, limit in (("queue_s", MAX_QUEUE_S), ("busy", MAX_BUSY)))
    return max(1, math.ceil(by_queue), math.ceil(by_time)), {}


def app(args: dict[str, Any]) -> serve.Application:
    """Builds the application from `args` of a Serve configuration, or of `serve run`."""
    return Replica.bind(read_settings(args))  # type: ignore[attr-defined]
