"""Runs of a graph: batches without padding, outputs of all texts, and the error between outputs."""

from __future__ import annotations

import numpy as np
import pytest

from bertserve.export import inference
from staged import Staged, run

pytestmark = pytest.mark.torch
pytest_plugins = ("export_fixtures",)

TEXTS = ["a good film", "the book was very dull !", "a bad film", "good", "the film was very good !", "a fine book"]


def test_a_batch_has_texts_of_one_length(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest texts come first, batches have limited sizes, and outputs equal those of each text alone."""
    monkeypatch.setattr(inference, "BATCH_SIZE", 2)
    feeds = staged.feeds(TEXTS)
    batches = inference.batches(feeds)
    sizes = [(len(batch["input_ids"]), inference.tokens(batch)) for batch in batches]
    alone = {feed["input_ids"].tobytes(): run(staged.packed, feed) for feed in feeds}

    assert sorted(sizes, key=lambda size: -size[1]) == sizes
    assert len(feeds) == sum(count for count, _ in sizes)
    assert 2 == max(count for count, _ in sizes) > min(count for count, _ in sizes)
    for batch in batches:
        expected = [alone[row.tobytes()] for row in batch["input_ids"]]
        for place, together in enumerate(run(staged.packed, batch)):
            np.testing.assert_allclose(np.concatenate([outputs[place] for outputs in expected]), together, rtol=0, atol=1e-5)
