"""The first measurements on a GPU, with small numbers on the CPU."""

from pathlib import Path

import pytest

import gpu_first_run
from bertserve.service.engine.sessions import unavailable_reason
from support import ROOT, tiny

pytestmark = pytest.mark.skipif(unavailable_reason("cuda") is None, reason="this machine has a GPU")
SMALL = ("--texts", "4", "--shapes", "1x8,2x32", "--load-s", "0.2", "--clients", "1")


def report(folder: Path, *flags: str) -> str:
    bundle = tiny.bundle(folder, max_length=64)
    gpu_first_run.main(["--bundle", str(bundle), "--output", str(folder / "report.md"), *SMALL, *flags])
    return (folder / "report.md").read_text()


def rows(text: str, title: str) -> list[list[str]]:
    lines = text.partition(f"## {title}")[2].partition("\n## ")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]


def test_the_report_measures_what_the_machine_has_and_names_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests")  # as when the script is run by itself
    text = report(tmp_path, "--services", "1x2")

    assert [[row[0], row[3]] for row in rows(text, "Against the CPU, 4 texts")] == [["cpu/fp32", "4 of 4"]]
    times = rows(text, "Time of a run")
    assert [row[0] for row in times] == ["1 x 8", "2 x 32"]
    assert all(float(value) > 0 for row in times for value in row[1:])
    services = rows(text, "The service")
    assert [row[:2] for row in services] == [["1", "2"]]
    assert all(int(value.replace(",", "")) > 0 for row in services for value in row[2:])
    assert [part for part in ("GPU: ", "CUDA graphs: ") if f"**Missing:** {part}" in text] == ["GPU: ", "CUDA graphs: "]


def test_the_time_limit_ends_the_measurements(tmp_path: Path) -> None:
    text = report(tmp_path, "--limit-s", "0")

    assert text.count("## ") == text.count("**Missing:** the limit of 0 s") == 4


def test_a_bundle_without_a_graph_for_this_machine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tiny.edit(tiny.bundle(tmp_path), lambda manifest: manifest["graphs"][0].update(provider="cuda"))

    with pytest.raises(SystemExit) as caught:
        gpu_first_run.main(["--bundle", str(bundle), "--output", str(tmp_path / "report.md")])
    assert caught.value.code == 2
    assert "no graph for cpu" in capsys.readouterr().err
