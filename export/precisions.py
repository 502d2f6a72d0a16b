"""Which graphs a bundle may hold: the precisions of each provider. Imports nothing heavy, for flags are checked with it."""

from __future__ import annotations

from collections.abc import Sequence

from service.bundle.graph_spec import Precision, Provider

# int8 products are slower than float ones on ONNX Runtime's CUDA provider, and half ones on its CPU provider
PRECISIONS: dict[Provider, tuple[Precision, ...]] = {"cpu": ("fp32", "int8"), "cuda": ("fp32", "fp16"), "tensorrt": ("fp32", "fp16")}


def choose(providers: Sequence[Provider], given: Sequence[Precision] | None) -> dict[Provider, tuple[Precision, ...]]:
    """Returns the precisions to make for each provider, in the order given; the last of each is its default graph.

    Args:
        providers: Different providers.
        given: Different precisions; None stands for all that each provider has.

    Raises:
        ValueError: A precision is made for none of the providers, or a provider is left with none.
    """
    chosen = {provider: tuple(p for p in (given or PRECISIONS[provider]) if p in PRECISIONS[provider]) for provider in providers}
    for precision in given or ():
        if not any(precision in made for made in chosen.values()):
            raise ValueError(f"`{precision}` is made for none of {', '.join(providers)}: {_all()}")
    for provider, made in chosen.items():
        if not made:
            raise ValueError(f"`{', '.join(given or ())}` leaves nothing to make for {provider}: {_all()}")
    return chosen


def _all() -> str:
    return "; ".join(f"{provider} takes {', '.join(precisions)}" for provider, precisions in PRECISIONS.items())
