"""`make compare`: ratios within rounds, and the helpers that start services on free ports."""

import compare
from compare import Load, Result


def test_the_speed_is_the_median_of_the_ratios_within_rounds() -> None:
    """A machine that becomes slower from round to round does not change it. The spread is the lowest and the highest ratio."""
    rounds = [{"base": [Result(rps, 2.0)], "new": [Result(rps * ratio, 1.0)]} for rps, ratio in ((400, 0.9), (200, 1.1), (100, 1.0))]
    [_, _, row] = compare.table("abc", [Load("short", "short", 16)], rounds)

    assert ["short", "16", "200.0", "220.0", "1.000", "0.900 to 1.100", "2.000", "1.000", "0.500"] == row.strip("| ").split(" | ")
