"""Helpers of the tests. The modules start services, make bundles and checkpoints, and send requests."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def wait_until(holds: Callable[[], bool], limit_s: float = 60) -> None:
    """Waits until a condition holds, and fails after the limit. A minute is far more than a busy machine needs."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"the condition did not hold within {limit_s:g} s"
        time.sleep(0.02)


async def until(holds: Callable[[], bool]) -> None:
    """Waits in an event loop until a condition holds."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


def variables(path: Path) -> dict[str, str]:
    """Returns the variables of an environment file."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def json_lines(path: Path, *lines: Any) -> Path:
    """Writes a JSON Lines file and returns its path; strings are written unchanged, other values as JSON."""
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def metric(page: str, name: str, **labels: str) -> float:
    """Returns the sum of the samples of a service metric that have these labels."""
    samples = re.findall(rf"^bertserve_{name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
    return sum(float(value) for pairs, value in samples if all(f'{label}="{text}"' in pairs for label, text in labels.items()))


@contextmanager
def raises_exactly(kind: type[Exception], match: str | None = None) -> Iterator[Any]:
    """Like `pytest.raises`, but an error of a subclass fails the test."""
    import pytest  # attackers, whose processes import this package, do not need it

    with pytest.raises(kind, match=match) as info:
        yield info
    assert info.type is kind
