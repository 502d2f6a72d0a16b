"""bert-bench as a command: exit codes, the report, and one run of everything against a real small service."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import onnx
import pytest

import tiny
from bench import cli, flags
from bench.engine.bare_engine import BareEngine
from bench.errors import BenchError, MissingExtraError
from bench.load.arrivals import poisson_arrivals
from bench.report import html as html_report
from bench.report import plots, report, slo
from bench.workload import bodies
from conftest import Served
from listening import BUSY, OK, listening, ok
from test_load import unused_port

Serve = Callable[..., AbstractContextManager[Served]]
ROOT = Path(__file__).parent.parent.parent


def run(*given: object) -> int:
    """Runs the command without a process; returns its exit code."""
    return cli.main([str(flag) for flag in given])


def load(port: int, *given: object, command: str = "closed") -> int:
    """Runs a short load on loopback."""
    return run(command, "--target", f"http://127.0.0.1:{port}/classify=short", "--seconds", 0.3, "--warmup-s", 0, "--quiet", *given)


def test_a_load_reports_and_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results on stdout, the report as JSON and as a page with four plots."""
    with listening(ok) as server:
        assert 0 == load(server.port, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html", "--slo", "error_rate=0")
    printed = capsys.readouterr()
    document = report.read(tmp_path / "a.json")
    html = (tmp_path / "a.html").read_text(encoding="utf-8")

    assert "closed, 16 connections" in printed.out
    assert "" == printed.err
    assert ["closed"] == [document["command"]]
    assert document["runs"][0]["targets"][0]["requests"] == document["runs"][0]["targets"][0]["statuses"]["200"]
    assert [{"condition": "error_rate <= 0", "measured": 0.0, "passed": True}] == document["verdicts"]
    ids = re.findall(r' id="([^"]+)"', html)
    assert 4 == html.count("<svg")
    assert sorted(set(ids)) == sorted(ids)
    assert [] == re.findall(r"<(?:script|link|img)|@import|url\((?!#)", html)


def test_a_report_survives_json() -> None:
    """What is written is what is read, and holds no value that JSON has not."""
    made = report.Report("closed", {"html": None, "texts": 1}, figures={"ratio": 0.5})

    assert made.document() == json.loads(json.dumps(made.document(), allow_nan=False))
    assert {"ratio": 0.5} == made.document()["figures"]


def test_an_empty_report_has_a_page() -> None:
    """Plots of nothing say so."""
    assert 4 == html_report.render_page([report.Report("closed", {}).document()]).count("nothing was measured")


def test_a_missed_target_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """And says which."""
    with listening(ok) as server:
        assert 1 == load(server.port, "--slo", "p99_ms=0.0001")
    assert "MISSED: p99_ms <= 0.0001" in capsys.readouterr().out


def test_a_service_that_answers_nothing_exits_with_1() -> None:
    """Only 503 is no result, target or not."""

    async def busy(_: int) -> bytes:
        return BUSY

    with listening(busy) as server:
        assert 1 == load(server.port)


def test_a_server_that_leaves_is_counted(tmp_path: Path) -> None:
    """Requests that nobody takes any more are errors by kind, and what was measured before is reported."""
    leave: list[Callable[[], None]] = []

    async def leave_late(i: int) -> bytes | None:
        if i == 50:
            leave[0]()
        return OK

    with listening(leave_late) as server:
        leave.append(server.over.set)
        assert 1 == load(server.port, "--slo", "error_rate=0", "--json", tmp_path / "a.json")
    target = report.read(tmp_path / "a.json")["runs"][0]["targets"][0]

    assert target["statuses"]["200"] >= 30
    assert {"refused"} <= set(target["errors"]) <= {"closed", "refused", "unreachable"}


def test_nobody_there_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """In one sentence."""
    assert 2 == load(unused_port())
    assert re.fullmatch(r"bert-bench: nothing listens at http://127\.0\.0\.1:\d+/classify; .*\n", capsys.readouterr().err)


def test_a_refused_request_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A path that does not exist is no load; the service's own words are shown."""

    async def missing(_: int) -> bytes:
        body = b'{"error": "there is no path"}'
        return b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    with listening(missing) as server:
        assert 2 == load(server.port)
    assert "answered 404 to a first request: there is no path" in capsys.readouterr().err


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
    """One sentence, no traceback."""
    assert 2 == run(*wrong)
    assert re.fullmatch(r"bert-bench: .+\n", capsys.readouterr().err)


@pytest.mark.parametrize("wrong", [["open"], ["compare"], ["closed", "--seconds", "0"], ["closed", "--connections", "1.5"], ["x"], []])
def test_wrong_givenexit_with_2(wrong: list[str]) -> None:
    """As argparse does."""
    with pytest.raises(SystemExit, match="2"):
        run(*wrong)


def test_plots_without_matplotlib_exit_with_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded, and naming the extra."""
    monkeypatch.setattr(plots, "find_spec", lambda name: None)

    assert 3 == load(unused_port(), "--html", tmp_path / "a.html")
    assert "pip install 'bertserve[bench]'" in capsys.readouterr().err
    with pytest.raises(MissingExtraError):
        plots.draw_plots([])


def test_keys_stay_out_of_the_report(tmp_path: Path) -> None:
    """Of headers only their names are written, of the key only its file."""
    (tmp_path / "key").write_text("secret-1\n")
    with listening(ok) as server:
        load(server.port, "--header", "x-token: secret-2", "--api-key-file", tmp_path / "key", "--json", tmp_path / "a.json")
    written = (tmp_path / "a.json").read_text()

    assert "x-token" in written
    assert "secret" not in written


def test_an_open_loop_sends_at_its_rate(tmp_path: Path) -> None:
    """The requests of a run are those of the schedule, whatever the service does."""
    with listening(ok) as server:
        assert 0 == load(server.port, "--rate", 100, "--json", tmp_path / "a.json", command="open")
    made = report.read(tmp_path / "a.json")["runs"][0]

    assert len(poisson_arrivals(100, 0.3, seed=0)) == made["targets"][0]["requests"]
    assert made["generator"]["late_p99_ms"] is not None


def test_a_sweep_finds_no_rate_where_none_holds(tmp_path: Path) -> None:
    """An impossible target exits with 1, after as many steps as were allowed."""
    with listening(ok) as server:
        code = load(server.port, "--slo", "p99_ms=0.0001", "--steps", 2, "--max-rate", 40, "--json", tmp_path / "a.json", command="sweep")
    document = report.read(tmp_path / "a.json")

    assert 1 == code
    assert {"max_rate": None} == document["figures"]
    assert ["open, 40/s", "open, 20/s"] == [made["name"] for made in document["runs"]]


def test_a_sweep_has_a_target_of_its_own_only_where_none_is_given(tmp_path: Path) -> None:
    """A given target takes the place of the default one."""
    given = ("--max-rate", 20, "--steps", 1, "--json", tmp_path / "a.json")
    with listening(ok) as server:
        load(server.port, *given, command="sweep")
        assert ["p99_ms <= 50", "error_rate <= 0.01"] == [v["condition"] for v in report.read(tmp_path / "a.json")["verdicts"]]
        load(server.port, *given, "--slo", "p90_ms=9000,error_rate=0.5", command="sweep")
        assert ["p90_ms <= 9000", "error_rate <= 0.5"] == [v["condition"] for v in report.read(tmp_path / "a.json")["verdicts"]]


def test_a_sweep_takes_the_top_where_all_hold(tmp_path: Path) -> None:
    """A target that every rate keeps needs one step."""
    with listening(ok) as server:
        code = load(server.port, "--slo", "p99_ms=10000", "--max-rate", 40, "--json", tmp_path / "a.json", command="sweep")
    document = report.read(tmp_path / "a.json")

    assert 0 == code
    assert {"max_rate": 40.0} == document["figures"]


def test_reports_are_drawn_together(tmp_path: Path) -> None:
    """`report` puts the runs of several files on one page."""
    with listening(ok) as server:
        for name in ("a", "b"):
            load(server.port, "--rate", 50, "--json", tmp_path / f"{name}.json", command="open")

    assert 0 == run("report", tmp_path / "a.json", tmp_path / "b.json", "--html", tmp_path / "all.html")
    assert 2 == (tmp_path / "all.html").read_text().count("<td>open, 50/s</td>")


def structure(value: Any) -> Any:
    """Returns the keys of nested JSON objects, of the first element of each list; not those that are data."""
    if isinstance(value, dict):
        return {key: None if key in ("rows", "statuses", "errors") else structure(item) for key, item in value.items()}
    return [structure(item) for item in value[:1] if isinstance(item, dict)] if isinstance(value, list) else None


def test_a_report_of_the_first_version_is_still_drawn(tmp_path: Path) -> None:
    """A JSON file from before the commands had their present names has a page with its figures, objectives and plots."""
    assert 0 == run("report", Path(__file__).parent / "report_of_0_1_0.json", "--html", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")

    assert "<td>round 1 maximum, 2 connections</td>" in page
    assert "passed: queue_ratio &lt;= 1000, measured 1.89" in page
    assert 4 == page.count("<svg")
    assert 0 == page.count("nothing was measured")


@pytest.mark.parametrize("name", flags.ALIASES)
def test_earlier_names_of_commands_are_the_same_commands(name: str) -> None:
    """`tail` is `tail-latency`: it has the same flags and the same name in a report."""
    parse = flags.build_parser().parse_args
    given = ["--bundle", "b"] if name != "concurrent-targets" else []

    assert name == parse([flags.ALIASES[name], *given]).command
    assert parse([name, *given]) == parse([flags.ALIASES[name], *given])


def test_the_limit_needs_no_service(models: Path, tmp_path: Path) -> None:
    """It runs a bundle's graph alone, on texts or on the caller's file."""
    (tmp_path / "texts.jsonl").write_text('"a good film"\n"a bad film , not good"\n')
    given = ("--mix", tmp_path / "texts.jsonl", "--seconds", 0.2, "--json", tmp_path / "a.json", "--quiet")

    assert 0 == run("engine-limit", "--bundle", models / "tiny", "--slo", "rps=1", *given)
    document = report.read(tmp_path / "a.json")
    assert "model.cpu.fp32.onnx" == document["engine"]["graph"]
    assert 2 == len(document["limits"][0]["feed_s"])


def test_the_bare_loop_feeds_what_a_graph_declares(tmp_path: Path) -> None:
    """Of a question about a passage each window is a run; another graph of the model takes the same tokens by its own inputs."""
    path = tiny.bundle(tmp_path, "qa", task="question-answering", max_length=32)
    file = tmp_path / "other.onnx"
    other = tiny.graph("question-answering")
    for i, given in enumerate(list(other.graph.input)):
        if given.name == "token_type_ids":
            del other.graph.input[i]
            other.graph.node.insert(0, onnx.helper.make_node("Sub", ["input_ids", "input_ids"], ["token_type_ids"]))
    onnx.save(other, str(file))
    body = bodies.Body(json.dumps({"inputs": {"question": "good ?", "context": "a good film " * 30}}).encode(), 1)
    bare = BareEngine(path, file)
    work = bare.encode([body])
    done = bare.run_loop(work, threads=2, seconds=0.1, stop=threading.Event())

    assert ["attention_mask", "input_ids"] == sorted(work.feeds[0][0])
    assert len(work.feeds[0]) == len(done.feed_s[0]) > 1
    assert [feed["input_ids"].shape[1] for feed in work.feeds[0]] == list(work.lengths[0])


def test_a_graph_that_cannot_be_fed_is_refused(models: Path, tmp_path: Path) -> None:
    """An input that no tokenizer fills is named."""
    made = tiny.graph()
    made.graph.input.append(onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, [1]))
    onnx.save(made, str(tmp_path / "odd.onnx"))

    with pytest.raises(BenchError, match="pixels"):
        BareEngine(models / "tiny", tmp_path / "odd.onnx")


def test_every_command_against_a_real_service(tmp_path: Path, serve: Serve) -> None:
    """Loads, comparisons, the ideal queue and two models at once, of tiny bundles that are served for real."""
    models = tmp_path / "models"
    tiny.bundle(models, "tiny", max_length=64)
    tiny.bundle(models, "names", task="token-classification", max_length=64)
    (tmp_path / "texts.jsonl").write_text('"a good film"\n"a bad film , not good"\n')
    mix = f"={tmp_path / 'texts.jsonl'}"
    documents: dict[str, dict[str, Any]] = {}
    with serve(models) as served:
        short = ("--seconds", 0.3, "--warmup-s", 0.1, "--quiet", "--target", f"{served.url}/classify{mix}", "--connections", 2)
        bare = ("--bundle", models / "tiny")
        for command, given in {
            "closed": (*short, *bare),
            "compare": (*short, *bare, "--texts", 32, "--rounds", 2),
            "tail-latency": (*short, *bare),
            "concurrent-targets": (*short, "--target", f"{served.url}/ner{mix}", "--rounds", 1),
        }.items():
            assert 0 == run(command, *given, "--json", tmp_path / f"{command}.json"), command
            documents[command] = report.read(tmp_path / f"{command}.json")

    target = documents["closed"]["runs"][0]["targets"][0]
    assert "tiny" == documents["closed"]["models"][0]["name"]
    assert documents["closed"]["service"]["limits"]["lanes"] >= 1
    assert {"tokenize", "queue", "inference", "decode"} == set(target["server_p50_ms"])
    assert target["overhead_ms"] is not None
    assert target["batches"]["runs"] * target["batches"]["mean_rows"] >= target["requests"]
    assert target["tokens_per_s"] > target["texts_per_s"]
    assert documents["closed"]["figures"]["ratio"] > 0
    assert documents["compare"]["engine"]["digest"] == documents["compare"]["models"][0]["version"]
    assert 2 == len([made for made in documents["compare"]["runs"] if made["limit"]])
    assert documents["compare"]["figures"]["ratio"] > 0
    assert documents["tail-latency"]["figures"]["queue_ratio"] > 0
    earlier = report.read(Path(__file__).parent / "report_of_0_1_0.json")
    assert "tail-latency" == documents["tail-latency"]["command"]
    assert list(earlier) == list(documents["tail-latency"])
    for name in ("settings", "engine", "runs", "limits", "figures", "judged"):
        assert structure(earlier[name]) == structure(documents["tail-latency"][name])
    assert ["/classify", "/ner"] == [made["target"].split()[0] for made in documents["concurrent-targets"]["runs"][2]["targets"]]
    assert documents["concurrent-targets"]["figures"]["ratio"] > 0


def test_heads_are_loaded_by_their_endpoints(tmp_path: Path, serve: Serve) -> None:
    """Vectors, cosines, ranks and labels of the caller's, from the mixes; what the service ran is what was counted."""
    models = tmp_path / "models"
    tiny.bundle(models, "vectors", max_length=64, task="feature-extraction")
    tiny.bundle(models, "nli", max_length=64, labels=("contradiction", "entailment"))
    tiny.bundle(models, "ranker", max_length=64, labels=("LABEL_0",))
    # path, texts of a request, and how many of them the model reads
    loads = [("embed", "vectors", 3, 3), ("similarity", "vectors", 3, 4), ("rerank", "ranker", 3, 3), ("zero-shot", "nli", 1, 4)]
    with serve(models) as served:
        for path, name, texts, each in loads:
            flags_ = ("--target", f"{served.url}/{path}=short", "--seconds", 0.3, "--warmup-s", 0, "--connections", 1, "--quiet")
            given = ("--texts", texts, "--bundle", models / name, "--json", tmp_path / "a.json")
            assert 0 == run("closed", *flags_, *given), path
            document = report.read(tmp_path / "a.json")
            (target,) = document["runs"][0]["targets"]
            assert f"/{path} short" == target["target"]
            assert target["texts_per_s"] == pytest.approx(each * target["rps"])
            assert target["batches"]["runs"] * target["batches"]["mean_rows"] == pytest.approx(each * target["requests"], rel=0.5)
            assert document["figures"]["ratio"] > 0
            assert document["runs"][0]["limit"]["texts_per_s"] == pytest.approx(document["runs"][0]["limit"]["runs_per_s"])


def test_ctrl_c_prints_what_there_is() -> None:
    """The command ends with 130 and its figures."""
    with listening(ok) as server:
        target = f"http://127.0.0.1:{server.port}/classify=short"
        command = [Path(sys.executable).with_name("bert-bench"), "closed", "--target", target, "--seconds", "60", "--warmup-s", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while server.requests < 100:
                assert None is process.poll()
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=20)

    assert 130 == process.returncode
    assert "requests/s" in out
    assert "interrupted" in out


def test_the_report_can_take_the_place_of_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json -` prints JSON and nothing else."""
    with listening(ok) as server:
        assert 0 == load(server.port, "--json", "-")

    assert "closed" == json.loads(capsys.readouterr().out)["command"]


def test_a_bundle_that_is_not_served_is_told(models: Path, tmp_path: Path, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio of two different models is nothing that one wants to quote."""
    other = tiny.bundle(tmp_path / "other", "tiny", seed=1)
    (tmp_path / "texts.jsonl").write_text('"a good film"\n')
    target = f"={tmp_path / 'texts.jsonl'}"
    with serve(models) as served:
        given = ("--target", f"{served.url}/classify{target}", "--seconds", 0.1, "--warmup-s", 0)
        assert 0 == run("closed", *given, "--bundle", other)
        assert "compares two models" in capsys.readouterr().err
        assert 0 == run("closed", *given, "--bundle", models / "tiny")
        assert "compares two models" not in capsys.readouterr().err


def test_every_flag_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/reference/bench-flags.md names each command, each earlier name of one, each flag and each figure."""
    text = (ROOT / "docs/reference/bench-flags.md").read_text(encoding="utf-8")
    for command in flags.COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            run(command, "--help")
    shown = set(re.findall(r"(?<![\w-])--[a-z-]+", capsys.readouterr().out))

    assert set() == {flag for flag in shown - {"--help"} if not re.search(f"`{flag}[` ]", text)}
    assert [] == [figure for figure in slo.FIGURES if f"`{figure}`" not in text]
    assert [] == [command for command in flags.COMMANDS if f"| `{command}` |" not in text]
    assert [] == [name for name in flags.ALIASES.values() if f"`{name}`" not in text]
