"""From the command line to a target that has answered once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.target import address as addresses
from bench.target import info, target
from bench.target.target import Target
from bench.workload import bodies, mixes


def read_target(text: str, headers: Mapping[str, str], *, texts: int, seed: int) -> tuple[Target, Mapping[str, Any] | None]:
    """Returns a target that has answered once, and what its endpoint says of its model.

    Args:
        text: `URL` or `URL=MIX`; without a mix the one for the task of the endpoint's model.
        headers: Sent with every request.
        texts: Inputs of a request.
        seed: Of a built-in mix.

    Raises:
        BenchError: The address, the mix or the file is wrong, or the endpoint refuses the first body.
    """
    url, equals, mix = text.rpartition("=")
    if not equals or ("?" in url and mix not in mixes.NAMES and not Path(mix).exists()):
        url, mix = text, ""
    address = addresses.parse(url)
    model = info.model_info(address, headers)
    mix = mix or mixes.DEFAULTS.get((model or {}).get("task", ""), "short")
    made = target.make(address, mix, bodies.bodies(mix, path=address.path, texts=texts, seed=seed), headers)
    info.probe(made, headers)
    # a model's own `endpoint` is that of its task, which may not be the one under load
    shown = {k: v for k, v in (model or {}).items() if k not in ("endpoint", "evidence", "figures")}
    return made, {"endpoint": address.path, **shown} if model else None
