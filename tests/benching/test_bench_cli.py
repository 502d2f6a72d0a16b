"""bert-bench as a command, against a small server: exit codes, reports, flags."""

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
# a file that bert-bench 0.1.0 wrote, when `tail-latency` was called `tail`
EARLIER_REPORT = Path(__file__).parent / "report_of_0_1_0.json"


def run(*given: object) -> int:
    return cli.main([str(flag) for flag in given])


def load(port: int, *given: object, command: str = "closed") -> int:
    """Runs a short load on loopback; its first requests are sent at once, so that a slow machine has some too."""
    return run(command, "--target", f"http://127.0.0.1:{port}/classify=short", "--seconds", 0.05, "--warmup-s", 0, "--quiet", *given)


@pytest.fixture(autouse=True)
def arrivals_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open loop sends all its requests at its start: a machine that stands still later must not leave some out."""
    monkeypatch.setattr(load_test, "poisson_arrivals", lambda rate, seconds, *, seed: [0.0] * round(rate * seconds))


class Written(NamedTuple):
    """What a closed loop wrote."""

    code: int
    stdout: str
    stderr: str
    json: str
    html: str


@pytest.fixture(name="written", scope="module")
def written_by_a_closed_loop(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A closed loop with an objective, a header and a key, and both kinds of report."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "key").write_text("secret-1\n")
    out, err = io.StringIO(), io.StringIO()
    secrets = ("--header", "x-token: secret-2", "--api-key-file", folder / "key")
    with listening(ok) as server, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = load(server.port, "--json", folder / "a.json", "--html", folder / "a.html", "--slo", "error_rate=0", *secrets)
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("a.json", "a.html")]
    return Written(code, out.getvalue(), err.getvalue(), *texts)


def test_a_load_reports_and_exits_with_0(written: Written) -> None:
    document = json.loads(written.json)
    target = document["runs"][0]["targets"][0]

    assert 0 == written.code
    assert "closed, 16 connections" in written.stdout
    assert "" == written.stderr
    assert "closed" == document["command"]
    assert target["requests"] == target["statuses"]["200"]
    assert [{"condition": "error_rate <= 0", "measured": 0.0, "passed": True}] == document["verdicts"]


def test_a_page_stands_alone(written: Written) -> None:
    """The HTML report has five plots without clashing ids, and refers to nothing outside itself."""
    ids = re.findall(r' id="([^"]+)"', written.html)

    assert 5 == written.html.count("<svg")
    assert sorted(set(ids)) == sorted(ids)
    assert [] == re.findall(r"<(?:script|link|img)|@import|url\((?!#)", written.html)
    assert "@media (max-width: 900px)" in written.html, "on a phone each row of the table is a list"
    assert [] == re.findall(r"min-width|[^-]width: \d{3,}px", written.html.partition("</style>")[0])


def test_keys_stay_out_of_the_report(written: Written) -> None:
    assert "x-token" in written.json
    assert "secret" not in written.json + written.html + written.stdout


def test_a_report_survives_json() -> None:
    """What is written is what is read, and holds no value that JSON does not have."""
    made = report.BenchReport("closed", {"html": None, "texts": 1}, figures={"ratio": 0.5})

    assert made.document() == json.loads(json.dumps(made.document(), allow_nan=False))
    assert {"ratio": 0.5} == made.document()["figures"]


def test_an_empty_report_has_a_page() -> None:
    assert 5 == html_report.render_page([report.BenchReport("closed", {}).document()]).count("nothing was measured")


def test_reports_are_drawn_together(written: Written, tmp_path: Path) -> None:
    """`report` puts the runs of several files on one page, also of a file from before the commands had their present names."""
    (tmp_path / "a.json").write_text(written.json, encoding="utf-8")

    assert 0 == run("report", tmp_path / "a.json", EARLIER_REPORT, "--html", tmp_path / "all.html")
    page = (tmp_path / "all.html").read_text(encoding="utf-8")
    runs = ["closed, 16 connections", "round 1 maximum, 2 connections", "round 1 open, 732/s"]
    assert [1, 1, 1] == [page.count(f'<td data-name="run">{name}</td>') for name in runs]
    assert "passed: queue_ratio &lt;= 1000, measured 1.89" in page
    assert 5 == page.count("<svg")
    assert "nothing was measured" not in page


def test_open_loops_stand_by_their_rates(written: Written) -> None:
    """They stand after the closed ones, in ascending order of rate; each has the offered and the answered rate."""
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


def test_the_report_can_take_the_place_of_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json -` prints JSON and nothing else."""
    with listening(ok) as server:
        assert 0 == load(server.port, "--json", "-")

    assert "closed" == json.loads(capsys.readouterr().out)["command"]


def test_a_missed_target_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(ok) as server:
        assert 1 == load(server.port, "--slo", "p99_ms=0.0001")
    assert "MISSED: p99_ms <= 0.0001" in capsys.readouterr().out


def test_a_load_with_errors_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """More than one request in a hundred: the line is red on a terminal, and the page says it first. A given objective takes its place."""

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


def test_a_page_says_what_a_sweep_found(written: Written) -> None:
    """In a sentence, with the target in the plot; several runs at a rate are one point of its curve. Each cell of the table has its name."""
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


def test_a_service_that_answers_nothing_exits_with_1() -> None:
    """A load that gets only 503 has an error instead of a result, with and without an objective."""

    async def busy(_: int) -> bytes:
        return BUSY

    with listening(busy) as server:
        assert 1 == load(server.port)


def test_a_server_that_leaves_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests after the server has gone are errors by kind, and what was measured before is reported."""

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


def test_nobody_there_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == load(unused_port())
    assert re.fullmatch(r"bert-bench: nothing listens at http://127\.0\.0\.1:\d+/classify; .*\n", capsys.readouterr().err)


def test_a_refused_request_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A path that does not exist cannot be loaded; the service's own message is shown."""

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
def test_wrong_usage_exits_with_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == run(*wrong)
    assert re.fullmatch(r"bert-bench: .+\n", capsys.readouterr().err)


@pytest.mark.parametrize("wrong", [["open"], ["compare"], ["closed", "--seconds", "0"], ["closed", "--connections", "1.5"], ["x"], []])
def test_wrong_flags_exit_with_2(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*wrong)


def test_plots_without_matplotlib_exit_with_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(html_report, "find_spec", lambda name: None)

    assert 3 == load(unused_port(), "--html", tmp_path / "a.html")
    assert "pip install 'matplotlib<" in capsys.readouterr().err
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
    """However busy the machine of the tests is, the generator counts as being in time."""
    monkeypatch.setattr(measurement, "MAX_LATENESS_MS", 1e9)


def sweep(folder: Path, *given: object) -> tuple[int, dict[str, Any]]:
    """Runs a sweep against a server that answers at once; returns the exit code and the report."""
    with listening(ok) as server:
        code = load(server.port, "--seconds", 0.15, *given, "--json", folder / "a.json", command="sweep")
    return code, report.read(folder / "a.json")


@pytest.mark.usefixtures("in_time")
def test_a_sweep_finds_the_top_rate_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where all rates hold, summary and report say that higher ones may too; where none holds, the exit code is 1 after the allowed steps."""
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
def test_a_sweep_has_a_target_of_its_own_only_where_none_is_given(tmp_path: Path) -> None:
    given = ("--max-rate", 40, "--steps", 1)
    conditions = [
        [verdict["condition"] for verdict in sweep(tmp_path, *given, *slos)[1]["verdicts"]]
        for slos in ((), ("--slo", "p90_ms=9000,error_rate=0.5"))
    ]

    assert [["p99_ms <= 50", "error_rate <= 0.01"], ["p90_ms <= 9000", "error_rate <= 0.5"]] == conditions


def test_a_sweep_whose_generator_is_late_is_inconclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step is repeated once; the exit code is another than that of a miss, no rate is taken, and nothing is called passed."""
    monkeypatch.setattr(measurement, "MAX_LATENESS_MS", -1.0)
    code, document = sweep(tmp_path, "--slo", "p99_ms=10000", "--steps", 2, "--max-rate", 40)

    assert 4 == code
    assert {"max_rate": None} == document["figures"]
    assert ["open, 40/s", "open, 40/s", "open, 20/s", "open, 20/s"] == [made["name"] for made in document["runs"]]
    assert (["open, 40/s", "open, 20/s"], []) == (document["inconclusive"], document["verdicts"])
    printed = capsys.readouterr().out
    assert "inconclusive: open, 40/s, open, 20/s: " in printed
    assert "passed" not in printed


def test_a_sweep_that_is_late_once_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = iter([True, False])
    monkeypatch.setattr(measurement.GeneratorStats, "was_late", property(lambda _: next(late, False)))
    code, document = sweep(tmp_path, "--slo", "p99_ms=10000", "--max-rate", 40)

    assert (0, 40.0, []) == (code, document["figures"]["max_rate"], document["inconclusive"])


def test_a_sweep_that_is_late_at_the_top_has_a_lower_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that held is reported, and the exit code says that a higher one may too."""
    late = iter([True, True, True])  # the first try, the second, and what the search sees of that
    monkeypatch.setattr(measurement.GeneratorStats, "was_late", property(lambda _: next(late, False)))
    code, document = sweep(tmp_path, "--slo", "p99_ms=10000", "--steps", 2, "--max-rate", 40)

    assert (4, 20.0, ["open, 40/s"]) == (code, document["figures"]["max_rate"], document["inconclusive"])
    assert [True, True] == [verdict["passed"] for verdict in document["verdicts"]]


def test_ctrl_c_prints_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The first SIGINT ends the command with 130 and the metrics of what was measured."""

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
        (("together",), "called concurrent-targets now."),
        (("engine-limit", "--mix", "short"), "called --workload now."),
    ],
)
def test_an_unknown_flag_or_command_gets_a_hint(command: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command)
    assert 2 == caught.value.code
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(hint)
