"""bert-bench against a real service with tiny bundles: commands and kinds of endpoints."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bertserve.bench import cli, raw_loop
from support import tiny
from support.replica import running

# no warm-up: on a stalled machine, the first requests can be the only ones
SHORT = ("--seconds", 0.1, "--warmup-s", 0)


class Service(NamedTuple):
    """A service under load: its base URL, the folder of its bundles, and a file of texts in their vocabulary."""

    url: str
    models: Path
    texts: Path


@pytest.fixture(name="service", scope="module")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yields a service with a bundle of every kind. `/classify` uses `attentive`, which is the first bundle by name."""
    folder = tmp_path_factory.mktemp("service")
    models = tiny.every_kind(folder / "models", max_length=256)
    (folder / "texts.jsonl").write_text('"a good film"\n"a bad film , not good"\n')
    with running(models, folder / "log", "--allow-implicit-default") as process:
        yield Service(process.url, models, folder / "texts.jsonl")


@pytest.fixture(autouse=True)
def no_warm_up_of_the_raw_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_loop, "WARM_UP_SHARE", 0.0)


def measure(folder: Path, *flags: object) -> dict[str, Any]:
    assert cli.main([str(flag) for flag in (*flags, "--json", folder / "a.json")]) == 0, flags
    document: dict[str, Any] = json.loads((folder / "a.json").read_text())
    return document


def test_a_closed_loop_reports_the_service_and_its_model(service: Service, tmp_path: Path) -> None:
    document = measure(tmp_path, "closed", *SHORT, "--target", f"{service.url}/classify={service.texts}", "--connections", 2)
    [metrics] = document["loads"]

    assert document["models"][0]["name"] == "attentive"
    assert document["service"]["limits"]["threads"] >= 1
    assert set(metrics["server_p50_ms"]) == {"tokenize", "queue", "inference", "decode"}
    assert metrics["batches"]["mean_rows"] >= 1
    assert metrics["tokens_per_s"] > metrics["texts_per_s"]
    assert metrics["overhead_ms"] is not None


def test_two_targets_share_the_rate_of_an_open_loop(service: Service, tmp_path: Path) -> None:
    """Both are loaded at the same time, and each has its own metrics."""
    texts = [f"{service.url}/{path}={service.texts}" for path in ("classify", "embed")]
    document = measure(tmp_path, "open", *SHORT, "--seconds", 0.5, "--rate", 200, "--target", texts[0], "--target", texts[1])

    assert [model["name"] for model in document["models"]] == ["attentive", "vectors"]
    assert [load["name"] for load in document["loads"]] == [f"open, 200/s, {text}" for text in texts]
    assert [load["requests"] for load in document["loads"]] == pytest.approx([50, 50], abs=30)
    assert [load["batches"]["runs"] > 0 for load in document["loads"]] == [True, True]


def test_compare_measures_service_and_raw_loop_in_each_round(service: Service, tmp_path: Path) -> None:
    flags = ("--target", f"{service.url}/classify={service.texts}", "--connections", 2, "--texts", 32, "--rounds", 2)
    document = measure(tmp_path, "compare", *SHORT, *flags, "--bundle", service.models / "attentive")
    results = document["results"]

    assert document["models"][0]["version"] == document["raw_loop"]["digest"]
    assert document["service"]["limits"]["threads"] == document["raw_loop"]["threads"]
    assert len(document["loads"]) == 2
    assert 0 < results["ratio_lowest"] <= results["ratio"] <= results["ratio_highest"]


# path, bundle, texts per request, and texts that the model reads per request
@pytest.mark.parametrize(
    ("path", "name", "texts", "units"),
    [
        ("embed", "vectors", 3, 3),
        ("similarity", "vectors", 3, 4),
        ("rerank", "ranker", 3, 3),
        ("choose", "choices", 2, 8),
        ("zero-shot", "nli", 1, 4),
        ("attention", "attentive", 2, 2),
    ],
)
def test_each_kind_of_endpoint_can_be_loaded(service: Service, tmp_path: Path, path: str, name: str, texts: int, units: int) -> None:
    """The report counts the texts that the service ran."""
    flags = ("--target", f"{service.url}/{path}=short", "--connections", 1, "--texts", texts)
    document = measure(tmp_path, "compare", *SHORT, *flags, "--rounds", 1, "--bundle", service.models / name)
    [metrics] = document["loads"]

    assert document["models"][0]["workload"] == "short"
    assert metrics["texts_per_s"] == pytest.approx(units * metrics["rps"])
    assert document["results"]["ratio"] > 0
