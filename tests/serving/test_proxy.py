"""Access through a proxy or a browser: path prefix, client address, docs pages and cross-origin requests."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from bertserve.service.auth import Authenticator
from support.app_client import keys, serving, state_of
from support.replica import running

PAGE = "https://app.example.com"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


async def send_all(
    models: Path, *requests: tuple[str, str], headers: dict[str, str] | None = None, auth: Authenticator | None = None, **settings: Any
) -> list[httpx.Response]:
    """Returns the responses of an application to requests of (method, path), all with the body of a classification."""
    async with serving(state_of(models, **settings), auth) as client:
        return [await client.request(method, path, json={"inputs": "good"}, headers=headers) for method, path in requests]


async def test_a_path_can_start_with_the_prefix_of_the_proxy(models: Path) -> None:
    posts = [("POST", path) for path in ("/bert/classify", "/classify", "/berta/classify")]
    calls = [*posts, ("GET", "/bert/health"), ("GET", "/bert/models/tiny")]

    assert [answer.status_code for answer in await send_all(models, *calls, root_path="/bert")] == [200, 200, 404, 200, 200]


async def test_pages_use_the_prefix_of_the_proxy(models: Path) -> None:
    root, bare, document = await send_all(models, ("GET", "/bert/"), ("GET", "/bert"), ("GET", "/bert/openapi.json"), root_path="/bert")

    assert '<base href="/bert/">' in root.text
    assert bare.text == root.text
    assert document.json()["servers"] == [{"url": "/bert"}]


async def test_the_docs_are_public_and_declare_the_key(models: Path) -> None:
    """A browser gets the docs without a key. Requests from the docs need the key, which the page's button sends."""
    calls = [("GET", "/docs"), ("GET", "/docs/static/swagger-ui.css"), ("GET", "/openapi.json"), ("POST", "/classify"), ("GET", "/models")]
    *open_ones, document, result, models_page = await send_all(models, *calls, auth=Authenticator(keys(models.parent, "swordfish")))

    assert [answer.status_code for answer in (*open_ones, document, result, models_page)] == [200, 200, 200, 401, 401]
    assert document.json()["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document.json()["security"] == [{"key": []}]
    assert "tiny" not in document.text
    (without_key,) = await send_all(models, ("GET", "/openapi.json"))
    assert "security" not in without_key.json()


async def test_a_page_of_an_allowed_origin_can_read_responses(models: Path) -> None:
    """The page can also read errors and headers. The browser's preflight request needs no key."""
    auth = Authenticator(keys(models.parent, "swordfish"))
    (answer,) = await send_all(models, ("POST", "/classify"), headers={"origin": PAGE}, auth=auth, cors_origin=[PAGE])
    (preflight,) = await send_all(models, ("OPTIONS", "/classify"), headers=PREFLIGHT, auth=auth, cors_origin=[PAGE])

    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, PAGE)
    assert {"x-request-id", "inference-header-content-length"} <= {*answer.headers["access-control-expose-headers"].split(", ")}
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "x-request-id" in preflight.headers
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()


@pytest.mark.parametrize(("origins", "status"), [([PAGE], 400), ([], 405)])
async def test_a_page_of_another_origin_cannot_read_responses(models: Path, origins: list[str], status: int) -> None:
    headers = {**PREFLIGHT, "origin": "https://app.example.com.evil.test"}
    preflight, answer = await send_all(models, ("OPTIONS", "/classify"), ("POST", "/classify"), headers=headers, cors_origin=origins)

    assert (preflight.status_code, answer.status_code) == (status, 200)
    assert "access-control-allow-origin" not in preflight.headers.keys() | answer.headers.keys()


@pytest.mark.parametrize(
    ("flags", "clients"),
    [
        pytest.param([], ["127.0.0.1"] * 3, marks=pytest.mark.full_grid),
        pytest.param(["--forwarded-allow-ips", "10.0.0.0/8"], ["127.0.0.1"] * 3, marks=pytest.mark.full_grid),
        (["--forwarded-allow-ips", "127.0.0.1,10.0.0.0/8"], ["203.0.113.7", "None", "None"]),
    ],
)
def test_the_log_has_the_address_of_the_client(models: Path, tmp_path: Path, flags: list[str], clients: list[str]) -> None:
    """`x-forwarded-for` is used only if the proxy is trusted and the value is an address."""
    with running(models, tmp_path / "log", "--access-log", *flags) as server:
        for addresses in ("203.0.113.7, 10.1.2.3", "some words of a caller", "::1%words of a caller"):
            httpx.get(f"{server.url}/models", headers={"x-forwarded-for": addresses})

    assert [line.partition("bertserve.access: ")[2].split()[0] for line in server.lines()] == clients
