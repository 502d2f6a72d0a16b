"""The service in process, for tests of its HTTP interface: built as `bert-serve` builds it, or around a fake engine."""

import asyncio
import atexit
import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from bertserve.service.api.application import Application
from bertserve.service.app_state import AppState
from bertserve.service.auth import Authenticator
from bertserve.service.build import build
from bertserve.service.engine.model_engines import ModelEngines
from bertserve.service.settings import Settings
from support import until
from support.fakes import FakeEngine

Send = Callable[..., httpx.Response]
LONG = " ".join(["good", "film", "bad"] * 20)  # 60 tokens, twice the limit of a tiny bundle


def state_of(models: Any, **settings: Any) -> AppState:
    """Builds a service with the bundles of one or more models folders."""
    return build(Settings(models=models, **settings))


@asynccontextmanager
async def serving(service: AppState, auth: Authenticator | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Starts an application, yields a client of it, and stops the application."""
    service.start()
    try:
        transport = httpx.ASGITransport(Application(service if auth is None else replace(service, auth=auth)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
            yield client
    finally:
        await service.stop(0)


def keys(folder: Path, *lines: str) -> Path:
    """Writes a file of keys, and returns its path."""
    path = folder / "keys"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def call(models: Path, method: str, path: str, *, settings: dict[str, Any] | None = None, **request: Any) -> httpx.Response:
    """Returns the response to one request. The service has the bundles of `models`; all calls with equal bundles and settings share it."""
    contents = tuple((str(file.relative_to(models)), file.read_bytes()) for file in sorted(models.rglob("*")) if file.is_file())
    client = _client(_Service(contents, json.dumps(settings or {}, sort_keys=True), models))
    return _loop().run(asyncio.wait_for(client.request(method, path, **request), 20))


def call_once(service: AppState, *request: Any, auth: Authenticator | None = None, **options: Any) -> httpx.Response:
    """Returns the response to the only request of a service: for tests that change a part of the service."""

    async def answer() -> httpx.Response:
        async with serving(service, auth) as client:
            return await asyncio.wait_for(client.request(*request, **options), 20)

    return asyncio.run(answer())


@dataclass(frozen=True)
class _Service:
    """The key of a cached service: what identifies its bundles, and its settings as JSON."""

    contents: tuple[Any, ...]
    settings: str
    models: Path = field(compare=False)


@functools.cache
def _loop() -> asyncio.Runner:
    """Returns the event loop of the cached services, which are never stopped."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


@functools.cache
def _client(key: _Service) -> httpx.AsyncClient:
    """Returns a client of a service, which is started at the first call."""
    service = state_of(key.models, **{"allow_implicit_default": True} | json.loads(key.settings))

    async def start() -> httpx.AsyncClient:
        service.scheduler.start()
        return httpx.AsyncClient(transport=httpx.ASGITransport(Application(service)), base_url="http://test", timeout=20)

    return _loop().run(start())


def posting(path: str = "/classify", *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    """Returns the ASGI scope of a POST."""
    return {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": list(headers)}


async def sent_for(service: AppState, *messages: Message) -> list[Message]:
    """Returns what the application sends for a POST with these messages, after which its client is silent."""
    incoming = iter(messages)
    sent: list[Message] = []

    async def receive() -> Message:
        return next(incoming, None) or await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    await Application(service)(posting(), receive, send)
    return sent


def error_of(response: httpx.Response, status: int, error_type: str) -> str:
    """Checks the status and the exact shape of an error, and returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert sorted(body) == ["error", "error_type", "request_id"]
    assert body["error_type"] == error_type
    assert response.headers["x-request-id"] == body["request_id"]
    return str(body["error"])


def open_api(models: Path) -> Send:
    """Returns a function that sends requests, one at a time, to one application with the bundles of `models`."""
    client = _client(_Service((str(models), models), json.dumps({"max_top_k": 1000}), models))
    return lambda *args, **request: _loop().run(asyncio.wait_for(client.request(*args, **request), 20))


def post(api: Send | Path, body: Any, *, path: str = "/classify", **options: Any) -> httpx.Response:
    """Returns the response to a POST of `body`: bytes are sent unchanged, any other value as JSON. `api` can be a folder of models."""
    send = functools.partial(call, api) if isinstance(api, Path) else api
    return send("POST", path, content=body if isinstance(body, bytes) else json.dumps(body).encode(), **options)


def result(api: Send | Path, path: str, **body: Any) -> Any:
    response = post(api, body, path=path)
    assert response.status_code == 200, response.text
    return response.json()


def error_of_body(api: Send | Path, path: str, body: Any, **options: Any) -> str:
    return error_of(post(api, body, path=path, **options), 422, "invalid_value")


def result_of(api: Send | Path, path: str, inputs: Any, **parameters: Any) -> Any:
    return result(api, path, inputs=inputs, parameters=parameters)


def error_of_inputs(api: Send | Path, path: str, inputs: Any, **parameters: Any) -> str:
    return error_of_body(api, path, {"inputs": inputs, "parameters": parameters})


def assert_same(actual: Any, expected: Any, *, tolerance: float = 1e-5, ignored_fields: Sequence[str] = ()) -> None:
    """Asserts that two results are equal: floats within the tolerance, all other values exactly, except the ignored fields."""
    if isinstance(expected, list):
        assert isinstance(actual, list)
        for one, other in zip(expected, actual, strict=True):
            assert_same(other, one, tolerance=tolerance, ignored_fields=ignored_fields)
    elif isinstance(expected, dict):
        assert sorted(actual) == sorted(expected)
        for key, value in expected.items():
            if key not in ignored_fields:
                assert_same(actual[key], value, tolerance=tolerance, ignored_fields=ignored_fields)
    else:
        assert actual == (pytest.approx(expected, abs=tolerance) if isinstance(expected, float) else expected)


def fake_service(models: Path, engine: FakeEngine, **settings: Any) -> AppState:
    """Returns a service with one inference thread and the bundle `tiny` on a fake engine. Its texts are worth a common batch."""
    few = {"threads": 1, "max_batch_tokens": 64, "max_queue_tokens": 4096, "timeout_ms": 10_000, "max_timeout_ms": 20_000}
    service = state_of(models, **few | settings)
    model = service.registry.get("tiny")
    model.engines = ModelEngines(engine)
    model.predict_seconds = lambda rows, length: 1e-3 + rows * length * 1e-9
    return service


async def until_queued(service: AppState, items: int) -> None:
    """Waits until the queue has this many items."""
    await until(lambda: service.scheduler.queue.queue_items >= items)


@asynccontextmanager
async def busy_client(service: AppState, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Serves while a request at the engine's gate keeps the only inference thread busy; that request must then succeed."""
    engine.gate.clear()
    async with serving(service) as client:
        first = asyncio.ensure_future(client.post("/classify", json={"inputs": "good"}))
        await asyncio.to_thread(engine.entered.acquire, timeout=20)
        try:
            yield client
        finally:
            engine.gate.set()
            assert (await first).status_code == 200
