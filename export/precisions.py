"""The precisions that graphs of each provider are made in. It imports nothing heavy, because the command checks its flags with it."""

from __future__ import annotations

from collections.abc import Sequence

from bertserve.service.bundle.graph_spec import Precision
from bertserve.service.providers import PROVIDERS, Provider


def choose_precisions(providers: Sequence[Provider], requested: Sequence[Precision] | None) -> dict[Provider, tuple[Precision, ...]]:
    """Returns the precisions to make for each provider, in the given order; the last of each is its default graph.

    Args:
        providers: Different providers.
        requested: Different precisions; None for all that each provider has.

    Raises:
        ValueError: A precision is made for none of the providers, or a provider is left with none.
    """
    have = {provider: PROVIDERS[provider].precisions for provider in providers}
    chosen = {provider: tuple(p for p in (requested or known) if p in known) for provider, known in have.items()}
    for precision in requested or ():
        if not any(precision in precisions for precisions in chosen.values()):
            raise ValueError(f"`{precision}` is made for none of {', '.join(providers)}: {_list_precisions()}")
    for provider, precisions in chosen.items():
        if not precisions:
            raise ValueError(f"`{', '.join(requested or ())}` leaves nothing to make for {provider}: {_list_precisions()}")
    return chosen


def _list_precisions() -> str:
    return "; ".join(f"{name} takes {', '.join(provider.precisions)}" for name, provider in PROVIDERS.items())
