"""Texts of many callers share the runs of a GPU, although each caller waits for its answer before it sends the next text."""

import pytest

from device import LOADS, Device, measure, service


@pytest.mark.parametrize("threads", [1, 2])
def test_long_single_texts_of_many_callers_share_runs(threads: int) -> None:
    """They are tokenized while earlier runs are active, and 16 fit into a run. If inference threads tokenized them, each would run alone."""
    words, texts, callers = LOADS["single texts of 400 words"]
    device = Device()
    with service(device, threads=threads) as state:
        assert measure(device, state, words=words, texts=texts, callers=callers, seconds=3, slower=20.0).rows >= 8
