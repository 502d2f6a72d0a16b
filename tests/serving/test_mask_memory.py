"""What a fill-mask run gives out at once is bounded: scores of the whole vocabulary for each mask are gigabytes for a large batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

import tiny
from application import play
from bertserve.service.backend.engines import Engines
from bertserve.service.backend.onnx_engine import Engine, Row
from bertserve.service.serving.build import build
from bertserve.service.settings import Settings
from bertserve.service.text.tokenizer import Encoding

MASKS = (1, 3, 2, 5, 1, 1, 4, 2)


class Counting:
    """An engine that counts the masks of each run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.masks: list[int] = []

    def run(self, encodings: Sequence[Encoding]) -> list[Row]:
        self.masks.append(sum(len(encoding.masks) for encoding in encodings))
        return self.engine.run(encodings)


def test_a_batch_of_many_masks_runs_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run has more masks than it may hold scores for, but for a single text; the answers are the same."""
    tiny.bundle(tmp_path, "masks", task="fill-mask")
    service = build(Settings(models=tmp_path, threads=1))
    model = service.registry.get("masks")
    engine = Counting(model.engines.single_threaded)
    model.engines = Engines(engine)
    texts = [" ".join(["[MASK] good"] * count) for count in MASKS]

    async def check(client: httpx.AsyncClient) -> None:
        async def ask() -> list[list[list[str]]]:
            answer = await client.post("/fill-mask", json={"inputs": texts})
            assert 200 == answer.status_code, answer.text
            answers = [masks if isinstance(masks[0], list) else [masks] for masks in answer.json()]
            return [[[one["token_str"] for one in mask] for mask in masks] for masks in answers]

        whole = await ask()
        assert max(engine.masks) > 5, "no batch was cut"
        engine.masks.clear()
        monkeypatch.setattr("bertserve.service.serving.model.MAX_LOGITS", 4 * len(tiny.VOCABULARY))
        assert whole == await ask()
        assert (sum(MASKS), 5) == (sum(engine.masks), max(engine.masks))
        assert [5] == [masks for masks in engine.masks if masks > 4]

    play(service, check)
