"""Authorization: every route with and without a key, the key file, and the metrics of each key."""

import asyncio
import hashlib
import json
import os
import re
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from bertserve.service import cli
from bertserve.service.api.application import Application
from bertserve.service.api.error_responses import LOG_INTERVAL_S, MAX_LINES, ErrorLog
from bertserve.service.auth import Access, Authenticator, new_key
from bertserve.service.errors import EngineError, HttpError, SettingsError, UnavailableError
from support import metric, until
from support.app_client import call_once, error_of, fake_service, keys, posting, serving, state_of
from support.fakes import FakeEngine

KEY = {"authorization": "Bearer swordfish"}


def key_name(auth: Authenticator, key: bytes) -> str | None:
    """Returns the name of a key, or None if the authenticator refuses it."""
    with suppress(HttpError):
        return auth.identify(Access.KEY, [(b"authorization", b"Bearer " + key)])[0]
    return None


@pytest.mark.parametrize(("options", "path"), [({"public_health": False}, "/health/live"), ({"public_metrics": False}, "/metrics")])
async def test_health_and_metrics_can_require_the_key(models: Path, options: dict[str, bool], path: str) -> None:
    async with serving(state_of(models), Authenticator(keys(models.parent, "swordfish"), **options)) as client:
        answers = [await client.get(probe, headers=headers) for probe in ("/health/live", "/metrics") for headers in ({}, KEY)]
    expected = [401, 200, 200, 200] if path == "/health/live" else [200, 200, 401, 200]
    assert [answer.status_code for answer in answers] == expected


@pytest.mark.parametrize(
    ("authorization", "words"),
    [(None, "required"), ("Bearer wrong", "unknown"), ("Bearer ", "unknown"), ("Bearer \xe9", "unknown"), ("swordfish", "required")],
)
def test_a_missing_key_and_a_wrong_key_have_different_messages(models: Path, authorization: str | None, words: str) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    auth = Authenticator(keys(models.parent, "swordfish"))
    response = call_once(state_of(models), "POST", "/classify", auth=auth, json={"inputs": "good"}, headers=headers)
    message = error_of(response, 401, "unauthorized")
    assert words in message
    assert "swordfish" not in message
    assert response.headers["www-authenticate"] == "Bearer"


async def test_each_key_has_its_name_in_metrics(models: Path) -> None:
    key, line = new_key("alice")
    auth = Authenticator(keys(models.parent, "# who may call", "", line, "swordfish"))
    async with serving(state_of(models), auth=auth) as client:
        for headers in ({"authorization": f"Bearer {key}"}, KEY, KEY, {"authorization": "Bearer wrong"}, {}):
            await client.post("/classify", json={"inputs": "good"}, headers=headers)
        page = (await client.get("/metrics")).text
    counts = re.findall(r'bertserve_key_requests_total{key="(.+)",status="(.+)"} (.+)', page)
    assert sorted(counts) == [("alice", "200", "1.0"), ("line-4", "200", "2.0"), ("unknown", "401", "2.0")]


async def test_a_key_with_too_many_open_requests_is_refused_and_other_keys_are_not(models: Path) -> None:
    """A stream counts as one request."""
    engine, auth = FakeEngine(), Authenticator(keys(models.parent, "swordfish", "trident"))
    body, other = {"json": {"inputs": "good"}}, {"authorization": "Bearer trident"}
    lines = {"content": b'{"inputs": "good"}\n' * 3, "headers": KEY | {"content-type": "application/x-ndjson"}}
    service = fake_service(models, engine, api_key_file=models.parent / "keys", max_concurrent_per_key=1)
    async with serving(service, auth) as client:
        engine.gate.clear()
        running = [asyncio.ensure_future(client.post("/classify", **request)) for request in (lines, body | {"headers": other})]
        await until(lambda: len(service.scheduler.queue.requests) == 4)
        refusal = await client.post("/classify", headers=KEY, **body)
        error_of(refusal, 429, "overloaded")
        assert refusal.headers["retry-after"] == "1"
        engine.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
        assert (await client.post("/classify", headers=KEY, **body)).status_code == 200
        assert metric((await client.get("/metrics")).text, "key_requests_total", key="line-1", status="429") == 1


async def test_a_key_without_admin_rights_has_its_name_in_log_and_metrics(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bertserve.access")
    (models.parent / "admin").write_text("trident")
    auth = Authenticator(keys(models.parent, "swordfish"), admin_key_file=models.parent / "admin")
    async with serving(state_of(models, access_log=True), auth=auth) as client:
        answer = await client.post("/models/tiny/load", headers=KEY)
        page = (await client.get("/metrics")).text
    assert answer.status_code == 403
    assert metric(page, "key_requests_total", key="default", status="403") == 1
    lines = [vars(record) for record in caplog.records if record.name == "bertserve.access"]
    assert [(line["key"], line["status"]) for line in lines] == [("default", 403)]


def test_a_new_key_goes_to_stderr_and_its_digest_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bert-serve new-key alice >> keys.txt` adds only the line."""
    assert cli.main(["new-key", "alice"]) == 0
    output = capsys.readouterr()
    key, line = output.err.split()[-1], output.out.strip()
    auth = Authenticator(keys(tmp_path, line))
    assert line == f"alice sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    assert [key_name(auth, secret) for secret in (key.encode(), line.encode(), b"", b"alice")] == ["alice", None, None, None]


def test_each_line_is_one_key(tmp_path: Path) -> None:
    """Only a newline ends a line."""
    (tmp_path / "keys").write_bytes(b"\r\none\r\n\r\n# three\r\n two \r\n")
    auth = Authenticator(tmp_path / "keys")
    assert [key_name(auth, secret) for secret in (b"one", b"two", b"three", b"one\r\n\r\n two")] == ["line-2", "line-5", None, None]
    for character in ("\u2028", "\u0085", "\x0c"):
        assert key_name(Authenticator(keys(tmp_path, f"# made by{character}alice", "one")), b"alice") is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([""], "is empty"),
        (["# a comment"], "is empty"),
        (["swordfish", "two words"], "line 2"),
        (["alice sha256:abc"], "line 1"),
        ([f"sha256:{'0' * 64}"], "line 1"),  # a digest is not secret
        (["sw\xf6rdfish"], "line 1"),
        (["s" * 513], "line 1"),
        ([f"alice sha256:{'0' * 64}", f"alice sha256:{'1' * 64}"], "`alice`"),
    ],
)
def test_an_invalid_line_is_named_but_not_quoted(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as error:
        Authenticator(keys(tmp_path, *lines))
    assert not any(line in str(error.value) for line in lines if line)


def test_keys_are_reloaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    auth = Authenticator(keys(tmp_path, "one"))
    (tmp_path / "keys").write_text("two")
    auth.reload()
    assert [key_name(auth, b"one"), key_name(auth, b"two")] == [None, "default"]
    (tmp_path / "keys").write_text("not a key")
    auth.reload()
    assert key_name(auth, b"two") == "default"
    assert "line 1" in caplog.text


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """A reload keeps the keys of a pipe, because opening the pipe again would wait for a writer."""
    pipe = tmp_path / "keys"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("one",), daemon=True)
    writer.start()
    auth = Authenticator(pipe)
    writer.join(20)
    auth.reload()
    assert key_name(auth, b"one") == "default"


async def test_a_removed_key_ends_its_stream_at_the_next_line(models: Path) -> None:
    """A stream has no end, so the key is checked for each line. Renaming a key changes nothing."""
    state, auth = fake_service(models, FakeEngine()), Authenticator(keys(models.parent, "swordfish"))
    answers: list[Any] = []
    steps = iter(enumerate(["swordfish", "other\nswordfish", "other"]))

    async def receive() -> Any:
        """Returns a line when the one before it is answered; the last time two lines, after which the client waits for the answers."""
        step, content = next(steps, (4, ""))
        await until(lambda: len(answers) == step)
        (models.parent / "keys").write_text(content)
        auth.reload()
        return {"type": "http.request", "body": b'{"inputs": "good"}\n' * (1 + step // 2), "more_body": True}

    async def send(message: Any) -> None:
        if message.get("body"):
            answers.append(json.loads(message["body"]))

    scope = posting("/classify", (b"content-type", b"application/jsonl"), (b"authorization", b"Bearer swordfish"))
    async with serving(state):
        await asyncio.wait_for(Application(replace(state, auth=auth))(scope, receive, send), 20)
    first, second, third = answers
    assert [type(first), type(second), third["error_type"]] == [list, list, "unauthorized"]


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "ä", "a\nb"])
def test_an_invalid_key_name_is_refused(name: str) -> None:
    with pytest.raises(SettingsError):
        new_key(name)


async def test_a_caller_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """For many errors of one kind within a second, the log has the first ones and the number of the others, but all faults of its own."""
    log = ErrorLog()
    for error in [HttpError(HTTPStatus.NOT_FOUND, "no."), UnavailableError("stopping."), EngineError("nan."), ValueError("bug")] * 60:
        log.write(error, {"request_id": "1", "method": "POST", "path": "/classify"})
    assert Counter(vars(record)["status"] for record in caplog.records) == {404: MAX_LINES, 503: 1, 500: 120}
    caplog.clear()
    await asyncio.sleep(LOG_INTERVAL_S + 0.1)
    assert caplog.messages == [f"404 not_found: {60 - MAX_LINES} more within 1 s", "503 unavailable: 59 more within 1 s"]
