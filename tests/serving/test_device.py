"""Texts of many callers share the runs of a GPU, although each caller waits for its answer before it sends the next text."""

import pytest

from device import Device, service, texts_per_run


@pytest.mark.parametrize("threads", [1, 2])
def test_long_single_texts_of_many_callers_share_runs(threads: int) -> None:
    """They are tokenized while earlier runs are active, and 16 fit into a run. If inference threads tokenized them, each would run alone."""
    device = Device()
    with service(device, threads=threads) as state:
        assert texts_per_run(device, state, words=400, callers=64, seconds=3, slower=20.0) >= 8
