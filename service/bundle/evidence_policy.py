"""Whether a bundle's evidence is enough for this operator. Pure: the manifest says what was measured at export."""

from __future__ import annotations

from dataclasses import dataclass

from service.bundle.graph_spec import GraphSpec
from service.errors import BundleError


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
