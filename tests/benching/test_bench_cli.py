"""The bert-bench command against a small server: exit codes, reports and flags."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bertserve.bench import cli, commands, measurement, page
from listening import BUSY, OK, listening, ok, unused_port


def run(*given: object) -> int:
    return cli.main([str(flag) for flag in given])


def load(port: int, *given: object, command: str = "closed") -> int:
    """Returns the exit code of a short load on loopback. It has no warm-up, so that a slow machine also measures requests."""
    return run(command, "--target", f"http://127.0.0.1:{port}/classify=short", "--seconds", 0.05, "--warmup-s", 0, *given)


@pytest.fixture(autouse=True)
def arrivals_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends all requests of an open loop at its start, so that a stalled machine cannot miss any."""
    monkeypatch.setattr(commands, "poisson_arrivals", lambda rate, seconds, *, seed: [0.0] * round(rate * seconds))


class Written(NamedTuple):
    """The exit code, the output and both reports of a closed loop."""

    code: int
    stdout: str
    stderr: str
    json: str
    html: str


@pytest.fixture(name="written", scope="module")
def written_by_a_closed_loop(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Returns the results of a closed loop with an objective, a header, an API key and both reports."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "key").write_text("secret-1\n")
    out, err = io.StringIO(), io.StringIO()
    secrets = ("--header", "x-token: secret-2", "--api-key-file", folder / "key")
    with listening(ok) as server, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = load(server.port, "--json", folder / "a.json", "--html", folder / "a.html", "--slo", "error_rate=0", *secrets)
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("a.json", "a.html")]
    return Written(code, out.getvalue(), err.getvalue(), *texts)


def test_a_successful_load_writes_a_report_and_exits_with_0(written: Written) -> None:
    document = json.loads(written.json)
    [made] = document["runs"]

    assert 0 == written.code
    assert "closed, 16 connections" in written.stdout
    assert "" == written.stderr
    assert "closed" == document["command"]
    assert {"200": made["requests"]} == made["outcomes"]
    assert ["passed: error_rate <= 0, measured 0"] == document["verdicts"]


def test_the_html_report_is_self_contained(written: Written) -> None:
    """The page has two plots with unique ids, and loads nothing from outside."""
    ids = re.findall(r' id="([^"]+)"', written.html)

    assert 2 == written.html.count("<svg")
    assert sorted(set(ids)) == sorted(ids)
    assert [] == re.findall(r"<(?:script|link|img)|@import|url\((?!#)", written.html)


def test_secrets_do_not_appear_in_reports_or_output(written: Written) -> None:
    assert "x-token" in written.json
    assert "secret" not in written.json + written.html + written.stdout


def test_json_on_stdout_replaces_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json -` prints only JSON."""
    with listening(ok) as server:
        assert 0 == load(server.port, "--json", "-")

    assert "closed" == json.loads(capsys.readouterr().out)["command"]


def test_a_load_with_errors_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default, an error rate over 1 % is a miss. `--slo` replaces this default."""

    async def sometimes(index: int) -> bytes:
        return BUSY if index % 4 == 3 else OK

    with listening(sometimes) as server:
        assert 1 == load(server.port, "--html", tmp_path / "a.html")
        [line] = [line for line in capsys.readouterr().out.splitlines() if "MISSED" in line]
        assert line.startswith("MISSED: error_rate <= 0.01, measured 0.2")
        assert '<p class="missed">' in (tmp_path / "a.html").read_text()
        assert 0 == load(server.port, "--slo", "error_rate=0.5")


def test_a_port_without_a_server_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == load(unused_port())
    assert re.fullmatch(r"bert-bench: nothing listens at http://127\.0\.0\.1:\d+/classify; .*\n", capsys.readouterr().err)


def test_a_refused_request_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """For an unknown path, the error has the service's own message."""

    async def missing(_: int) -> bytes:
        body = b'{"error": "there is no path"}'
        return b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    with listening(missing) as server:
        assert 2 == load(server.port)
    assert re.search(" answered 404 .*: there is no path", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("closed --target localhost=short", "localhost"),
        ("closed --slo p99=1", "p99"),
        ("closed --api-key-file no-such-file", "no-such-file"),
        ("closed --seconds 0", "--seconds"),
        ("closed --connections 1.5", "--connections"),
        ("closed --header nonsense", "--header"),
        ("closed --secnds 2", "did you mean --seconds?\n"),
        ("clsed", "did you mean closed?\n"),
        ("open", "--rate"),
        ("compare", "--bundle"),
        ("", "COMMAND"),
    ],
)
def test_invalid_usage_exits_with_2(wrong: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message is one line that names the flag or the value."""
    try:
        code = run(*wrong.split())
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert (2, 1, True) == (code, error.count("\n"), hint in error), error


def test_plots_need_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)

    assert 2 == load(unused_port(), "--html", tmp_path / "a.html")
    assert "[bench]'" in capsys.readouterr().err


def test_an_open_loop_sends_at_its_rate(tmp_path: Path) -> None:
    with listening(ok) as server:
        assert 0 == load(server.port, "--seconds", 0.3, "--rate", 100, "--json", tmp_path / "a.json", command="open")
    [made] = json.loads((tmp_path / "a.json").read_text())["runs"]

    assert (30, True) == (made["requests"], made["open_loop"])


@pytest.fixture(name="in_time")
def generator_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the check for a late generator, so that a busy machine cannot fail a test."""
    monkeypatch.setattr(measurement, "MAX_LATENESS_MS", 1e9)


def sweep(folder: Path, *given: object) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the report of a sweep against a server that answers immediately."""
    with listening(ok) as server:
        code = load(server.port, "--seconds", 0.15, *given, "--json", folder / "a.json", command="sweep")
    return code, json.loads((folder / "a.json").read_text())


@pytest.mark.usefixtures("in_time")
def test_a_sweep_finds_the_highest_rate_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If all rates hold, the result is a lower bound. If no rate holds within the allowed steps, the exit code is 1."""
    code, document = sweep(tmp_path, "--slo", "p99_ms=10000", "--max-rate", 40)
    assert (0, 40.0, None) == (code, document["figures"]["max_rate"], document["figures"]["lowest_rate_not_held"])
    assert ["open, 40/s", "open, 40/s, confirmation"] == [made["name"] for made in document["runs"]]

    code, missed = sweep(tmp_path, "--slo", "p99_ms=0.0001", "--steps", 2, "--max-rate", 40)
    assert (1, None, 20.0) == (code, missed["figures"]["max_rate"], missed["figures"]["lowest_rate_not_held"])
    assert ["open, 40/s", "open, 20/s"] == [made["name"] for made in missed["runs"]]
    assert 1 == capsys.readouterr().out.count("higher rates may hold too")


def test_ctrl_c_prints_partial_results(capsys: pytest.CaptureFixture[str]) -> None:
    """After the first SIGINT, the command prints the metrics so far and exits with 130."""

    async def interrupt(i: int) -> bytes:
        if i == 100:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return OK

    with listening(interrupt) as server:
        assert 130 == load(server.port, "--seconds", 60)
    out = capsys.readouterr().out

    assert "requests/s" in out
    assert "interrupted" in out
