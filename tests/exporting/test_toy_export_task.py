"""A new task needs one record in the exporter: its checkpoint gets a bundle with a validation report, which `verify` checks on data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import bertserve.export.tasks.catalog
import bertserve.service.tasks.catalog
import toy_export_task
from bundles import Verify, exported, json_lines
from checkpoints import bert, edit_json, few_texts

pytestmark = pytest.mark.torch
pytest_plugins = ("export_fixtures",)

TEXTS = ("a good film", "a bad book", "very dull !", "the film was not great")
LABELS = ("low", "middle", "high")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bertserve.export.tasks.catalog.TASKS, toy_export_task.NAME, toy_export_task.TASK)
    monkeypatch.setitem(bertserve.service.tasks.catalog.TASKS, toy_export_task.NAME, toy_export_task.SPEC)  # type: ignore[arg-type]


def grades(checkpoint: Path) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        return [int(np.argmax(model(**tokenizer(text, return_tensors="pt")).logits[0].numpy())) for text in TEXTS]


def test_a_custom_task_is_exported_and_verified(tmp_path: Path, verify: Verify) -> None:
    checkpoint = bert(tmp_path, labels=LABELS)
    edit_json(checkpoint / "config.json", architectures=["BertForTextGrading"])
    bundle = exported(checkpoint, precisions=("fp32", "int8"), calibration=few_texts(tmp_path, 120))
    manifest = bundle.manifest
    assert toy_export_task.NAME == manifest.task
    assert {"grade", "score"} == manifest.example.result.keys()
    agreements = [graph.evidence.agreement for graph in manifest.graphs]
    assert ["label"] * 2 == [agreement.measure for agreement in agreements if agreement is not None]
    assert agreements[0] is not None
    assert 1 == agreements[0].value

    expected = grades(checkpoint)
    lines = [{"text": text, "grade": grade} for text, grade in zip(TEXTS, [-1, *expected[1:]], strict=True)]
    flags = (bundle.path, "--checkpoint", checkpoint, "--data", json_lines(tmp_path / "data.jsonl", *lines), "--min-metric")
    code, checks = verify(*flags, "same-grade=0.5")
    assert (0, {"graph": 0.75, "reference": 0.75}) == (code, checks["same grade cpu/fp32"]["metrics"])
    assert 1 == checks["agreement cpu/fp32"]["metrics"]["agreement"]
    assert 1 == verify(*flags, "same-grade=0.9")[0]
