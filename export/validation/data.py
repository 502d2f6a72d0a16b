"""The checks of a graph's results for a user's data: its agreement with the baseline, and metrics by the correct answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.labeled_data import Line
from bertserve.export.validation.comparison import Comparison
from bertserve.service.bundle.validation_policy import summarize_agreement
from bertserve.service.errors import SHOWN_CHARS, nearest, plural

_SHOWN_KEYS = 10  # maximum number of ignored keys in the report


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: Name of the check.
        passed: Whether it passed; None for a measurement without a limit.
        detail: The result as text.
        metrics: The result as data.
    """

    name: str
    passed: bool | None
    detail: str
    metrics: dict[str, Any] = field(default_factory=dict)


def check_lines(lines: Sequence[Line], task: str, *, needed: bool) -> Check:
    """Counts the lines with a correct answer, and names ignored keys; the check fails if it is `needed` and no line has an answer."""
    gold_keys = TASKS[task].gold_keys
    labeled = sum(line.gold is not None for line in lines)
    counts = Counter(key for line in lines for key in line.ignored)
    detail = plural(len(lines), "line")
    if gold_keys:
        detail += f", {labeled} with a right answer ({' or '.join(f'`{key}`' for key in gold_keys)})"
    if counts:
        detail += "; ignored keys: " + ", ".join(_describe_key(key, count, gold_keys) for key, count in counts.most_common(_SHOWN_KEYS))
        detail += f" and {len(counts) - _SHOWN_KEYS} more" if len(counts) > _SHOWN_KEYS else ""
    passed = None
    if gold_keys and not labeled and needed:
        passed = False
        detail += "; add right answers, or give --min-agreement to compare only the graphs"
    return Check("data", passed, detail, {"inputs": len(lines), "labeled": labeled, "ignored_keys": dict(counts)})


def _describe_key(key: str, count: int, gold_keys: Sequence[str]) -> str:
    suggestion = nearest(key, gold_keys)
    hint = f", did you mean `{suggestion}`?" if suggestion else ""
    return f"`{key[:SHOWN_CHARS]}` ({plural(count, 'line')}{hint})"


def check_results(
    comparison: Comparison, lines: Sequence[Line], baseline: str | None, min_agreement: float | None, min_metrics: Mapping[str, float]
) -> Iterator[Check]:
    """Reports a graph's agreement with the baseline and its metrics, with their minimums; what was not measured fails a minimum."""
    served, agreement = comparison.served, comparison.agreement_on_texts
    required = "" if min_agreement is None else f"; at least {min_agreement} is required"
    if agreement is not None:
        passed = None if min_agreement is None else agreement.value is not None and agreement.value >= min_agreement
        metrics = {"inputs": len(lines), "reference": baseline, "agreement": agreement.value} | agreement.model_dump(exclude={"value"})
        worst = "" if agreement.worst is None else f", the worst {agreement.worst:.4f}"
        yield Check(f"agreement {served.name}", passed, f"against {baseline}: {summarize_agreement(agreement)}{worst}{required}", metrics)
    elif baseline is None or served.graph.precision != "fp32":
        detail = "not compared, because the bundle has no other fp32 graph; give --checkpoint" + required
        yield Check(f"agreement {served.name}", None if min_agreement is None else False, detail, {"inputs": len(lines)})
    record, labeled = TASKS[served.task], [i for i, line in enumerate(lines) if line.gold is not None]
    golds = [lines[i].gold for i in labeled]

    def score(results: Sequence[Any]) -> dict[str, float]:
        if not golds or not results or record.score is None:
            return {}
        return record.score(golds, [results[i] for i in labeled], served.config)

    scores, expected = score(comparison.results), score(comparison.expected)
    notes = record.notes(golds, [comparison.results[i] for i in labeled], served.config) if golds else {}
    for metric, value in scores.items():
        floor = min_metrics.get(metric)
        detail = (
            f"{value:.4f}" + (f" ({baseline} {expected[metric]:.4f})" if metric in expected else "") + f" on {len(golds)} labeled inputs"
        )
        detail += "" if floor is None else f"; at least {floor} is required"
        detail += f"; {notes[metric]}" if metric in notes else ""
        values = {"graph": value} | ({"reference": expected[metric]} if metric in expected else {})
        yield Check(f"{metric} {served.name}", None if floor is None else value >= floor, detail, values)
    for metric in min_metrics.keys() - scores.keys():
        reason = f"this model has {', '.join(scores)}" if scores else "no line of the data has a right answer"
        yield Check(f"{metric} {served.name}", False, f"not measured, but at least {min_metrics[metric]} is required: {reason}")
