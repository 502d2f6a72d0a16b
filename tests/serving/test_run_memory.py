"""The outputs of a run are bounded: the vocabulary logits of masks, which can be gigabytes, and attention weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny
from application import assert_same, play
from bertserve.service.engine.engines import Engines
from bertserve.service.models.build import AppState, build
from bertserve.service.settings import Settings
from fakes import RecordingEngine

MASKS = (1, 3, 2, 5, 1, 1, 4, 2)


def recorded(folder: Path, **bundle: Any) -> tuple[AppState, RecordingEngine]:
    """Returns a service with one thread and one model, and the recorder of its runs."""
    tiny.bundle(folder, **bundle)
    service = build(Settings(models=folder, threads=1))
    runner = service.registry.get("tiny").runner
    engine = RecordingEngine(runner.engines.single_threaded)
    runner.engines = Engines(engine)
    return service, engine


def masks_of(engine: RecordingEngine) -> list[int]:
    return [sum(len(encoding.masks) for encoding in run) for run in engine.runs]


def test_a_batch_of_many_masks_runs_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, engine = recorded(tmp_path, task="fill-mask")
    body = {"inputs": [" ".join(["[MASK] good"] * count) for count in MASKS]}

    async def check(client: httpx.AsyncClient) -> None:
        whole = (await client.post("/fill-mask", json=body)).json()
        assert max(masks_of(engine)) > 5, "no batch was cut"
        engine.runs.clear()
        monkeypatch.setattr("bertserve.service.models.runner.MAX_LOGITS", 4 * len(tiny.VOCABULARY))
        assert_same(whole, (await client.post("/fill-mask", json=body)).json())
        assert sum(MASKS) == sum(masks_of(engine))
        assert [5] == [masks for masks in masks_of(engine) if masks > 4]

    play(service, check)


def test_a_batch_of_many_weights_runs_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of several texts exceeds the limit of weights, padding included. The results are the same as without the limit."""
    service, engine = recorded(tmp_path, attention_heads=(2, 3))
    body = {"inputs": ["good " * count for count in (3, 9, 28, 5, 5, 14, 5, 5)]}

    async def check(client: httpx.AsyncClient) -> None:
        whole = (await client.post("/attention", json=body)).json()
        assert max(map(len, engine.runs)) > 1, "no batch was made"
        engine.runs.clear()
        monkeypatch.setattr("bertserve.service.models.runner.MAX_WEIGHTS", 2 * 5 * 11**2)
        assert_same(whole, (await client.post("/attention", json=body)).json())
        runs = [(len(run), max(map(len, run))) for run in engine.runs]
        assert [] == [(rows, length) for rows, length in runs if rows > 1 and rows * 5 * length**2 > 2 * 5 * 11**2]
        assert {30, 16} < {length for rows, length in runs if rows == 1}

    play(service, check)
