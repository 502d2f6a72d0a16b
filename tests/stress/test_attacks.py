"""Attacks on a service, each measured from outside: no stalls, bounded memory, no killed workers, and answers to other callers.

`make test` runs the attacks of `EVERY_RUN`, and one attack per path on all fields of its body, each for a quarter of a second.
`make test-all` also runs the other attacks. `make stress` runs all attacks for seconds, with one attacker and with ten at the same time:
on one worker without keys or TLS, and on two workers with both. Attacks on the protocol also run with only keys, TLS or two workers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attack import Attack
from catalogue import ATTACKS
from field_attacks import path_attacks
from loads import LONG
from measure import AttackedService, Configuration, Outcome, show_table

pytestmark = pytest.mark.serial

PLAIN = Configuration("plain")
KEYS = Configuration("keys", keys=True, max_concurrent_per_key=8)
TLS = Configuration("tls", tls=True)
WORKERS = Configuration("workers", workers=2)
ALL = Configuration("all", workers=2, keys=True, tls=True)
ON_PROTOCOL = [attack for attack in ATTACKS if attack.kind == "protocol"]
BODIES = [attack for attack in ATTACKS if attack.kind == "body"]
# attacks that once stopped the service or filled its memory, and the most expensive attacks of each kind
EVERY_RUN = {
    "pipelined requests",
    "pipelined refusals",
    "trailers of a megabyte",
    "trailers without end",
    "chunks of a byte",
    "chunk extensions",
    "bodies without their last byte",
    "lines without their last byte",
    "slow readers of a large answer",
    "slow readers of a stream",
    "silent connections",
    "half of a TLS hello",
    "many headers",
    "wrong paths",
    "control characters in paths",
    "a stream of empty lines",
    "a stream of lines of containers",
    "streams of blank lines",
    "scrapes",
    "wrong keys",
    "1,000 answers from a long context",
    "100 fillings of a long text",
    "fillings of a text with a Greek letter",
    "the widest beam",
    "documents with more fields",
    "containers at the base URL",
    "containers at /invocations",
    "containers for a model",
    "instances of nothing",
    "unknown parameters",
    "nested tensors",
    "texts of half a million ids",
}


def _cases() -> list[tuple[Configuration, int, Attack]]:
    """Returns the cases as (configuration, number of attackers, attack). Cases with the same configuration are consecutive."""
    if not LONG:
        attacks = [*ON_PROTOCOL, *BODIES, *path_attacks()]
        handshakes = [attack for attack in ON_PROTOCOL if "TLS" in attack.name or attack.name == "handshakes"]
        return [*((PLAIN, 1, attack) for attack in attacks), *((TLS, 1, attack) for attack in handshakes)]
    return [
        (configuration, attackers, attack)
        for configurations, attacks in (((PLAIN, ALL), ATTACKS), ((KEYS, TLS, WORKERS), ON_PROTOCOL))
        for configuration in configurations
        for attackers in (1, 10)
        for attack in attacks
    ]


def _is_in_every_run(attack: Attack) -> bool:
    """Returns whether `make test` runs an attack. `make stress` runs all attacks."""
    return LONG or attack.kind == "field" or attack.name in EVERY_RUN


class Services:
    """Runs one service at a time, in the last requested configuration: an attacked service must not share its cores with another."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._last: tuple[Configuration, AttackedService] | None = None

    def of(self, configuration: Configuration) -> AttackedService:
        if self._last is None or self._last[0] is not configuration:
            self.stop()
            self._last = (configuration, AttackedService(configuration, self._factory.mktemp(configuration.name)))
        return self._last[1]

    def stop(self) -> None:
        if self._last is not None:
            self._last[1].stop()
        self._last = None


@pytest.fixture(name="services", scope="module")
def all_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    services = Services(tmp_path_factory)
    yield services
    services.stop()


@pytest.fixture(name="outcomes", scope="module")
def all_outcomes() -> Iterator[list[Outcome]]:
    """Yields a list for the outcomes of all attacks, and prints it as a table at the end."""
    outcomes: list[Outcome] = []
    yield outcomes
    show_table(outcomes)


@pytest.mark.parametrize(
    ("configuration", "attackers", "attack"),
    [
        pytest.param(*case, id=f"{case[2].name}-{case[0].name}-{case[1]}", marks=[] if _is_in_every_run(case[2]) else pytest.mark.full_grid)
        for case in _cases()
    ],
)
def test_an_attack_stays_within_the_limits(
    services: Services, outcomes: list[Outcome], configuration: Configuration, attackers: int, attack: Attack
) -> None:
    """Stalls, memory, worker processes and the answers to other callers are within the limits of `measure.py`."""
    outcome = services.of(configuration).measure(attack, attackers)
    outcomes.append(outcome)
    assert [] == outcome.breaches, outcome.line()
