"""The outputs of a run are bounded: the logits of masks, which can be gigabytes, and attention weights; and freed memory is returned."""

import ctypes
import mmap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.app_state import AppState
from bertserve.service.engine.freed_memory import return_freed_memory
from support import tiny
from support.app_client import assert_same, serving, state_of
from support.fakes import record_runs

MASKS = (1, 3, 2, 5, 1, 1, 4, 2)


def service_and_feeds(folder: Path, monkeypatch: pytest.MonkeyPatch, **bundle: Any) -> tuple[AppState, list[Any]]:
    """Returns a service with one thread and one model, and the inputs of each run of its graph."""
    feeds: list[Any] = []
    record_runs(monkeypatch, feeds.append)
    tiny.bundle(folder, **bundle)
    service = state_of(folder, threads=1)
    feeds.clear()
    return service, feeds


async def test_a_batch_of_many_masks_runs_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, feeds = service_and_feeds(tmp_path, monkeypatch, task="fill-mask")
    body = {"inputs": [" ".join(["[MASK] good"] * count) for count in MASKS]}
    async with serving(service) as client:
        whole = (await client.post("/fill-mask", json=body)).json()
        assert max(len(feed["mask_index"]) for feed in feeds) > 5, "no batch was cut"
        feeds.clear()
        monkeypatch.setattr("bertserve.service.models.batch_run.MAX_OUTPUT_VALUES", 4 * len(tiny.VOCABULARY))
        assert_same((await client.post("/fill-mask", json=body)).json(), whole)
        masks = [len(feed["mask_index"]) for feed in feeds]
        assert sum(masks) == sum(MASKS)
        assert [count for count in masks if count > 4] == [5]


async def test_a_batch_of_many_weights_runs_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, feeds = service_and_feeds(tmp_path, monkeypatch, attention_heads=(2, 3))
    body = {"inputs": ["good " * count for count in (3, 9, 28, 5, 5, 14, 5, 5)]}
    async with serving(service) as client:
        whole = (await client.post("/attention", json=body)).json()
        assert max(len(feed["input_ids"]) for feed in feeds) > 1, "no batch was made"
        feeds.clear()
        monkeypatch.setattr("bertserve.service.models.batch_run.MAX_OUTPUT_VALUES", 2 * 5 * 11**2)
        assert_same((await client.post("/attention", json=body)).json(), whole)
        runs = [feed["input_ids"].shape for feed in feeds]
        assert [(rows, length) for rows, length in runs if rows > 1 and rows * 5 * length**2 > 2 * 5 * 11**2] == []
        assert {30, 16} <= {length for rows, length in runs if rows == 1}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_freed_memory_leaves_the_process_after_work() -> None:
    """Glibc keeps a hole below an object in use, unless it is told to return it."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("needs glibc")
    objects = [bytes(1000) for _ in range(200_000)]
    last = bytes(1000)
    objects.clear()
    before, stop = resident_bytes(), threading.Event()
    thread = threading.Thread(target=return_freed_memory, args=(stop,), kwargs={"interval_s": 0.01, "work_s": 0.0})
    thread.start()
    end = time.monotonic() + 10
    while before - resident_bytes() < 2**26 and time.monotonic() < end:
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert last
    assert before - resident_bytes() > 2**26
