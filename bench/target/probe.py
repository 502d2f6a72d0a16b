"""The first contact with a target: its mix is chosen by its model's task, and one request must be accepted before any load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertserve.bench.errors import BenchError
from bertserve.bench.target.address import parse_url
from bertserve.bench.target.fetch import fetch, model_info
from bertserve.bench.target.target import Target, build_target
from bertserve.bench.workload import bodies, endpoints, mixes

_TOO_MANY_REQUESTS = 429


def probe_target(text: str, headers: Mapping[str, str], *, texts: int, seed: int) -> tuple[Target, Mapping[str, Any] | None]:
    """Returns a target that has accepted one request, and what its endpoint says of its model.

    Args:
        text: `URL` or `URL=MIX`; without a mix, the default mix of the model's task is used.
        headers: Headers of every request.
        texts: Texts in each request.
        seed: Seed of a built-in mix.

    Raises:
        BenchError: The address, the mix or the file is wrong, or the endpoint refuses the first body.
    """
    url, equals, mix = text.rpartition("=")
    if not equals or ("?" in url and mix not in mixes.NAMES and not Path(mix).exists()):
        url, mix = text, ""
    address = parse_url(url)
    model = model_info(address, headers)
    mix = mix or endpoints.default_mix((model or {}).get("task", ""))
    mask = str((model or {}).get("mask_token") or mixes.MASK)
    target = build_target(address, mix, bodies.build_bodies(mix, path=address.path, texts=texts, seed=seed, mask=mask), headers)
    _send_first_request(target, headers)
    # a model's own `endpoint` is that of its task, which may not be the one under load
    shown = {k: v for k, v in (model or {}).items() if k not in ("endpoint", "evidence", "figures")}
    return target, {"endpoint": address.path, **shown} if model else None


def _send_first_request(target: Target, headers: Mapping[str, str]) -> None:
    """Sends the target's first body once.

    Raises:
        BenchError: No HTTP server answers, or it refuses such requests whatever the load.
    """
    status, raw = fetch(target.address, "POST", target.address.path, headers, target.bodies[0].content)
    if status < 200 or (300 <= status < 500 and status != _TOO_MANY_REQUESTS):
        try:
            message = str(json.loads(raw)["error"])
        except (ValueError, KeyError, TypeError):
            message = "no reason was given"
        raise BenchError(f"{target.address.url} answered {status} to a first request: {message}")
