"""The commands `bert-serve serve`, `check` and `models`: their output, messages and exit codes."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bertserve.service import __version__
from bertserve.service.bundle.example import difference, example_tolerance
from bertserve.service.bundle.files import load_bundle
from bertserve.service.cli import main
from support import tiny
from support.app_client import result_of

pytestmark = pytest.mark.usefixtures("logging_of_pytest")

REQUEST = {"inputs": ["a good film", {"text": "bad", "text_pair": "fine"}], "parameters": {"top_k": 2}}


@pytest.fixture(autouse=True)
def free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the tests pass while another process listens on the default port, which `serve` binds before it loads models."""
    monkeypatch.setenv("BERT_SERVE_PORT", "0")


def failure(capsys: pytest.CaptureFixture[str], code: int, *argv: str) -> str:
    """Runs a command that must fail with an exit code and one line on stderr; returns that line."""
    assert main(list(argv)) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("bert-serve: ")
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--models", "EMPTY"], ["`EMPTY`", "bert-export"]),
        (["--models", "EMPTY/none"], ["`EMPTY/none`", "--models"]),
        (["--precision", "int8"], ["cpu/fp32"]),
        (["--provider", "cuda"], ["--provider cuda "]),
    ],
)
def test_a_model_that_cannot_be_loaded_stops_the_start(
    models: Path, tmp_path: Path, flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    flags, words = ([word.replace("EMPTY", str(tmp_path / "empty")) for word in group] for group in (flags, words))
    message = failure(capsys, 1, "serve", "--port", "0", *([] if "--models" in flags else ["--models", str(models)]), *flags)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--default", "classify=other"], ["`other`", "`tiny`"]),
        (["--default", "translate=tiny"], ["`translate`", "classify"]),
        (["--max-batch-tokens", "16"], ["--max-batch-tokens is 16", "`tiny`", "32"]),
        (["--api-key-file", "/nowhere/key"], ["--api-key-file `/nowhere/key`"]),
        (["--api-key-file", "models/embed/model.cpu.int8.onnx"], ["--api-key-file"]),  # not a text
    ],
)
def test_an_invalid_setting_is_a_usage_error(models: Path, flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "check"):
        message = failure(capsys, 2, command, "--models", str(models), *flags)
        assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("host", "warns"), [("0.0.0.0", True), ("::", True), ("192.0.2.1", True), ("127.0.0.1", False), ("::1", False), ("localhost", False)]
)
def test_a_public_address_without_a_key_causes_a_warning(tmp_path: Path, host: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    main(["serve", "--port", "0", "--models", str(tmp_path), "--host", host])
    assert (f"LISTENING ON {host} " in caplog.text) == warns
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    caplog.clear()
    (tmp_path / "key").write_text("swordfish\n")
    main(["serve", "--port", "0", "--models", str(tmp_path), "--host", host, "--api-key-file", str(tmp_path / "key")])
    assert caplog.text == ""


@pytest.mark.parametrize(("command", "host"), [("serve", "2001:db8::1"), ("health", "::1")])
def test_an_error_has_an_ipv6_address_in_brackets(command: str, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`serve` cannot bind an address of the documentation's network, and nothing listens on port 1. Both commands take the same flags."""
    assert main([command, "--host", host, "--port", "1", "--models", "models"]) == 1
    assert f"[{host}]:1 (" in capsys.readouterr().err


def test_check_fails_a_model_that_returns_another_result(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounding makes no difference."""
    result = result_of(models, "/classify", REQUEST["inputs"], top_k=2)
    score = result[0][0]["score"]
    for name, difference_ in (("b", 9e-5), ("a", 2e-4)):
        result[0][0]["score"] = score + difference_
        tiny.bundle(tmp_path / name, name, example={"request": REQUEST, "result": result})
    assert main(["check", "--models", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "b: text-classification, cpu/fp32: ok\n"
    assert main(["check", "--models", f"{tmp_path}/a,{tmp_path}/b", "--allow-implicit-default"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a: text-classification, cpu/fp32: FAILED: score: ")
    assert second == "b: text-classification, cpu/fp32: ok"


def test_check_runs_an_example_that_exceeds_the_limits_of_requests(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    tiny.bundle(folder, example={"request": REQUEST, "result": result_of(models, "/classify", REQUEST["inputs"], top_k=2)})
    assert main(["check", "--models", str(folder), "--max-chars", "1", "--max-inputs", "1"]) == 0


@pytest.mark.parametrize("example", [{"request": {}, "result": []}, {"request": {"inputs": "good", "parameters": {"x": 1}}, "result": []}])
def test_check_fails_an_example_with_an_invalid_request(tmp_path: Path, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.bundle(tmp_path, "a", example=example)
    assert main(["check", "--models", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "a: text-classification, cpu/fp32: FAILED: " in output.out + output.err


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ([{"label": "a", "score": 0.5}], [{"label": "b", "score": 0.5}], False),
        ([{"label": "a", "score": 0.5}], [], False),
        ([{"label": "a", "score": 1}], [{"label": "a", "score": 1.0}], True),
        (None, [], False),
        ([{"score": 0.5}], [{"score": float("nan")}], False),
    ],
)
def test_results_are_compared_with_all_their_values(expected: Any, actual: Any, same: bool) -> None:
    assert same == (difference(expected, actual, 0.001) is None)


def test_check_allows_the_larger_tolerance_of_a_graph_and_of_the_graph_that_gave_the_result(tmp_path: Path) -> None:
    """The result is that of the default graph of the CPU; the default graph of another provider does not count."""
    [fp32] = load_bundle(tiny.bundle(tmp_path)).manifest.graphs
    fp16 = fp32.model_copy(update={"provider": "cuda", "precision": "fp16"})
    int8 = fp32.model_copy(update={"precision": "int8", "default": False})
    assert [example_tolerance(graph, [fp16, fp32, int8]) for graph in (fp32, fp16, int8)] == [1e-4, 1e-2, 0.05]
    assert example_tolerance(fp32, [fp16, fp32.model_copy(update={"provider": "tensorrt"})]) == 1e-2


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"bert-serve {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "check"),
        (["sevre"], "did you mean serve"),
        (["xyzzy"], "--help"),
        (["health", "--prot", "3"], "did you mean --port"),
        (["serve", "--port"], "--port"),
        (["--models", "models"], "command first"),
        (["score", "in.jsonl", "out.jsonl", "--columns", "text"], "--columns"),
    ],
)
def test_a_usage_error_suggests_a_correction(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        sys.exit(main(argv))
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert word in error
    assert error.count("\n") == 1


def listing_of(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["models", *argv]) == code
    return capsys.readouterr().out


def test_each_model_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines = listing_of(capsys, "--models", "models").splitlines()

    assert [line.split()[0] for line in lines] == ["embed", "fill-mask", "ner", "nli", "qa", "rerank", "sentiment"]
    assert lines[6].split()[1:5] == ["text-classification", "negative,", "positive", "23.4"]
    assert "cpu/int8* 100.0% of 269" in lines[6]
    assert lines[6].endswith("models/sentiment/README.md")
    assert {line.index("models/") for line in lines} == {header.index("card")}


def test_json_has_all_fields(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [model] = json.loads(listing_of(capsys, "--models", str(models), "--json"))
    folder = models / "tiny"
    [graph] = model.pop("graphs")

    assert model == {
        "name": "tiny",
        "path": str(folder),
        "task": "text-classification",
        "labels": list(tiny.LABELS),
        "size_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "source": {"checkpoint": "tiny", "revision": None, "commit": None},
        "card": None,
    }
    assert tuple(graph[name] for name in ("provider", "precision", "default", "samples", "agreement")) == ("cpu", "fp32", True, 0, None)


def test_an_unreadable_bundle_is_reported(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (models / "broken").mkdir()
    lines = listing_of(capsys, "--models", str(models), code=1).splitlines()

    assert len(lines) == 3
    assert lines[2].startswith(f"broken: `{models}/broken`")
    assert "error" in json.loads(listing_of(capsys, "--models", str(models), "--json", code=1))[0]
    (models / "tiny/model.cpu.fp32.onnx").unlink()
    assert "model.cpu.fp32.onnx" in listing_of(capsys, "--models", str(models), code=1)


def test_listing_exports_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--model", "org/model", "--cache-dir", str(tmp_path)]) == 1
    assert "`bert-serve serve --model org/model`" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_closed_output_pipe_causes_no_traceback() -> None:
    """Like `bert-serve models | head -1`, but the pipe is closed before the first line."""
    reader, write = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "bertserve.service.cli", "models", "--models", "models"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)

    assert (process.returncode, process.stderr) == (1, b"")
