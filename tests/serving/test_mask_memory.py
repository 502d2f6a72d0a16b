"""The memory of fill-mask is bounded, both for the vocabulary logits of a run, which can be gigabytes, and for the results."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

import tiny
from application import play
from bertserve.service.engine.engines import Engines
from bertserve.service.models.build import build
from bertserve.service.settings import Settings
from fakes import RecordingEngine

MASKS = (1, 3, 2, 5, 1, 1, 4, 2)


def masks_of(engine: RecordingEngine) -> list[int]:
    return [sum(len(encoding.masks) for encoding in run) for run in engine.runs]


def test_a_batch_of_many_masks_runs_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.bundle(tmp_path, "masks", task="fill-mask")
    service = build(Settings(models=tmp_path, threads=1))
    model = service.registry.get("masks")
    engine = RecordingEngine(model.runner.engines.single_threaded)
    model.runner.engines = Engines(engine)
    texts = [" ".join(["[MASK] good"] * count) for count in MASKS]

    async def check(client: httpx.AsyncClient) -> None:
        async def ask() -> list[list[list[str]]]:
            answer = await client.post("/fill-mask", json={"inputs": texts})
            assert 200 == answer.status_code, answer.text
            answers = [masks if isinstance(masks[0], list) else [masks] for masks in answer.json()]
            return [[[one["token_str"] for one in mask] for mask in masks] for masks in answers]

        whole = await ask()
        assert max(masks_of(engine)) > 5, "no batch was cut"
        engine.runs.clear()
        monkeypatch.setattr("bertserve.service.models.runner.MAX_LOGITS", 4 * len(tiny.VOCABULARY))
        assert whole == await ask()
        assert (sum(MASKS), 5) == (sum(masks_of(engine)), max(masks_of(engine)))
        assert [5] == [masks for masks in masks_of(engine) if masks > 4]

    play(service, check)
