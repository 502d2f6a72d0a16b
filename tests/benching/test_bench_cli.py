"""The bert-bench command against a small server: exit codes, reports and flags."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bertserve.bench import cli, flags, load_test
from bertserve.bench.errors import MissingExtraError
from bertserve.bench.load import generator
from bertserve.bench.report import html as html_report
from bertserve.bench.report import measurement, report, slo
from listening import BUSY, OK, listening, ok, unused_port

ROOT = Path(__file__).parent.parent.parent
# a report of bert-bench 0.1.0, in which `tail-latency` was called `tail`
EARLIER_REPORT = Path(__file__).parent / "report_of_0_1_0.json"


def run(*given: object) -> int:
    return cli.main([str(flag) for flag in given])


def load(port: int, *given: object, command: str = "closed") -> int:
    """Returns the exit code of a short load on loopback. It has no warm-up, so that a slow machine also measures requests."""
    return run(command, "--target", f"http://127.0.0.1:{port}/classify=short", "--seconds", 0.05, "--warmup-s", 0, "--quiet", *given)


@pytest.fixture(autouse=True)
def arrivals_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends all requests of an open loop at its start, so that a stalled machine cannot miss any."""
    monkeypatch.setattr(load_test, "poisson_arrivals", lambda rate, seconds, *, seed: [0.0] * round(rate * seconds))


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
    target = document["runs"][0]["targets"][0]

    assert 0 == written.code
    assert "closed, 16 connections" in written.stdout
    assert "" == written.stderr
    assert "closed" == document["command"]
    assert target["requests"] == target["statuses"]["200"]
    assert [{"condition": "error_rate <= 0", "measured": 0.0, "passed": True}] == document["verdicts"]


def test_the_html_report_is_self_contained(written: Written) -> None:
    """The page has five plots with unique ids, and loads nothing from outside."""
    ids = re.findall(r' id="([^"]+)"', written.html)

    assert 5 == written.html.count("<svg")
    assert sorted(set(ids)) == sorted(ids)
    assert [] == re.findall(r"<(?:script|link|img)|@import|url\((?!#)", written.html)
    assert "@media (max-width: 900px)" in written.html, "on a phone each row of the table is a list"
    assert [] == re.findall(r"min-width|[^-]width: \d{3,}px", written.html.partition("</style>")[0])


def test_secrets_do_not_appear_in_reports_or_output(written: Written) -> None:
    assert "x-token" in written.json
    assert "secret" not in written.json + written.html + written.stdout


def test_a_report_survives_a_json_round_trip() -> None:
    """The document has only values that JSON can represent."""
    made = report.BenchReport("closed", {"html": None, "texts": 1}, figures={"ratio": 0.5})

    assert made.document() == json.loads(json.dumps(made.document(), allow_nan=False))
    assert {"ratio": 0.5} == made.document()["figures"]


def test_an_empty_report_renders_as_a_page() -> None:
    assert 5 == html_report.render_page([report.BenchReport("closed", {}).document()]).count("nothing was measured")


def test_the_report_command_puts_several_files_on_one_page(written: Written, tmp_path: Path) -> None:
    """`report` also reads a file of bert-bench 0.1.0, in which commands had older names."""
    (tmp_path / "a.json").write_text(written.json, encoding="utf-8")

    assert 0 == run("report", tmp_path / "a.json", EARLIER_REPORT, "--html", tmp_path / "all.html")
    page = (tmp_path / "all.html").read_text(encoding="utf-8")
    runs = ["closed, 16 connections", "round 1 maximum, 2 connections", "round 1 open, 732/s"]
    assert [1, 1, 1] == [page.count(f'<td data-name="run">{name}</td>') for name in runs]
    assert "passed: queue_ratio &lt;= 1000, measured 1.89" in page
    assert 5 == page.count("<svg")
    assert "nothing was measured" not in page


def test_the_page_sorts_open_loops_by_rate(written: Written) -> None:
    """Open loops follow the closed loops, in ascending order of rate. Each has an offered and an answered rate."""
    document = json.loads(written.json)
    (closed,) = document["runs"]
    closed["generator"]["warnings"] = []
    (target,) = closed["targets"]
    late = closed["generator"] | {"late_p99_ms": 0.1, "warnings": ["late"]}
    rates = {rate: target | {"requests": rate, "seconds": 1.0, "rps": rate / 2} for rate in (300, 100, 200)}
    opened = [closed | {"name": f"open {rate}", "generator": late, "targets": [made]} for rate, made in rates.items()]
    page = html_report.render_page([document | {"runs": [*opened, closed]}])

    assert [closed["name"], "open 100", "open 200", "open 300"] == re.findall(r'<tr><td data-name="run">([^<]*)</td>', page)
    assert '<td data-name="offered/s">300</td><td data-name="answered/s">150</td>' in page
    assert ["3 of 4 runs"] == re.findall(r'"warnings"><summary>[^<]*(\d of \d runs)[^<]*<', page)
    assert "<li>open 100: late</li><li>open 200: late</li><li>open 300: late</li>" in page
    assert f": open 300, open 100, open 200, {closed['name']}</summary>" in page


def test_json_on_stdout_replaces_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json -` prints only JSON."""
    with listening(ok) as server:
        assert 0 == load(server.port, "--json", "-")

    assert "closed" == json.loads(capsys.readouterr().out)["command"]


def test_a_missed_objective_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(ok) as server:
        assert 1 == load(server.port, "--slo", "p99_ms=0.0001")
    assert "MISSED: p99_ms <= 0.0001" in capsys.readouterr().out


def test_a_load_with_errors_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By default, an error rate over 1 % is a miss, in red on a terminal and in the HTML report. `--slo` replaces this default."""

    async def sometimes(index: int) -> bytes:
        return BUSY if index % 4 == 3 else OK

    with listening(sometimes) as server:
        assert 1 == load(server.port, "--html", tmp_path / "a.html")
        [line] = [line for line in capsys.readouterr().out.splitlines() if "MISSED" in line]
        assert line.startswith("MISSED: error_rate <= 0.01, measured 0.2")
        assert '<p class="missed">closed: ' in (tmp_path / "a.html").read_text()
        assert 0 == load(server.port, "--slo", "error_rate=0.5")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert 1 == load(server.port)
        assert "\x1b[31mMISSED: error_rate <= 0.01, measured " in capsys.readouterr().out


def test_the_page_states_the_result_of_a_sweep(written: Written) -> None:
    """A sentence states the highest rate, and a plot shows the objective. Runs at nearly the same rate become one point."""
    document = json.loads(written.json)
    (closed,) = document["runs"]
    (target,) = closed["targets"]
    opened = [
        closed
        | {"name": f"open {rate}", "generator": closed["generator"] | {"late_p99_ms": 0.1}}
        | {"targets": [target | {"requests": rate, "seconds": 1.0, "latency": target["latency"] | {"p99_ms": p99}}]}
        for rate, p99 in ((100, 30.0), (101, 10.0), (200, 70.0))
    ]
    verdicts = [{"condition": text, "measured": 0.0, "passed": True} for text in ("p99_ms <= 50", "error_rate <= 0.01", "rps >= 5")]
    made = document | {"command": "sweep", "runs": opened, "figures": {"max_rate": 41.23}, "verdicts": verdicts}
    page = html_report.render_page([made])

    assert '<p class="passed">sweep: holds p99 &lt;= 50 ms and error rate &lt;= 1 % up to 41.23 requests/s</p>' in page
    assert "target: p99 &lt;= 50 ms" in page
    assert page.count('<td data-name="p99 ms">') == 3
    missed = made | {"figures": {"max_rate": None}, "verdicts": [verdicts[0] | {"passed": False}]}
    assert '<p class="missed">sweep: does not hold p99 &lt;= 50 ms ' in html_report.render_page([missed])
    assert [(1.0, ["a", "b"]), (2.0, ["c"])] == html_report._merged([(2.0, "c"), (1.0, "a"), (1.02, "b")])


def test_a_load_with_only_503_responses_exits_with_1() -> None:
    async def busy(_: int) -> bytes:
        return BUSY

    with listening(busy) as server:
        assert 1 == load(server.port)


def test_requests_after_a_server_exit_count_as_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are counted by kind. The report also has the requests from before the exit."""

    async def until_a_connection_is_refused(run: Any, *_: float) -> None:
        async with asyncio.timeout(20):
            while not any(record.outcome == "refused" for stream in run._streams for record in stream.records):
                await asyncio.sleep(0.01)

    monkeypatch.setattr(generator._LoadRun, "_wait_until", until_a_connection_is_refused)
    leave: list[Callable[[], None]] = []

    async def leave_late(i: int) -> bytes | None:
        if i == 50:
            leave[0]()
        return OK

    with listening(leave_late) as server:
        leave.append(server.over.set)
        assert 1 == load(server.port, "--seconds", 60, "--slo", "error_rate=0", "--json", tmp_path / "a.json")
    target = report.read(tmp_path / "a.json")["runs"][0]["targets"][0]

    assert target["statuses"]["200"] >= 30
    assert {"refused"} <= set(target["errors"]) <= {"closed", "refused", "unreachable"}


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
    "wrong",
    [
        ["closed", "--target", "localhost=short"],
        ["closed", "--target", "http://127.0.0.1:1/x", "--header", "nonsense"],
        ["closed", "--slo", "p99=1"],
        ["concurrent-targets", "--target", "http://127.0.0.1:1/x"],
        ["engine-limit", "--bundle", "no-such-bundle"],
        ["report", "no-such-file.json", "--html", "x.html"],
        ["closed", "--api-key-file", "no-such-file"],
    ],
)
def test_invalid_usage_exits_with_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == run(*wrong)
    assert re.fullmatch(r"bert-bench: .+\n", capsys.readouterr().err)


@pytest.mark.parametrize("wrong", [["open"], ["compare"], ["closed", "--seconds", "0"], ["closed", "--connections", "1.5"], ["x"], []])
def test_invalid_flags_exit_with_2(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*wrong)


def test_plots_without_matplotlib_exit_with_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(html_report, "find_spec", lambda name: None)

    assert 3 == load(unused_port(), "--html", tmp_path / "a.html")
    assert "[bench]'" in capsys.readouterr().err
    with pytest.raises(MissingExtraError):
        html_report.draw_plots([])


def test_an_open_loop_sends_at_its_rate(tmp_path: Path) -> None:
    with listening(ok) as server:
        assert 0 == load(server.port, "--seconds", 0.3, "--rate", 100, "--json", tmp_path / "a.json", command="open")
    made = report.read(tmp_path / "a.json")["runs"][0]

    assert 30 == made["targets"][0]["requests"]
    assert made["generator"]["late_p99_ms"] is not None


@pytest.fixture(name="in_time")
def generator_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the check for a late generator, so that a busy machine cannot fail a test."""
    monkeypatch.setattr(measurement, "MAX_LATENESS_MS", 1e9)


def sweep(folder: Path, *given: object) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the report of a sweep against a server that answers immediately."""
    with listening(ok) as server:
        code = load(server.port, "--seconds", 0.15, *given, "--json", folder / "a.json", command="sweep")
    return code, report.read(folder / "a.json")


@pytest.mark.usefixtures("in_time")
def test_a_sweep_finds_the_highest_rate_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If all rates hold, the result is a lower bound. If no rate holds within the allowed steps, the exit code is 1."""
    code, document = sweep(tmp_path, "--slo", "p99_ms=10000", "--max-rate", 40)
    assert (0, {"max_rate": 40.0}, True) == (code, document["figures"], document["is_lower_bound"])
    assert ["p99_ms <= 10000", "error_rate <= 0.01"] == [verdict["condition"] for verdict in document["verdicts"]]

    code, missed = sweep(tmp_path, "--slo", "p99_ms=0.0001", "--steps", 2, "--max-rate", 40)
    assert (1, {"max_rate": None}, False) == (code, missed["figures"], missed["is_lower_bound"])
    assert ["open, 40/s", "open, 20/s"] == [made["name"] for made in missed["runs"]]

    printed = capsys.readouterr().out
    assert 1 == printed.count("higher ones may")
    assert "p99 <= 10000 ms and error rate <= 1 % up to 40 requests/s\n" in printed


@pytest.mark.usefixtures("in_time")
def test_a_sweep_uses_default_objectives_only_without_the_slo_flag(tmp_path: Path) -> None:
    given = ("--max-rate", 40, "--steps", 1)
    conditions = [
        [verdict["condition"] for verdict in sweep(tmp_path, *given, *slos)[1]["verdicts"]]
        for slos in ((), ("--slo", "p90_ms=9000,error_rate=0.5"))
    ]

    assert [["p99_ms <= 50", "error_rate <= 0.01"], ["p90_ms <= 9000", "error_rate <= 0.5"]] == conditions


def test_a_sweep_whose_generator_is_late_is_inconclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step runs twice. The exit code is 4, the report has no rate, and no objective passes."""
    monkeypatch.setattr(measurement, "MAX_LATENESS_MS", -1.0)
    code, document = sweep(tmp_path, "--slo", "p99_ms=10000", "--steps", 2, "--max-rate", 40)

    assert 4 == code
    assert {"max_rate": None} == document["figures"]
    assert ["open, 40/s", "open, 40/s", "open, 20/s", "open, 20/s"] == [made["name"] for made in document["runs"]]
    assert (["open, 40/s", "open, 20/s"], []) == (document["inconclusive"], document["verdicts"])
    printed = capsys.readouterr().out
    assert "inconclusive: open, 40/s, open, 20/s: " in printed
    assert "passed" not in printed


def test_a_sweep_continues_after_one_late_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = iter([True, False])
    monkeypatch.setattr(measurement.GeneratorStats, "was_late", property(lambda _: next(late, False)))
    code, document = sweep(tmp_path, "--slo", "p99_ms=10000", "--max-rate", 40)

    assert (0, 40.0, []) == (code, document["figures"]["max_rate"], document["inconclusive"])


def test_a_sweep_that_is_late_at_the_top_rate_reports_a_lower_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the highest rate that held. The exit code 4 means that a higher rate may also hold."""
    late = iter([True, True, True])  # read after the first run at 40/s, by the search, and after the first run at 20/s
    monkeypatch.setattr(measurement.GeneratorStats, "was_late", property(lambda _: next(late, False)))
    code, document = sweep(tmp_path, "--slo", "p99_ms=10000", "--steps", 2, "--max-rate", 40)

    assert (4, 20.0, ["open, 40/s"]) == (code, document["figures"]["max_rate"], document["inconclusive"])
    assert [True, True] == [verdict["passed"] for verdict in document["verdicts"]]


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


def test_every_flag_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/reference/bench-flags.md names each command, each flag and each metric."""
    text = (ROOT / "docs/reference/bench-flags.md").read_text(encoding="utf-8")
    for command in flags.COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            run(command, "--help")
    shown = set(re.findall(r"(?<![\w-])--[a-z-]+", capsys.readouterr().out))

    assert set() == {flag for flag in shown - {"--help"} if not re.search(f"`{flag}[` ]", text)}
    assert [] == [metric for metric in slo.METRICS if f"`{metric}`" not in text]
    assert [] == [command for command in flags.COMMANDS if f"| `{command}` |" not in text]


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("closed", "--secnds", "2"), "did you mean --seconds?"),
        (("clsed",), "did you mean closed?"),
    ],
)
def test_an_unknown_flag_or_command_gets_a_hint(command: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command)
    assert 2 == caught.value.code
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(hint)
