"""Fixtures of tests of the stages before quantization, which name this module as one of their `pytest_plugins`."""

from __future__ import annotations

import pytest

from staged import ARCHITECTURES, Staged, checkpoint_of, stage


@pytest.fixture(name="all_staged", scope="session")
def all_staged_graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Staged]:
    """The graphs of a checkpoint of each task after each stage."""
    folder = tmp_path_factory.mktemp("staged")
    return {task: stage(checkpoint_of(folder, task), folder / f"stages-{task}") for task in ARCHITECTURES}


@pytest.fixture(name="staged", params=list(ARCHITECTURES))
def staged_graphs(request: pytest.FixtureRequest, all_staged: dict[str, Staged]) -> Staged:
    """The graphs of each task in turn."""
    return all_staged[request.param]
