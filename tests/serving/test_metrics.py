"""The metrics page: names, labels and buckets as documented, and that each counts what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import tiny
from application import LONG, keys, play
from service.http.access import Access
from service.serving.build import build
from service.settings import Settings

LABELED = ("model", "task")
DOCUMENTED = {
    "requests_total": ("model", "status", "task"),
    "request_seconds": LABELED,
    "tokenize_seconds": LABELED,
    "queue_seconds": LABELED,
    "wait_prediction_ratio": LABELED,
    "inference_seconds": LABELED,
    "decode_seconds": LABELED,
    "queue_entries": (),
    "queue_tokens": (),
    "batch_rows": LABELED,
    "tokens_total": ("kind", "model", "task"),
    "refused_total": ("model", "reason", "task"),
    "connections_closed_total": ("reason",),
    "expired_total": LABELED,
    "cancelled_total": LABELED,
    "idle_runs_total": LABELED,
    "hung_runs_total": (),
    "truncated_total": LABELED,
    "key_requests_total": ("key", "status"),
    "broken_models": ("model",),
    "model_info": ("model", "precision", "provider", "version"),
}
TINY = {"task": "text-classification", "model": "tiny"}


def families(models: Path, *requests: tuple[str, Any]) -> dict[str, Metric]:
    """Returns the metrics by name after some POSTs of (path, body)."""

    async def check(client: httpx.AsyncClient) -> httpx.Response:
        for path, body in requests:
            await client.post(path, json=body, headers={"authorization": "Bearer swordfish"})
        return await client.get("/metrics")

    (tiny.bundle(models, "broken") / "tokenizer.json").write_text("{}")
    page = play(build(Settings(models=models, skip_broken=True)), check, access=Access(keys(models.parent, "swordfish")))
    assert page.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(page.text)}


def value(found: dict[str, Metric], sample: str, **labels: str) -> float:
    """Returns the value of a sample by name and labels, 0 where there is none."""
    samples = [item for family in found.values() for item in family.samples]
    return sum(item.value for item in samples if item.name == f"bertserve_{sample}" and labels.items() <= item.labels.items())


@pytest.fixture(name="found", scope="module")
def after_one_request(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metric]:
    """The metrics of a service that was asked once."""
    folder = tmp_path_factory.mktemp("metrics") / "models"
    tiny.bundle(folder)
    return families(folder, ("/classify", {"inputs": "good"}))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_metric_exists(found: dict[str, Metric], name: str) -> None:
    """Each metric is there with its labels, after one request."""
    family = found[f"bertserve_{name.removesuffix('_total')}"]
    [labels] = {tuple(sorted(set(sample.labels) - {"le"})) for sample in family.samples if not sample.name.endswith("_created")}
    assert labels == DOCUMENTED[name]


def test_no_other_metric_exists(found: dict[str, Metric]) -> None:
    """Nothing is counted that is not documented, but for the times of creation that prometheus_client adds."""
    assert {name for name in found if not name.endswith("_created")} == {f"bertserve_{name.removesuffix('_total')}" for name in DOCUMENTED}


def test_every_metric_is_described(models: Path) -> None:
    """Each metric has a help text."""
    assert all(family.documentation for family in families(models).values())


def test_buckets_of_seconds_run_from_half_a_millisecond_to_half_a_minute(models: Path) -> None:
    """All histograms of seconds share buckets from 0.5 ms to 30 s."""
    found = families(models, ("/classify", {"inputs": "good"}))
    for name in DOCUMENTED:
        if name.endswith("_seconds"):
            samples = found[f"bertserve_{name}"].samples
            bounds = sorted({float(sample.labels["le"]) for sample in samples if sample.name.endswith("_bucket")})
            assert (bounds[0], bounds[-2], bounds[-1]) == (0.0005, 30, float("inf"))


def test_requests_are_counted_by_status(models: Path) -> None:
    """Requests count under their model and status, at either path, answered or not."""
    good, bad = {"inputs": "good"}, {"inputs": 1}
    found = families(models, ("/classify", good), ("/models/tiny", good), ("/classify", good | {"model": "tiny"}), ("/models/tiny", bad))
    assert value(found, "requests_total", **TINY, status="200") == 3
    assert value(found, "requests_total", **TINY, status="422") == 1
    assert value(found, "request_seconds_count", **TINY) == 4


@pytest.mark.parametrize(
    ("path", "body", "task"),
    [("/models/nope", {"inputs": "good"}, "unknown"), ("/classify", {"inputs": "good", "model": "nope"}, "text-classification")],
)
def test_a_model_that_nobody_loaded_is_unknown(models: Path, path: str, body: Any, task: str) -> None:
    """A name that a caller made up never becomes a label."""
    found = families(models, (path, body))
    assert value(found, "requests_total", task=task, model="unknown", status="404") == 1
    labels = [sample.labels.get("model") for family in found.values() for sample in family.samples]
    assert "nope" not in labels


def test_one_request_is_observed_once_in_each_part(models: Path) -> None:
    """A request counts once in each of its times, however many inputs it has."""
    found = families(models, ("/classify", {"inputs": ["good", "bad", "a long film"]}))
    for part in ("request", "tokenize", "queue", "decode"):
        assert value(found, f"{part}_seconds_count", **TINY) == 1
    assert value(found, "batch_rows_sum", **TINY) == 3


@pytest.mark.parametrize(("least_s", "counted"), [(60.0, 0), (0.0, 1)])
def test_who_does_not_wait_is_not_compared_with_a_prediction(
    models: Path, monkeypatch: pytest.MonkeyPatch, least_s: float, counted: int
) -> None:
    """The ratio is of waits that somebody would plan by; shorter ones are noise."""
    monkeypatch.setattr("service.serving.model.LEAST_WAIT_S", least_s)
    found = families(models, ("/classify", {"inputs": "good"}))
    assert value(found, "wait_prediction_ratio_count", **TINY) == counted


def test_tokens_are_counted_real_and_padded(models: Path) -> None:
    """Tokens of texts count as real with their special ones, and those that fill a batch up as padded."""
    found = families(models, ("/classify", {"inputs": ["good"]}), ("/classify", {"inputs": ["a good film"]}))
    assert value(found, "tokens_total", **TINY, kind="real") == 3 + 5
    assert value(found, "tokens_total", **TINY, kind="padded") == 0


def test_cut_inputs_are_counted(models: Path) -> None:
    """Each input of which text was cut counts."""
    found = families(models, ("/classify", {"inputs": [LONG, "good", LONG]}))
    assert value(found, "truncated_total", **TINY) == 2


def test_the_queue_is_empty_after_the_answers(models: Path) -> None:
    """The gauges are back at zero when nothing waits."""
    found = families(
        models, ("/classify", {"inputs": ["good", LONG]}), ("/classify", {"inputs": LONG, "parameters": {"truncation": False}})
    )
    assert (value(found, "queue_entries"), value(found, "queue_tokens")) == (0, 0)


def test_loaded_models_are_named(models: Path) -> None:
    """`model_info` is 1 for each loaded model, with its version as its page has it."""
    found = families(models)
    [sample] = found["bertserve_model_info"].samples
    assert sample.value == 1
    assert (sample.labels["model"], sample.labels["precision"], sample.labels["provider"]) == ("tiny", "fp32", "cpu")
    assert len(sample.labels["version"]) == 12
