"""The application as settings want it: what a process of ours serves, and what a replica of another server serves."""

from __future__ import annotations

from starlette.types import ASGIApp

from bertserve.service.http.app import create_app
from bertserve.service.http.auth import Authenticator
from bertserve.service.process.secrets import Secrets
from bertserve.service.serving.build import AppState
from bertserve.service.settings import Settings


def application(settings: Settings, state: AppState, secrets: Secrets, *, sends_request_id: bool = True) -> ASGIApp:
    """Returns the application of settings.

    Args:
        settings: Who may call what, from where, and what is logged.
        state: What it answers from.
        secrets: The keys.
        sends_request_id: Whether answers get the header `x-request-id` here; a server around it may add it.
    """
    auth = Authenticator(
        secrets.keys,
        admin_keys=secrets.admin_keys,
        open_health=settings.open_health,
        open_metrics=settings.open_metrics,
        max_concurrent_per_key=settings.max_concurrent_per_key,
    )
    return create_app(
        state,
        auth=auth,
        log_access=settings.access_log,
        root_path=settings.root_path,
        cors_origins=settings.cors_origin,
        sends_request_id=sends_request_id,
    )
