"""Fixtures for all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import uvloop

import tiny
from bertserve.service.bundle.files import load_bundle
from bertserve.service.http import throttled
from bertserve.service.process import logs
from bertserve.service.text.tokenizer import Tokenizer

BERT_SERVE = "import sys; from bertserve.service.cli import main; sys.exit(main())"
# the same, without the pause between two runs of a `Throttled` function, and with patience for a worker that the machine keeps from running
UNTHROTTLED = (
    "from bertserve.service.http import throttled; from bertserve.service.process import supervisor; "
    f"throttled.INTERVAL_S, supervisor.HUNG_S = 0.0, 5.0; {BERT_SERVE}"
)
ROOT = Path(__file__).parent.parent
# An example takes as long as the machine makes it: what else runs there must not fail a test.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Takes libraries and tests, which stay to the end, out of what the garbage collector looks at: a fifteenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine in uvloop, within 20 seconds."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(**fixtures), 20))
    return True


@pytest.fixture(autouse=True, scope="session")
def no_settings_from_outside() -> Iterator[None]:
    """A BERT_SERVE_* variable of the caller's must not change a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("BERT_SERVE_"):
                patch.delenv(name)
        yield


@pytest.fixture(autouse=True, scope="session")
def metrics_need_no_wait() -> Iterator[None]:
    """Tests read /metrics often, and not for its cost; tests/serving/test_throttled.py is about that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throttled, "INTERVAL_S", 0.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def exports_stay_offline(request: pytest.FixtureRequest) -> Iterator[None]:
    """An export test must not look for what is missing on the network; the official client, elsewhere, must reach loopback."""
    with pytest.MonkeyPatch.context() as patch:
        if "exporting" in request.path.parts:
            # HF_HUB_OFFLINE itself is read at the first import only
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(autouse=True, scope="module")
def exports_trace_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """A tiny model takes dynamo 3 s and TorchScript 0.2 s; tests/exporting/test_tracers.py is about what both give, and asks for either."""
    with pytest.MonkeyPatch.context() as patch:
        if "exporting" in request.path.parts:
            patch.setattr("bertserve.export.trace.TRACERS", ("torchscript",))
        yield


@pytest.fixture(name="models")
def models_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    tiny.bundle(folder)
    return folder


@pytest.fixture(name="tokenizer", scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of the tiny bundle: room for 30 tokens of a text, 29 of a pair."""
    loaded = load_bundle(tiny.bundle(tmp_path_factory.mktemp("tokenizer")))
    return Tokenizer(loaded.tokenizer_path, loaded.manifest.tokenizer)


@pytest.fixture
def logging_of_pytest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command must not replace the log handlers of the test run, nor their level."""
    monkeypatch.setattr(logs, "configure_logging", lambda _: None)
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture(name="api", scope="session")
def service_of_every_task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Sends requests to a service with a tiny model of every kind; files that need other models have their own `api`."""
    from application import started

    with started(tiny.every_kind(tmp_path_factory.mktemp("models"))) as send:
        yield send


def wait_until(holds: Callable[[], bool], limit_s: float = 60) -> None:
    """Waits until something holds, and fails when that never happens: a minute is far more than it takes on a busy machine."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def metric(page: str, name: str, **labels: str) -> float:
    """Returns the sum of the samples of one of the service's metrics that have these labels."""
    samples = re.findall(rf"^bertserve_{name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
    return sum(float(value) for given, value in samples if all(f'{label}="{text}"' in given for label, text in labels.items()))


def without_shutdown(log: str) -> list[str]:
    """Returns the lines of a log that are not about the start and the end of a shutdown."""
    return [line for line in log.splitlines() if "shutdown started" not in line and "shutdown finished" not in line]


class Served:
    """A `bert-serve serve` process under test."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def lines(self) -> list[str]:
        """Returns the lines of its log without the lines of an ordinary shutdown."""
        return without_shutdown(self.log.read_text())


@contextmanager
def running(models: Path, log: Path, *flags: str, program: str = UNTHROTTLED) -> Iterator[Served]:
    """Runs the real command on a free port until the block ends."""
    command = [sys.executable, "-c", program, "serve", "--models", str(models), "--port", "0", *flags]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if " listens on " in line:
                    break
            else:
                raise AssertionError(f"the service did not start: {log.read_text()}")
            yield Served(process, line.split(" listens on ")[1].split(",")[0], log)
        finally:
            process.terminate()
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(name="serve")
def serve_fixture(tmp_path: Path) -> Callable[..., object]:
    return lambda models, *flags: running(models, tmp_path / f"serve-{time.monotonic_ns()}.log", *flags)
