"""A proxy or a browser in front: a path before all paths, the caller's address, and pages of other origins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from application import keys, play
from bertserve.service.http.auth import Authenticator
from bertserve.service.serving.build import build
from bertserve.service.settings import Settings, SettingsError, parse
from conftest import running

PAGE = "https://app.example.com"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def answers(models: Path, *requests: tuple[str, str], headers: dict[str, str] | None = None, **options: Any) -> list[httpx.Response]:
    """Returns the answers of an application to requests, each with the body of a classification."""

    async def check(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.request(method, path, json={"inputs": "good"}, headers=headers) for method, path in requests]

    return play(build(Settings(models=models)), check, **options)


def test_a_path_may_begin_with_that_of_the_proxy(models: Path) -> None:
    """Whether the proxy takes its part off or not; a path that only looks like it is none."""
    asked = [
        ("POST", "/bert/classify"),
        ("POST", "/classify"),
        ("GET", "/bert/health"),
        ("GET", "/bert/models/tiny"),
        ("POST", "/berta/classify"),
    ]

    assert [200, 200, 200, 200, 404] == [answer.status_code for answer in answers(models, *asked, root_path="/bert")]


def test_documents_know_the_path_of_the_proxy(models: Path) -> None:
    """The page at the root, with a slash behind it or not, asks below it for all else, and so does the document's page."""
    root, bare, document = answers(models, ("GET", "/bert/"), ("GET", "/bert"), ("GET", "/bert/openapi.json"), root_path="/bert")

    assert '<base href="/bert/">' in root.text
    assert root.text == bare.text
    assert [{"url": "/bert"}] == document.json()["servers"]


def test_the_page_is_open_and_asks_for_the_key(models: Path) -> None:
    """A browser that sends no key gets the page; what is tried there needs the key, which the page's button sends."""
    asked = [("GET", "/docs"), ("GET", "/docs/static/swagger-ui.css"), ("GET", "/openapi.json"), ("POST", "/classify"), ("GET", "/models")]
    *open_ones, document, classified, models_page = answers(models, *asked, auth=Authenticator(keys(models.parent, "swordfish")))

    assert [200, 200, 200, 401, 401] == [answer.status_code for answer in (*open_ones, document, classified, models_page)]
    assert {"key": {"type": "http", "scheme": "bearer"}} == document.json()["components"]["securitySchemes"]
    assert [{"key": []}] == document.json()["security"]
    assert "tiny" not in document.text


def test_without_keys_the_page_asks_for_none(models: Path) -> None:
    (document,) = answers(models, ("GET", "/openapi.json"))

    assert "securitySchemes" not in document.json()["components"]
    assert "security" not in document.json()


def test_a_page_of_an_allowed_origin_may_read_answers(models: Path) -> None:
    """Errors and headers too; its browser asks first, without a key, and is told so."""
    auth = Authenticator(keys(models.parent, "swordfish"))
    (answer,) = answers(models, ("POST", "/classify"), headers={"origin": PAGE}, auth=auth, cors_origins=[PAGE])
    (preflight,) = answers(models, ("OPTIONS", "/classify"), headers=PREFLIGHT, auth=auth, cors_origins=[PAGE])

    assert (401, PAGE) == (answer.status_code, answer.headers["access-control-allow-origin"])
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert (200, PAGE) == (preflight.status_code, preflight.headers["access-control-allow-origin"])
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()


def test_a_page_of_another_origin_may_not(models: Path) -> None:
    headers = {**PREFLIGHT, "origin": "https://app.example.com.evil.test"}
    (preflight,) = answers(models, ("OPTIONS", "/classify"), headers=headers, cors_origins=[PAGE])

    assert 400 == preflight.status_code
    assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize(
    ("flags", "clients"),
    [
        pytest.param([], ["127.0.0.1"] * 3, marks=pytest.mark.full_grid),
        pytest.param(["--forwarded-allow-ips", "10.0.0.0/8"], ["127.0.0.1"] * 3, marks=pytest.mark.full_grid),
        (["--forwarded-allow-ips", "127.0.0.1,10.0.0.0/8"], ["203.0.113.7", "None", "None"]),
    ],
)
def test_the_log_has_the_callers_address(models: Path, tmp_path: Path, flags: list[str], clients: list[str]) -> None:
    """As a proxy says it, where it is one to be believed, and only if it is an address."""
    with running(models, tmp_path / "log", "--access-log", *flags) as served:
        for forwarded in ("203.0.113.7, 10.1.2.3", "some words of a caller", "::1%words of a caller"):
            httpx.get(f"{served.url}/health", headers={"x-forwarded-for": forwarded})

    assert clients == [line.partition("bertserve.access: ")[2].split()[0] for line in served.lines()]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--cors-origin", "app.example.com"),
        ("--cors-origin", "https://app.example.com/"),
        ("--forwarded-allow-ips", "*"),
        ("--forwarded-allow-ips", "proxy"),
        ("--root-path", "bert"),
        ("--root-path", "/bert/"),
    ],
)
def test_a_value_that_would_do_nothing_is_refused(flag: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag} .*`{value.replace('*', '[*]')}`"):
        parse(Settings, [flag, value])
