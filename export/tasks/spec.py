"""ExportTask: all that the exporter needs to know of a task. Loading, samples, evidence, stored examples and `verify --data` follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bertserve.export.input_fields import Document
from bertserve.export.tasks.metrics import result_spans
from bertserve.export.tasks.texts import Arranged, Pairs, read_alone
from bertserve.service.bundle.graph_spec import Measure, OutputSpec
from bertserve.service.bundle.manifest import Activation, SpecialPiece, TokenizerSpec
from bertserve.service.tasks.batch import ModelConfig
from bertserve.service.text.windows import default_stride

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from bertserve.export.calibration import Texts

MIN_LENGTH = 16  # tokens; the tracer and the samples need as many


@dataclass(frozen=True)
class TokenizerCall:
    """How the Hugging Face tokenizer makes the inputs of a request.

    Attributes:
        texts: A text, a pair, or two lists of as many texts for a request that has several pairs.
        truncation: Its strategy.
        stride: Tokens that neighboring windows share; None for a request that is one window.
        length: Most tokens of a window; None for the model's.
    """

    texts: tuple[Any, ...]
    truncation: str = "longest_first"
    stride: int | None = None
    length: int | None = None


def window_stride(requested: int | None, spec: TokenizerSpec) -> int:
    """Returns how many tokens the windows of a single text share: as many as a request says, or the default of the service."""
    specials = sum(isinstance(piece, SpecialPiece) for piece in spec.single)
    return default_stride(spec.max_length - specials) if requested is None else requested


@dataclass(frozen=True, kw_only=True)
class ExportTask:
    """A task that a bundle can have. Requests and results are those of its `TaskSpec` of the service.

    Attributes:
        name: Its Hugging Face name.
        head: What the names of architectures with its head end with.
        auto_class: The class of transformers that loads them, by name.
        outputs: Outputs of its graphs. A graph with outputs per mask has the positions of masks as an input.
        labeled: Whether the configuration's labels belong to it.
        activation: What turns logits into scores; None where the configuration says it.
        embeds: Whether a result is vectors, made of layers by a pooling, as sentence-transformers' files say.
        min_length: Fewest tokens that a model must take.
        lora_type: How peft names the task; None where it has no name for it.
        takes_modules: Whether a module of the user's own may be for it.
        adapt_model: Makes a loaded model take rows of [rows, length] and give out what the graphs do; None where it does so already.

        text_request: A text -> a request around it.
        fixed_requests: Requests of every kind, on which each graph must answer as the checkpoint does; None for one around each built-in text.
        ordinary_requests: Texts that int8 is judged on -> a request for each text, each passage and each pair; None for one around each text.
        full_length_request: A text, and a length in tokens -> a request of one window of that length; None for one around the text.
        resolve: A request -> the same with what it leaves open, as the bundle says it.
        tokenizer_call: A request -> how the Hugging Face tokenizer makes its inputs.
        example: The body that a bundle stores with its answer; it must be clear, so that rounding on another CPU does not change it.
        takes_pairs: Whether an input may be a pair of texts, in the user's texts for int8 too.
        arrange: Short texts, long ones (none where there are no short ones), the user's pairs, and whether the model takes only pairs -> the
            texts that calibrate int8 alone, and the pairs that do.
        first_is_question: Whether the first text of a pair is short, and the second gets the room.

        measure: How agreement is measured.
        decision: A result -> what a user takes from it: spans or a set of labels to count, a number to rank, or else anything to compare.
        best_first: Whether a result is a list with the best score first, or a list of such lists.

        read_gold: A line of data -> the right answer, or None for none. It raises ValueError for one that is not understood. None if the
            task has no right answers.
        data_parameters: The parameters of all lines, and their right answers -> the parameters that requests get.
        figures: The names of what `score` returns, without those of which less is better.
        score: Right answers, and results -> figure -> its value.
        notes: Right answers, and results -> figure -> what a reader must know of it, such as that it has no value.
    """

    name: str
    head: str
    auto_class: str
    outputs: tuple[OutputSpec, ...]
    labeled: bool = False
    activation: Activation | None = "softmax"
    embeds: bool = False
    min_length: int = MIN_LENGTH
    lora_type: str | None = None
    takes_modules: bool = False
    adapt_model: Callable[[PreTrainedModel], None] | None = None

    text_request: Callable[[str, TokenizerSpec], Any]
    fixed_requests: Callable[[TokenizerSpec], list[Any]] | None = None
    ordinary_requests: Callable[[Texts, TokenizerSpec], list[Any]] | None = None
    full_length_request: Callable[[str, int], Any] | None = None
    resolve: Callable[[Any, ModelConfig], Any] = lambda request, config: request
    tokenizer_call: Callable[[Any, TokenizerSpec], TokenizerCall] = lambda request, spec: TokenizerCall((request.text,))
    example: Callable[[TokenizerSpec], dict[str, Any]]
    takes_pairs: bool = False
    arrange: Callable[[Sequence[Any], Sequence[Any], Pairs[Any], bool], Arranged[Any]] = read_alone
    first_is_question: bool = False

    measure: Callable[[ModelConfig], Measure] = lambda config: "label"
    decision: Callable[[Any, ModelConfig], Any] = lambda result, config: result_spans(result) or result
    best_first: bool = False

    read_gold: Callable[[Document, ModelConfig], Any] | None = None
    data_parameters: Callable[[Sequence[Document], Sequence[Any]], Sequence[Document]] = lambda own, golds: own
    figures: tuple[str, ...] = ()
    score: Callable[[Sequence[Any], Sequence[Any], ModelConfig], dict[str, float]] | None = None
    notes: Callable[[Sequence[Any], Sequence[Any], ModelConfig], dict[str, str]] = lambda golds, results, config: {}

    @property
    def fills_masks(self) -> bool:
        """Whether its graphs have an output per mask, so that its models need a mask token."""
        return any(output.kind == "per_mask" for output in self.outputs)
