"""bert-bench against a real service of tiny bundles: every command, every kind of endpoint, and the keys of its reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tiny
from bertserve.bench import cli, engine, load_test
from bertserve.bench.report import report
from conftest import running

# without a warm-up, so that the first requests count: if the machine stands still after them, there are no others
SHORT = ("--seconds", 0.1, "--warmup-s", 0, "--quiet")


class Service(NamedTuple):
    """A service under load.

    Attributes:
        url: Its address.
        models: Folder of its bundles.
        texts: A file of texts in their vocabulary.
    """

    url: str
    models: Path
    texts: Path


@pytest.fixture(name="service", scope="module")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service of five bundles; by name, so /classify takes `classifier`."""
    folder = tmp_path_factory.mktemp("service")
    models = folder / "models"
    tiny.bundle(models, "classifier", max_length=64)
    tiny.bundle(models, "names", max_length=256, task="token-classification", attention_heads=(2, 3))
    tiny.bundle(models, "nli", max_length=64, labels=("contradiction", "entailment"))
    tiny.bundle(models, "ranker", max_length=64, labels=("LABEL_0",))
    tiny.bundle(models, "choices", max_length=64, task="multiple-choice")
    tiny.bundle(models, "vectors", max_length=64, task="feature-extraction")
    (folder / "texts.jsonl").write_text('"a good film"\n"a bad film , not good"\n')
    with running(models, folder / "log", "--allow-implicit-default") as served:
        yield Service(served.url, models, folder / "texts.jsonl")


@pytest.fixture(autouse=True)
def everything_starts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The raw loop has no warm-up either, and an open loop's first request is due at its start."""
    monkeypatch.setattr(engine, "_WARMUP_SHARE", 0.0)
    monkeypatch.setattr(load_test, "poisson_arrivals", lambda rate, seconds, *, seed: [i * seconds / 10 for i in range(10)])


def measure(folder: Path, *given: object) -> dict[str, Any]:
    assert 0 == cli.main([str(flag) for flag in (*given, "--json", folder / "a.json")]), given
    return report.read(folder / "a.json")


def structure(value: Any) -> Any:
    """Returns the keys of nested JSON objects and of the first element of each list, without keys that are data."""
    if isinstance(value, dict):
        return {key: None if key in ("rows", "statuses", "errors") else structure(item) for key, item in value.items()}
    return [structure(item) for item in value[:1] if isinstance(item, dict)] if isinstance(value, list) else None


def test_a_closed_loop_reports_the_service_and_its_model(service: Service, tmp_path: Path) -> None:
    """Parts of the latency, runs and tokens come from the service, and the engine throughput from the bundle."""
    given = ("--target", f"{service.url}/classify={service.texts}", "--connections", 2)
    document = measure(tmp_path, "closed", *SHORT, *given, "--bundle", service.models / "classifier")
    target = document["runs"][0]["targets"][0]

    assert "classifier" == document["models"][0]["name"]
    assert document["service"]["limits"]["threads"] >= 1
    assert {"tokenize", "queue", "inference", "decode"} == set(target["server_p50_ms"])
    assert target["overhead_ms"] is not None
    assert target["batches"]["runs"] * target["batches"]["mean_rows"] >= target["requests"]
    assert target["tokens_per_s"] > target["texts_per_s"]
    assert document["figures"]["ratio"] > 0


def test_compare_has_both_sides_of_each_round(service: Service, tmp_path: Path) -> None:
    given = ("--target", f"{service.url}/classify={service.texts}", "--connections", 2, "--texts", 32, "--rounds", 2)
    document = measure(tmp_path, "compare", *SHORT, *given, "--bundle", service.models / "classifier")

    assert document["engine"]["digest"] == document["models"][0]["version"]
    assert 2 == len([made for made in document["runs"] if made["limit"]])
    assert document["figures"]["ratio"] > 0


def test_tail_latency_is_held_against_an_ideal_queue(service: Service, tmp_path: Path) -> None:
    """The report has the ratio, and its keys are those of a report of bert-bench 0.1.0, and one that came later."""
    given = ("--target", f"{service.url}/classify={service.texts}", "--connections", 2)
    document = measure(tmp_path, "tail-latency", *SHORT, *given, "--bundle", service.models / "classifier")
    earlier = report.read(Path(__file__).parent / "report_of_0_1_0.json")

    assert "tail-latency" == document["command"]
    assert document["figures"]["queue_ratio"] > 0
    assert ["inconclusive", "is_lower_bound"] == [name for name in document if name not in earlier]
    assert list(earlier) == [name for name in document if name in earlier]
    for name in ("settings", "engine", "runs", "limits", "figures", "judged"):
        assert structure(earlier[name]) == structure(document[name]), name


def test_concurrent_targets_are_loaded_alone_and_at_once(service: Service, tmp_path: Path) -> None:
    targets = [f"{service.url}/{path}={service.texts}" for path in ("classify", "ner")]
    given = ("--target", targets[0], "--target", targets[1], "--connections", 2, "--rounds", 1)
    document = measure(tmp_path, "concurrent-targets", *SHORT, *given)

    paths = [[target["target"].split()[0] for target in made["targets"]] for made in document["runs"]]
    assert [["/classify"], ["/ner"], ["/classify", "/ner"]] == paths
    assert document["figures"]["ratio"] > 0


# path, bundle, texts of a request, and how many texts the model reads for them
@pytest.mark.parametrize(
    ("path", "name", "texts", "each"),
    [
        ("embed", "vectors", 3, 3),
        pytest.param("similarity", "vectors", 3, 4, marks=pytest.mark.full_grid),
        pytest.param("rerank", "ranker", 3, 3, marks=pytest.mark.full_grid),
        ("choose", "choices", 2, 8),
        ("zero-shot", "nli", 1, 4),
        pytest.param("attention", "names", 2, 2, marks=pytest.mark.full_grid),
    ],
)
def test_heads_are_loaded_by_their_endpoints(service: Service, tmp_path: Path, path: str, name: str, texts: int, each: int) -> None:
    """Vectors, cosines, ranks, candidate labels and attention are loaded from the workloads; what the service ran is what was counted."""
    given = ("--target", f"{service.url}/{path}=short", "--connections", 1, "--texts", texts, "--bundle", service.models / name)
    document = measure(tmp_path, "closed", *SHORT, *given)
    (target,) = document["runs"][0]["targets"]
    limit = document["runs"][0]["limit"]

    assert f"/{path} short" == target["target"]
    assert target["texts_per_s"] == pytest.approx(each * target["rps"])
    assert target["batches"]["runs"] * target["batches"]["mean_rows"] == pytest.approx(each * target["requests"], rel=0.5)
    assert document["figures"]["ratio"] > 0
    assert limit["texts_per_s"] == pytest.approx(limit["runs_per_s"])


def test_a_bundle_that_is_not_served_is_told(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio of two different models is of no use, so a warning says so."""
    other = tiny.bundle(tmp_path / "other", "classifier", seed=1)
    given = ("--target", f"{service.url}/classify={service.texts}", "--seconds", 0.1, "--warmup-s", 0)
    warned = []
    for bundle in (other, service.models / "classifier"):
        measure(tmp_path, "closed", *given, "--bundle", bundle)
        warned.append("compares two models" in capsys.readouterr().err)

    assert [True, False] == warned


def test_the_limit_needs_no_service(service: Service, tmp_path: Path) -> None:
    """`engine-limit` runs a bundle's graph alone, on a workload or on the user's file."""
    given = ("--workload", service.texts, "--seconds", 0.1, "--quiet", "--slo", "rps=1")
    document = measure(tmp_path, "engine-limit", "--bundle", service.models / "classifier", *given)

    assert "model.cpu.fp32.onnx" == document["engine"]["graph"]
    assert 2 == len(document["limits"][0]["feed_s"])
