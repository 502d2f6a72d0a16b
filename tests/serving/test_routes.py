"""Every route enforces its declared access, for each kind of key, at its own path and at similar paths."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message

from bertserve.service.api import application
from bertserve.service.api.application import Application, create_fastapi
from bertserve.service.api.routing import GuardedRoute
from bertserve.service.app_state import AppState
from bertserve.service.auth import Access, Authenticator
from bertserve.service.tasks.catalog import TASKS
from support.app_client import keys, serving, state_of

NO_KEY, KEY, ADMIN_KEY = b"", b"Bearer swordfish", b"Bearer trident"
WITHOUT_KEY = {Access.PUBLIC, Access.PROBE, Access.METRICS}
MUTATIONS = {
    "newline": lambda path: f"{path}%0A",
    "carriage return": lambda path: f"{path}%0D",
    "null": lambda path: f"{path}%00",
    "next line": lambda path: f"{path}%C2%85",
    "prefix": lambda path: f"/bert{path}",
    "double prefix": lambda path: f"/bert/bert{path}",
    "two slashes": lambda path: f"/{path}",
    "two slashes within": lambda path: path.replace("/tiny", "//tiny"),
    "semicolon within": lambda path: path.replace("/tiny", ";x/tiny"),
    "upper case": lambda path: path.upper(),
    "overlong letter": lambda path: f"{path}%C1%81",
    "encoded slash in lower case": lambda path: f"{path}%2f",
    "encoded backslash": lambda path: path.replace("/tiny", "%5Ctiny"),
    "dot": lambda path: f"/.{path}",
    "dots": lambda path: f"/health/..{path}",
    "encoded dots": lambda path: f"/health/%2e%2e{path}",
    "last dots": lambda path: f"{path}/..",
    "encoded letter": lambda path: path.replace("/tiny", "/%74iny"),
    "fullwidth letter": lambda path: path.replace("unload", "%EF%BD%95nload"),
}
AMBIGUOUS = ("newline", "null", "next line", "overlong letter", "encoded slash in lower case", "dot", "dots", "encoded dots", "last dots")


class Exchange:
    def __init__(self, method: str, raw_path: str, authorization: bytes, root_path: str = "") -> None:
        headers = [(b"host", b"test"), (b"content-type", b"application/json")]
        headers += [(b"authorization", authorization)] if authorization else []
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(raw_path),  # as uvicorn does
            "raw_path": raw_path.encode(),
            "root_path": root_path,
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self.status = 0
        self.body = b""
        self.unread: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def run(self, app: ASGIApp) -> Self:
        async def receive() -> Message:
            return self.unread.pop() if self.unread else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.status = message.get("status", self.status)
            self.body += message.get("body", b"")

        await app(self.scope, receive, send)
        return self

    @property
    def access(self) -> Access | None:
        """The access of the matched route; None if no route matched."""
        return getattr(self.scope.get("route"), "access", None)


class Changes:
    """Replaces the reloader, and records the names of the models to load or unload."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def load(self, name: str) -> Any:
        self.names.append(name)
        raise AssertionError("it changed a model")

    unload = load


def service(models: Path, **settings: Any) -> tuple[AppState, Changes]:
    """Returns a service with a key and an admin key, and the recorder of its model changes."""
    (models.parent / "admin").write_text("trident")
    changes = Changes()
    auth = Authenticator(keys(models.parent, "swordfish"), admin_key_file=models.parent / "admin")
    return replace(state_of(models, **settings), reloader=changes, auth=auth), changes


def routes(app: FastAPI) -> Iterator[tuple[GuardedRoute, str, str]]:
    """Yields every route, once per method, with an example path."""
    for route in app.routes:
        assert isinstance(route, GuardedRoute)
        for method in sorted(route.methods):
            path = route.path.replace("{version}", "1")
            yield route, method, path.replace("{name}", "tiny")


def is_allowed(access: Access, authorization: bytes) -> bool:
    return access in WITHOUT_KEY or authorization == ADMIN_KEY or (authorization == KEY and access is Access.KEY)


def test_only_probes_metrics_and_pages_are_open_without_a_key(models: Path) -> None:
    methods_and_paths = {
        (method, route.path) for route, method, _ in routes(create_fastapi(state_of(models))) if route.access in WITHOUT_KEY
    }
    open_paths = {path for _, path in methods_and_paths}
    pages = {path for path in open_paths if path.startswith(("/playground/", "/docs/static/"))} | {"/", "/docs", "/openapi.json"}
    probes = {"/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready", "/v2/models/{name}/ready"}
    probes |= {f"{base}/health" for base in ("/models/{name}", *(f"/{spec.path}" for spec in TASKS.values()))}
    assert open_paths == pages | probes | {"/metrics"}
    assert {method for method, _ in methods_and_paths} - {"HEAD"} == {"GET"}


async def test_every_route_enforces_its_declared_access(models: Path) -> None:
    """A missing key is 401 and a key without permission is 403. Only the admin key can change models."""
    state, changes = service(models)
    async with serving(state):
        app = Application(state)
        for route, method, path in routes(create_fastapi(state)):
            for authorization in (NO_KEY, KEY, ADMIN_KEY):
                before = len(changes.names)
                exchange = await Exchange(method, path, authorization).run(app)
                denied = {NO_KEY: 401, KEY: 403}.get(authorization)
                assert exchange.access is route.access, path
                assert (exchange.status == denied) is not is_allowed(route.access, authorization), (path, authorization, exchange.status)
                assert (len(changes.names) > before) is (route.access is Access.ADMIN and authorization == ADMIN_KEY), path
                assert exchange.status != 405, path
    assert set(changes.names) == {"tiny"}


@pytest.mark.parametrize(("root_path", "mounted"), [("", False), ("/bert", False), ("/bert", True)])
async def test_no_mutated_path_bypasses_the_access_of_a_route(models: Path, root_path: str, mounted: bool) -> None:
    state, changes = service(models, **({} if mounted else {"root_path": root_path}))
    async with serving(state):
        app = Application(state)
        for route, method, path in routes(create_fastapi(state)):
            for name, mutate in MUTATIONS.items():
                for authorization in (NO_KEY, KEY) if route.access is Access.ADMIN else (NO_KEY,):
                    exchange = await Exchange(method, root_path + mutate(path), authorization, root_path if mounted else "").run(app)
                    context = (method, name, path, exchange.status)
                    assert changes.names == [], context
                    if exchange.access is None:
                        assert exchange.status in (400, 404), context
                    elif exchange.status != 405:
                        denied = {NO_KEY: 401, KEY: 403}[authorization]
                        assert (exchange.status == denied) is not is_allowed(exchange.access, authorization), context
                    if name in AMBIGUOUS:
                        assert exchange.status == 400, context
                    if name == "double prefix":
                        assert exchange.status == 404, context


async def test_a_path_without_a_route_is_404_before_its_body_is_read(models: Path) -> None:
    state, _ = service(models)
    for authorization in (NO_KEY, KEY):
        exchange = await Exchange("POST", "/nowhere", authorization).run(Application(state))
        assert exchange.status == 404
        assert len(exchange.unread) == 1


async def test_a_route_without_a_declared_access_needs_an_admin_key(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route of another class is not served at all."""

    async def endpoint() -> None:
        """Does nothing."""

    def with_more_routes(state: AppState) -> FastAPI:
        app = create_fastapi(state)
        app.router.routes += [GuardedRoute("/undeclared", endpoint), APIRoute("/other", endpoint)]
        return app

    monkeypatch.setattr(application, "create_fastapi", with_more_routes)
    app = Application(service(models)[0])
    for path, statuses in {"/undeclared": [401, 403, 200], "/other": [404, 404, 404]}.items():
        assert [(await Exchange("GET", path, key).run(app)).status for key in (NO_KEY, KEY, ADMIN_KEY)] == statuses


async def test_probes_of_unknown_models_reveal_no_model_names(models: Path) -> None:
    state, _ = service(models)
    for path in ("/models/tinny/health", "/v2/models/tinny/ready", "/ner/health"):
        probe = await Exchange("GET", path, NO_KEY).run(Application(state))
        assert probe.status == 404
        assert b"tiny" not in probe.body
        assert b"sha256" not in probe.body
