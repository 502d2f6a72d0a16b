"""Fixtures for all tests."""

import asyncio
import gc
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import uvloop

from bertserve.service import logs
from bertserve.service.bundle.files import load_bundle
from bertserve.service.server import serve
from bertserve.service.text.tokenizer import Tokenizer
from support import tiny
from support.scheduler_harness import Harness

# Other load on the machine slows the examples down. This must not fail a test. Each run of CI has other examples.
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=40, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Excludes libraries and tests from garbage collection, because they live until the end; this saves a fifteenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in uvloop, with a timeout of 20 s, within its fixtures that are asynchronous context managers."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def run() -> None:
        async with AsyncExitStack() as stack:
            for fixture in fixtures.values():
                if isinstance(fixture, AbstractAsyncContextManager):
                    await stack.enter_async_context(fixture)
            await asyncio.wait_for(test(**fixtures), 20)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    return True


@pytest.fixture(autouse=True, scope="session")
def no_settings_from_outside() -> Iterator[None]:
    """Removes the BERT_SERVE_* variables of the environment, so that they cannot change a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("BERT_SERVE_"):
                patch.delenv(name)
        yield


@pytest.fixture(name="models")
def models_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    tiny.bundle(folder)
    return folder


@pytest.fixture(name="harness")
def scheduler_under_test(request: pytest.FixtureRequest) -> Harness:
    """Returns a scheduler that runs during the test. The mark `harness` has its options, and as `kind` its class."""
    mark = request.node.get_closest_marker("harness")
    options = {"kind": Harness} | (mark.kwargs if mark else {})
    return options.pop("kind")(**options)


@pytest.fixture(name="tokenizer", scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Returns the tokenizer of the tiny bundle, with a limit of 30 tokens for a text and 29 for a pair."""
    bundle = load_bundle(tiny.bundle(tmp_path_factory.mktemp("tokenizer")))
    return Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)


@pytest.fixture
def logging_of_pytest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prevents a command from replacing the log handlers and the log level of the test run."""
    for module in (logs, serve):
        monkeypatch.setattr(module, "configure_logging", lambda _: None)
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `bert-serve score` predict 16 rows at a time, so that small files have several parts."""
    monkeypatch.setattr("bertserve.service.scoring.predictor.BLOCK_ROWS", 16)


@pytest.fixture(name="api", scope="session")
def service_of_every_task(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Returns a function that sends requests to a service with a tiny model of every kind. Some test files define their own `api`."""
    from support.app_client import open_api

    return open_api(tiny.every_kind(tmp_path_factory.mktemp("models")))
