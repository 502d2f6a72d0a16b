"""The text about a calibration, for the terminal and the bundle's card, and its reliability diagram."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bertserve.export.aim import Aim
from bertserve.service.bundle.calibration import Bin, Calibration, Interval, Threshold
from bertserve.service.bundle.files import CARD_FILE
from bertserve.service.bundle.graph_spec import GraphSpec

HEADING = "## Calibration"
# scores and shares go from 0 to 100, at 3 pixels each; y grows downwards
DIAGRAM = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -12 124 128" width="372" height="384" \
font-family="sans-serif" font-size="5">
<rect x="-12" y="-12" width="124" height="128" fill="#fff"/>
<path d="M0 0H100V100H0ZM0 100L100 0" fill="none" stroke="#888" stroke-width="0.4"/>
<g fill="none" stroke-linecap="round"><path d="M{raw}" stroke="#c50"/><path d="M{calibrated}" stroke="#06c"/></g>
<text x="0" y="-4">share of correct predictions: <tspan fill="#c50">raw</tspan>, <tspan fill="#06c">calibrated</tspan></text>
<text x="-2" y="2" text-anchor="end">1</text><text x="-2" y="106" text-anchor="end">0</text>
<text x="50" y="107" text-anchor="middle">score</text><text x="100" y="107" text-anchor="middle">1</text>
</svg>
"""


def describe(calibration: Calibration) -> str:
    """Returns parameters, numbers of examples, measures with 95 % intervals for raw and for calibrated scores, and thresholds."""
    has_lines = len(calibration.scale) > 1 or any(calibration.bias)
    parameters = "scale and bias of each label" if has_lines else f"temperature {calibration.temperature:.3g}"
    measures = {"log_loss": "log loss", "brier": "Brier score", "ece": "ECE", "auroc": "AUROC"}
    return "\n  ".join(
        [
            f"{parameters}, fitted on {calibration.fitted} examples and tested on {calibration.tested} others",
            *(
                f"{text:<11} {_interval(getattr(calibration.before, name))} -> {_interval(getattr(calibration.after, name))}"
                for name, text in measures.items()
            ),
            *map(_describe_threshold, calibration.thresholds),
        ]
    )


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def _describe_threshold(threshold: Threshold) -> str:
    aim = Aim(threshold.aim, threshold.target, threshold.label)
    errors = {"recall": "correct ones are below it", "coverage": "label sets lack the correct label"}
    return (
        f"`{aim}`: scores of at least {threshold.threshold:.4f} decide {threshold.decided:.1%}; {threshold.error:.2%} of "
        f"{threshold.examples} {errors.get(threshold.aim, 'decided are wrong')}, at most {aim.max_error:.2%} at 95 % confidence"
    )


def card_texts(card: str, graphs: Sequence[GraphSpec]) -> dict[str, str]:
    """Returns a card and its reliability diagrams by file name.

    The section about calibrated graphs replaces an earlier one, or comes before the section "Origin". There is a diagram in SVG for each
    calibrated graph: the share of correct predictions by mean score.
    """
    before, origin, after = card.partition("## Origin\n")  # then follows the checkpoint's card, which may have a section of this name
    before = re.sub(rf"^{HEADING}\n.*?(?=^## |\Z)", "", before, flags=re.MULTILINE | re.DOTALL)
    parts, texts = [HEADING], dict[str, str]()
    for graph in graphs:
        if graph.calibration is not None:
            name = f"reliability.{graph.provider}.{graph.precision}.svg"
            texts[name] = DIAGRAM.format(raw=_line(graph.calibration.before.bins), calibrated=_line(graph.calibration.after.bins))
            parts.append(f"```\n{graph.name}: {describe(graph.calibration)}\n```\n\n![Share of correct predictions by score]({name})")
    section = parts if texts else []
    return texts | {CARD_FILE: "\n\n".join([before.rstrip(), *section, f"{origin}{after}"]).rstrip() + "\n"}


def _line(bins: Sequence[Bin]) -> str:
    """Returns the commands of a path; the last one makes a dot of a single bin."""
    return "L".join(f"{100 * bin_.score:.1f} {100 * (1 - bin_.correct):.1f}" for bin_ in bins) + "h0"
