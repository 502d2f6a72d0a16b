"""The bert-bench command against a small server: exit codes, reports and flags."""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from bertserve.bench import cli, commands, measurement
from support.listening import BUSY, OK, always, http_server, ok, response, unused_port


def run(*flags: object) -> int:
    return cli.main([str(flag) for flag in flags])


def load(port: int, *flags: object, command: str = "closed") -> int:
    """Returns the exit code of a short load on loopback. It has no warm-up, so that a slow machine also measures requests."""
    return run(command, "--target", f"http://127.0.0.1:{port}/classify=short", "--seconds", 0.05, "--warmup-s", 0, *flags)


@pytest.fixture(autouse=True)
def arrivals_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends all requests of an open loop at its start, so that a stalled machine cannot miss any."""
    monkeypatch.setattr(commands, "poisson_arrivals", lambda rate, seconds, *, seed: [0.0] * round(rate * seconds))


def test_a_load_writes_self_contained_reports_without_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has two plots with unique ids, and loads nothing from outside."""
    (tmp_path / "key").write_text("secret-1\n")
    secrets = ("--header", "x-token: secret-2", "--api-key-file", tmp_path / "key")
    with http_server(ok) as server:
        assert (
            load(server.port, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html", "--slo", "error_rate=0", "--quiet", *secrets)
            == 0
        )
    out, err = capsys.readouterr()
    report, html = ((tmp_path / name).read_text(encoding="utf-8") for name in ("a.json", "a.html"))
    document = json.loads(report)
    [metrics] = document["loads"]
    ids = re.findall(r' id="([^"]+)"', html)

    assert (document["command"], document["verdicts"]) == ("closed", [{"condition": "error_rate <= 0", "measured": 0, "passed": True}])
    assert metrics["outcomes"] == {"200": metrics["requests"]}
    assert err == ""
    assert "closed, 16 connections" in out
    assert html.count("<svg") == 2
    assert sorted(ids) == sorted(set(ids))
    assert re.findall(r"<(?:script|link|img)|@import|url\((?!#)", html) == []
    assert "x-token" in report
    assert "secret" not in report + html + out


def test_progress_with_running_counts_goes_to_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("bertserve.bench.generator.COUNT_INTERVAL_S", 0.02)
    with http_server(ok) as server:
        assert load(server.port) == 0

    start, *counts = capsys.readouterr().err.splitlines()
    assert start == "closed, 16 connections, 0.05 s"
    assert [line for line in counts if not re.fullmatch(r"  \d+ requests ended", line)] == []
    assert len(counts) >= 1


def test_json_on_stdout_replaces_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server(ok) as server:
        assert load(server.port, "--json", "-") == 0

    assert json.loads(capsys.readouterr().out)["command"] == "closed"


def test_a_load_with_errors_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default, an error rate over 1 % is a miss. `--slo` replaces this default."""

    async def sometimes(index: int) -> bytes:
        return BUSY if index % 4 == 3 else OK

    with http_server(sometimes) as server:
        assert load(server.port, "--html", tmp_path / "a.html") == 1
        [line] = [line for line in capsys.readouterr().out.splitlines() if "MISSED" in line]
        assert line.startswith("MISSED: error_rate <= 0.01, measured 0.2")
        assert '<p class="missed">' in (tmp_path / "a.html").read_text()
    with http_server(sometimes) as server:  # another one, because the first request of a load must succeed
        assert load(server.port, "--slo", "error_rate=0.5") == 0


def test_a_port_without_a_server_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert load(unused_port()) == 2
    assert re.fullmatch(r"bert-bench: .*http://127\.0\.0\.1:\d+/classify.*\n", capsys.readouterr().err)


def test_a_refused_request_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with http_server(always(response(b'{"error": "there is no path"}', b"404 Not Found"))) as server:
        assert load(server.port) == 2
    assert re.search(" answered 404 .*: there is no path", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("closed --target localhost=short", "localhost"),
        ("closed --slo p99=1", "p99"),
        ("closed --slo p99_ms=1e400", "p99_ms=1e400"),
        ("closed --slo p99_ms=50,p99_ms=20", "p99_ms"),
        ("open --rate 1 --slo ratio=0.8", "ratio"),
        ("closed --api-key-file no-such-file", "--api-key-file `no-such-file`"),
        ("closed --seconds 0", "--seconds"),
        ("closed --connections 1.5", "--connections"),
        ("closed --header nonsense", "--header"),
        ("closed --header x:日", "--header"),
        ("closed --header x:1 --header X:2", "--header"),
        ("closed --header authorization:x --api-key-file key", "--header"),
        ("compare --bundle a --target http://a/classify --target http://b/classify", "--target"),
        ("closed --secnds 2", "did you mean --seconds?\n"),
        ("clsed", "did you mean closed?\n"),
        ("open", "--rate"),
        ("compare", "--bundle"),
        ("", "COMMAND"),
    ],
)
def test_invalid_usage_exits_with_2(command: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = run(*command.split())
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert hint in error


def test_plots_need_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed

    assert load(unused_port(), "--html", tmp_path / "a.html") == 2
    assert "[bench]'" in capsys.readouterr().err


def test_an_open_loop_sends_at_its_rate(tmp_path: Path) -> None:
    with http_server(ok) as server:
        assert load(server.port, "--seconds", 0.3, "--rate", 100, "--json", tmp_path / "a.json", command="open") == 0
    [metrics] = json.loads((tmp_path / "a.json").read_text())["loads"]

    assert metrics["requests"] == 30
    assert metrics["open_loop"] is True


@pytest.mark.parametrize(
    ("p99_ms", "code", "loads", "highest", "above"),
    [(10000, 0, ["open, 40/s", "open, 40/s, confirmation"], 40, None), (0.0001, 1, ["open, 40/s", "open, 20/s"], None, 20)],
)
def test_a_sweep_finds_the_highest_rate_or_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, p99_ms: float, code: int, loads: list[str], highest: float | None, above: float | None
) -> None:
    """The check for a late generator is disabled, so that a busy machine cannot fail the test."""
    monkeypatch.setattr(measurement, "MAX_LATENESS_MS", 1e9)
    flags = ("--seconds", 0.15, "--slo", f"p99_ms={p99_ms}", "--steps", 2, "--max-rate", 40)
    files = ("--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    with http_server(ok) as server:
        assert load(server.port, *flags, *files, command="sweep") == code
    document = json.loads((tmp_path / "a.json").read_text())

    assert [metrics["name"] for metrics in document["loads"]] == loads
    assert (document["results"]["max_rate"], document["results"]["lowest_rate_not_held"]) == (highest, above)
    assert "<figcaption>Answered against offered rate</figcaption>" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_a_closed_stdout_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the pipe to `head`. Closing the file writes the rest of its buffer."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, http_server(ok) as server:
        monkeypatch.setattr("sys.stdout", stdout)
        assert load(server.port) == 1


def test_ctrl_c_prints_partial_results(capsys: pytest.CaptureFixture[str]) -> None:
    async def interrupt(i: int) -> bytes:
        if i == 100:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return OK

    with http_server(interrupt) as server:
        assert load(server.port, "--seconds", 60) == 130
    out = capsys.readouterr().out

    assert "requests/s" in out
    assert "interrupted" in out
