"""Whether a bundle's evidence is enough for this operator. Pure: the manifest says what was measured at export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from service.bundle.graph_spec import Evidence, GraphSpec
from service.bundle.manifest import Figure
from service.errors import BundleError

# Below this agreement with the checkpoint a graph is warned of, and int8 is not the default one unless it was asked for.
ENOUGH_AGREEMENT = 0.98
# What a figure of labeled data may differ from the checkpoint's.
NEAR = 0.01
_Z = 1.96  # of a normal distribution, for 95 %


def is_low(evidence: Evidence) -> bool:
    """Returns whether a graph agrees with its checkpoint less than `ENOUGH_AGREEMENT`; without samples nothing is known.

    Of entities and answers their F1 counts: a text of ten entities may differ in one. Of all else the share of texts does.
    """
    agreement = evidence.label_agreement if evidence.span_agreement is None else evidence.span_agreement
    return evidence.samples > 0 and agreement < ENOUGH_AGREEMENT


def is_measured_near(figures: Sequence[Figure], graph: str) -> bool:
    """Returns whether labeled data, which say more than agreement, show a graph as good as its checkpoint.

    Args:
        figures: Those of the manifest.
        graph: The graph as `provider/precision`.
    """
    own = [(figure.checkpoint, figure.graphs[graph]) for figure in figures if graph in figure.graphs]
    return bool(own) and all(abs(checkpoint - measured) <= NEAR for checkpoint, measured in own)


def agreement_range(evidence: Evidence) -> tuple[float, float]:
    """Returns where the share of answers that agree lies with 95 % confidence, on texts like the samples (Wilson's interval).

    Args:
        evidence: Evidence with samples.
    """
    n, share = evidence.samples, evidence.label_agreement
    center, spread = share + _Z**2 / (2 * n), _Z * math.sqrt(share * (1 - share) / n + (_Z / (2 * n)) ** 2)
    return max(0.0, (center - spread) / (1 + _Z**2 / n)), min(1.0, (center + spread) / (1 + _Z**2 / n))


def describe_agreement(evidence: Evidence) -> str:
    """Returns the share of answers that agree with the checkpoint's, in words; of a quantized graph with what so few samples can say.

    Of a float graph the logits themselves are within a bound, and no sample is needed for more than to find a fault.
    """
    if not evidence.samples:
        return "answers were not compared"
    low, high = agreement_range(evidence)
    sure = f" (95% confidence: {low:.1%} to {high:.1%})" if evidence.quantized else ""
    spans = "" if evidence.span_agreement is None else f", {evidence.spans} spans with an F1 of {evidence.span_agreement:.4f}"
    return f"answers agree on {evidence.label_agreement:.1%} of {evidence.samples} samples{sure}{spans}"


@dataclass(frozen=True, slots=True)
class EvidencePolicy:
    """What a graph's evidence must reach to be served.

    Attributes:
        required: Whether there must be evidence at all.
        min_agreement: Least share of parity inputs whose answer is the checkpoint's; asks for evidence too.
    """

    required: bool = False
    min_agreement: float | None = None

    def check(self, name: str, graph: GraphSpec) -> None:
        """Refuses a graph whose evidence is missing or too weak.

        Args:
            name: The bundle's name, for the message.
            graph: The graph that is to be served.

        Raises:
            BundleError: It is; the message has the bundle, its figure, the floor, and what to do.
        """
        which, evidence = f"bundle `{name}`, graph {graph.provider}/{graph.precision}", graph.evidence
        if not evidence.samples and (self.required or self.min_agreement is not None):
            flag = "--require-evidence is set" if self.required else f"--min-agreement is {self.min_agreement}"
            raise BundleError(
                f"{which}: its manifest has no evidence (0 parity inputs), and {flag}; export it again with bert-export, which measures "
                "it, or serve without the setting."
            )
        if self.min_agreement is not None and evidence.label_agreement < self.min_agreement:
            raise BundleError(
                f"{which}: its answers agree with the checkpoint's on {evidence.label_agreement:.4f} of {evidence.samples} parity inputs, "
                f"below --min-agreement, which is {self.min_agreement}; choose a graph that is closer (--precision fp32), export again "
                "with a lower `bert-export --max-int8-error` or with --calibration texts of your own, or lower the floor."
            )


ACCEPT_ANY = EvidencePolicy()
