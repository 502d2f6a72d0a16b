"""The energy that the processors counted, where they do and show it. CPU time, which `timing` has, stands for energy anywhere.

Linux shows the counters of RAPL (Intel, and AMD under the same name) as files, which virtual machines lack and which most systems let
root alone read. They count the whole processor, with all other work on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_DOMAINS = Path("/sys/class/powercap")
_PACKAGE = "intel-rapl:[0-9]"  # a processor; `intel-rapl:0:1`, a part of one, is in it


@dataclass(frozen=True)
class Reading:
    """A reading of the counters.

    Attributes:
        microjoules: Of each processor, its counter and where that begins anew; None where one cannot be read.
    """

    microjoules: tuple[tuple[int, int], ...] | None

    def joules_until(self, later: Reading) -> float | None:
        """Returns the joules of all processors from this reading to a later one, or None if they are not counted."""
        if self.microjoules is None or later.microjoules is None:
            return None
        spent = ((end - start) % (most + 1) for (start, most), (end, _) in zip(self.microjoules, later.microjoules, strict=True))
        return sum(spent) / 1e6


def read(domains: Path = _DOMAINS) -> Reading:
    """Reads the counters.

    Args:
        domains: Folder of the processors' counters.
    """
    return Reading(_microjoules(domains))


def _microjoules(domains: Path) -> tuple[tuple[int, int], ...] | None:
    try:
        found = tuple(
            (int((domain / "energy_uj").read_text()), int((domain / "max_energy_range_uj").read_text()))
            for domain in sorted(domains.glob(_PACKAGE))
        )
    except (OSError, ValueError):
        return None
    return found or None
