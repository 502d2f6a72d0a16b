"""bert-bench against a real service with tiny bundles: commands, kinds of endpoints, and the keys of reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tiny
from bertserve.bench import cli, engine, load_test
from bertserve.bench.report import report
from conftest import running

# no warm-up: on a stalled machine, the first requests may be the only ones
SHORT = ("--seconds", 0.1, "--warmup-s", 0, "--quiet")


class Service(NamedTuple):
    """A service under load.

    Attributes:
        url: Base URL.
        models: Folder of its bundles.
        texts: A file of texts in the vocabulary of the bundles.
    """

    url: str
    models: Path
    texts: Path


@pytest.fixture(name="service", scope="module")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yields a service with six bundles. `/classify` uses `classifier`, which is the first bundle by name."""
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
    """Removes the warm-up of the raw loop, and schedules the first request of an open loop at its start."""
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
    """Latency parts, runs and tokens come from the service; the engine throughput comes from the bundle."""
    given = ("--target", f"{service.url}/classify={service.texts}", "--connections", 2)
    document = measure(tmp_path, "closed", *SHORT, *given, "--bundle", service.models / "classifier")
    target = document["runs"][0]["targets"][0]

    assert "classifier" == document["models"][0]["name"]
    assert document["service"]["limits"]["threads"] >= 1
    assert {"tokenize", "queue", "inference", "decode"} == set(target["server_p50_ms"])
    assert target["overhead_ms"] is not None
    assert round(target["batches"]["runs"] * target["batches"]["mean_rows"]) >= target["requests"]
    assert target["tokens_per_s"] > target["texts_per_s"]
    assert document["figures"]["ratio"] > 0


def test_compare_measures_service_and_engine_in_each_round(service: Service, tmp_path: Path) -> None:
    given = ("--target", f"{service.url}/classify={service.texts}", "--connections", 2, "--texts", 32, "--rounds", 2)
    document = measure(tmp_path, "compare", *SHORT, *given, "--bundle", service.models / "classifier")

    assert document["engine"]["digest"] == document["models"][0]["version"]
    assert 2 == len([made for made in document["runs"] if made["limit"]])
    assert document["figures"]["ratio"] > 0


def test_tail_latency_is_compared_with_an_ideal_queue(service: Service, tmp_path: Path) -> None:
    """The report has the ratio. It keeps the keys of bert-bench 0.1.0 and adds two."""
    given = ("--target", f"{service.url}/classify={service.texts}", "--connections", 2)
    document = measure(tmp_path, "tail-latency", *SHORT, *given, "--bundle", service.models / "classifier")
    earlier = report.read(Path(__file__).parent / "report_of_0_1_0.json")

    assert "tail-latency" == document["command"]
    assert document["figures"]["queue_ratio"] > 0
    assert ["inconclusive", "is_lower_bound"] == [name for name in document if name not in earlier]
    assert list(earlier) == [name for name in document if name in earlier]
    for name in ("settings", "engine", "runs", "limits", "figures", "judged"):
        assert structure(earlier[name]) == structure(document[name]), name


def test_concurrent_targets_are_loaded_separately_and_together(service: Service, tmp_path: Path) -> None:
    targets = [f"{service.url}/{path}={service.texts}" for path in ("classify", "ner")]
    given = ("--target", targets[0], "--target", targets[1], "--connections", 2, "--rounds", 1)
    document = measure(tmp_path, "concurrent-targets", *SHORT, *given)

    paths = [[target["target"].split()[0] for target in made["targets"]] for made in document["runs"]]
    assert [["/classify"], ["/ner"], ["/classify", "/ner"]] == paths
    assert document["figures"]["ratio"] > 0


# path, bundle, texts per request, and texts that the model reads per request
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
def test_each_kind_of_endpoint_can_be_loaded(service: Service, tmp_path: Path, path: str, name: str, texts: int, each: int) -> None:
    """The report counts the texts that the service ran."""
    given = ("--target", f"{service.url}/{path}=short", "--connections", 1, "--texts", texts, "--bundle", service.models / name)
    document = measure(tmp_path, "closed", *SHORT, *given)
    (target,) = document["runs"][0]["targets"]
    limit = document["runs"][0]["limit"]

    assert f"/{path} short" == target["target"]
    assert target["texts_per_s"] == pytest.approx(each * target["rps"])
    assert target["batches"]["runs"] * target["batches"]["mean_rows"] == pytest.approx(each * target["requests"], rel=0.5)
    assert document["figures"]["ratio"] > 0
    assert limit["texts_per_s"] == pytest.approx(limit["runs_per_s"])


def test_a_bundle_that_is_not_served_causes_a_warning(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio of two different models has no meaning."""
    other = tiny.bundle(tmp_path / "other", "classifier", seed=1)
    given = ("--target", f"{service.url}/classify={service.texts}", "--seconds", 0.1, "--warmup-s", 0)
    warned = []
    for bundle in (other, service.models / "classifier"):
        measure(tmp_path, "closed", *given, "--bundle", bundle)
        warned.append("compares two models" in capsys.readouterr().err)

    assert [True, False] == warned


def test_engine_limit_needs_no_service(service: Service, tmp_path: Path) -> None:
    """`engine-limit` runs only the graph of a bundle, here on the texts of a file."""
    given = ("--workload", service.texts, "--seconds", 0.1, "--quiet", "--slo", "rps=1")
    document = measure(tmp_path, "engine-limit", "--bundle", service.models / "classifier", *given)

    assert "model.cpu.fp32.onnx" == document["engine"]["graph"]
    assert 2 == len(document["limits"][0]["feed_s"])
