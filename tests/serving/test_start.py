"""Starts on a real port with one or two workers: the output, the log, failed starts, and the files that a start leaves behind."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from bertserve.service.process import raise_file_limit
from support import tiny
from support.replica import ServeProcess, running, without_shutdown

BERT_SERVE = str(Path(sys.executable).with_name("bert-serve"))
TWO = ("--workers", "2", "--threads", "2")


def classify(server: ServeProcess, inputs: Any, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/classify", json={"inputs": inputs}, headers=headers, timeout=30, trust_env=False)


def test_a_start_prints_models_address_and_time(models: Path) -> None:
    tiny.bundle(models, "other")
    command = [BERT_SERVE, "serve", "--models", str(models), "--port", "0", "--default", "classify=tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert without_shutdown(process.stderr.read()) == []
    assert lines[:2] == ["  other: text-classification, cpu/fp32\n", "  tiny: text-classification, cpu/fp32, answers /classify\n"]
    assert re.fullmatch(
        r"bertserve \S+ listens on (http://127\.0\.0\.1:\d+), ready after \d+\.\d\d s with \d+ inference threads?; docs at \1/docs\n",
        lines[2],
    )


def test_the_log_can_be_json(models: Path, tmp_path: Path) -> None:
    with running(models, tmp_path / "log", "--access-log", "--log-format", "json") as server:
        classify(server, "swordfish", **{"x-request-id": "r-7"})
        classify(server, ["swordfish", 1], **{"x-request-id": "r-7"})
        with socket.create_connection(server.address) as connection:
            connection.sendall(b"swordfish\r\n\r\n")
            response = connection.makefile("rb").read()
        with socket.create_connection(server.address) as connection:  # the application counts and logs a request with a broken body
            connection.sendall(b"POST /classify HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\nnonsense\r\n")
            connection.makefile("rb").read()
        metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text
    log = server.log.read_text()
    assert "swordfish" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    *requests, broken = [(line["status"], line["request_id"], line["model"]) for line in lines if line["logger"] == "bertserve.access"]
    assert requests == [(200, "r-7", "tiny"), (422, "r-7", "unknown")]
    assert broken[0] == 499
    assert all(line["level"] in {"INFO", "WARNING"} and datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    access = [line for line in lines if line["logger"] == "bertserve.access"]
    assert [(line["method"], line["path"]) for line in access] == [("POST", "/classify")] * 3
    assert {"tokenize_ms", "queue_ms", "inference_ms", "decode_ms"} <= set(access[0])
    assert [line["client"] for line in access] == ["127.0.0.1"] * 3
    request_id = json.loads(response.partition(b"\r\n\r\n")[2])["request_id"]
    assert [(line["status"], line["error_type"]) for line in lines if line.get("request_id") == request_id] == [(400, "malformed")]
    assert 'http_requests_total{status="400"} 1.0' in metrics


@pytest.mark.full_grid
def test_the_lines_of_a_start_are_json_too(models: Path) -> None:
    command = [BERT_SERVE, "serve", "--models", str(models), "--port", "0", "--log-format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGTERM)

    assert "tiny" in lines[0]["message"]
    assert f"listens on {lines[1]['address']}, ready after {lines[1]['ready_s']:.2f} s" in lines[1]["message"]
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)


def failures(*flags: str) -> list[subprocess.CompletedProcess[str]]:
    """Returns the results of a start that must fail, with one worker and with two."""
    commands = [[BERT_SERVE, "serve", *flags, *workers] for workers in ((), TWO)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda command: subprocess.run(command, capture_output=True, text=True, timeout=60, check=False), commands))


@pytest.mark.parametrize(("flag", "code"), [("--default=classify=other", 2), ("--no-access-log", 1)])
def test_an_error_is_the_same_with_one_or_two_workers(models: Path, flag: str, code: int) -> None:
    if code == 1:
        (models / "tiny/tokenizer.json").unlink()
    one, two = failures("--models", str(models), "--port", "0", flag)

    assert one.returncode == code
    assert one.stdout == ""
    assert two.stderr == one.stderr
    assert two.returncode == code
    assert two.stdout == ""
    assert len(two.stderr.splitlines()) == 1


def test_a_port_in_use_is_an_error(models: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        one, two = failures("--models", str(models), "--port", port)

    assert one.returncode == 1
    assert two.stdout == one.stdout
    assert two.stderr == one.stderr
    assert two.returncode == 1
    assert port in two.stderr
    assert "in use" in two.stderr
    assert "listens on" not in two.stdout
    assert "Traceback" not in two.stderr


@pytest.mark.parametrize(("soft", "hard", "changes"), [(1024, -1, [(2**16, -1)]), (1024, 4096, [(4096, 4096)]), (-1, -1, [])])
def test_the_limit_on_open_files_is_raised(soft: int, hard: int, changes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    actual: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: actual.append(limits))
    raise_file_limit()
    assert actual == changes


FULL = Path("/dev/full")  # a device that is always full


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_an_unwritable_log_does_not_stop_requests(models: Path) -> None:
    bodies = [{"inputs": "good"}, {"inputs": 1}, {"inputs": "good", "model": "none"}, "no body"]
    with running(models, FULL, "--access-log") as server, httpx.Client(base_url=server.url, trust_env=False, timeout=20) as client:
        for _ in range(20):
            assert [client.post("/classify", json=body).status_code for body in bodies] == [200, 422, 404, 422]
    assert server.process.returncode == 0


def test_onnx_runtime_stores_no_device_id(models: Path, tmp_path: Path) -> None:
    """ONNX Runtime's telemetry writes an identifier into the user's cache folder; the service turns it off before it starts."""
    home = tmp_path / "home"
    home.mkdir()
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "CI", "XDG_"))}
    code = "from bertserve.service.build import build; from bertserve.service.settings import Settings; build(Settings())"
    environment = outside | {"HOME": str(home), "BERT_SERVE_MODELS": str(models)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)

    assert [path for path in home.rglob("*") if path.is_file()] == []
