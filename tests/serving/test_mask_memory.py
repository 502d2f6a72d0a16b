"""The memory of fill-mask is bounded, both for the vocabulary logits of a run, which can be gigabytes, and for the results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import embedded
import tiny
from application import play
from bertserve.service.backend.engines import Engines
from bertserve.service.serving.build import build
from bertserve.service.settings import Settings
from bertserve.service.tasks import fill_mask
from bertserve.service.tasks.batch import Batch
from fakes import RecordingEngine
from task_runs import begin, send

MASKS = (1, 3, 2, 5, 1, 1, 4, 2)


def masks_of(engine: RecordingEngine) -> list[int]:
    return [sum(len(encoding.masks) for encoding in run) for run in engine.runs]


def test_a_batch_of_many_masks_runs_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.bundle(tmp_path, "masks", task="fill-mask")
    service = build(Settings(models=tmp_path, threads=1))
    model = service.registry.get("masks")
    engine = RecordingEngine(model.engines.single_threaded)
    model.engines = Engines(engine)
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
        monkeypatch.setattr("bertserve.service.serving.model.MAX_LOGITS", 4 * len(tiny.VOCABULARY))
        assert whole == await ask()
        assert (sum(MASKS), 5) == (sum(masks_of(engine)), max(masks_of(engine)))
        assert [5] == [masks for masks in masks_of(engine) if masks > 4]

    play(service, check)


def bytes_of(value: Any) -> int:
    """Returns the bytes of a result with its lists, objects, texts and numbers; equal values count each time."""
    parts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return sys.getsizeof(value) + sum(map(bytes_of, parts))


@pytest.mark.parametrize("masks", [1, 3])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("rest", ["", "good film " * 400, "good film " * 400 + "\u03b1"], ids=["short", "long", "two bytes per character"])
def test_results_stay_within_the_estimated_memory(masks: int, joint: bool, rest: str) -> None:
    """One Greek letter doubles the memory of each `sequence`."""
    bundle = embedded.load("fill-mask")
    assert bundle.tokenizer.mask is not None
    text = f"{bundle.tokenizer.mask.token} " * masks + rest
    parameters = fill_mask.FillMaskParameters(top_k=60, joint=joint)
    begun = begin(fill_mask, fill_mask.FillMaskRequest(text, parameters), bundle.tokenizer, bundle.manifest)
    counted, random = 4 * begun.batch.cost.memory, np.random.default_rng(0)
    result: Any = begun.batch
    while isinstance(result, Batch):
        shapes = [(len(encoding.masks), bundle.tokenizer.vocabulary_size) for encoding in result.encodings]
        result = send(begun.run, result, [{"logits": random.normal(size=shape).astype(np.float32)} for shape in shapes])
    assert bytes_of(result) <= counted
