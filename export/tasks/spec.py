"""ExportTask: all that the exporter needs to know of a task. Loading, samples, validation report, stored examples and `verify --data` follow from it.

The first part is what tasks share: the input in a JSON object of a user's file, with the field names of the service and of GLUE; the texts
that samples are made of; and how ordinary texts are read, one by one or as pairs of neighbors. The same pairs calibrate int8, as token ids,
and judge it, as texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bertserve.export.tasks.metrics import result_spans
from bertserve.service.bundle.graph_spec import Measure, OutputSpec
from bertserve.service.bundle.manifest import Activation, SpecialPiece, TokenizerSpec
from bertserve.service.tasks.batch import ModelConfig
from bertserve.service.text.windows import default_stride

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from bertserve.export.calibration import Texts

Document = dict[str, Any]
# the two texts of a pair, as we and as the data sets of GLUE name them
PAIRS = (("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"))

# the keys of a line of data that hold its input
INPUT_KEYS = frozenset({"inputs", "parameters", "question", "prompt", "context", "choices", "text", "sentence", "tokens"}.union(*PAIRS))

Text = TypeVar("Text")
Pairs = Sequence[tuple[Text, Text]]
Arranged = tuple[list[Text], list[tuple[Text, Text]]]  # texts that are read alone, and pairs
LONG = (
    "The first half hour promises a great deal, and the cast is more than willing to deliver it. "
    "Then the script begins to repeat itself, the jokes wear thin, and nobody seems to know how to stop. "
)
NAMES = "Ada Lovelace met Charles Babbage in London, and the Royal Society of Sweden invited Maria Agnesi from Milan to Uppsala. "
SENTENCE = "A warm, funny and thoroughly engaging film."
TEXTS = [
    "good",
    SENTENCE,
    "It isn't that the acting is bad; it's that there is none.",
    "¡Qué película más aburrida! 😴 看了两遍，还是觉得很好。",
    "naïve café — “quotes”, tabs\tand\r\nlines\u200b with zero width",
    "3.5/10, would not watch again @ £12.50!!!",
    NAMES,
    LONG,
    LONG * 2,
    LONG * 4,
]

MIN_LENGTH = 16  # tokens; the tracer and the samples need as many


def read_input(document: Document) -> Any:
    """Returns the input that an object holds, as the service takes it in `inputs`.

    Raises:
        ValueError: It holds none.
    """
    if "inputs" in document:
        return document["inputs"]
    if "choices" in document:
        return {name: document[name] for name in ("question", "prompt", "context", "choices") if name in document}
    for first, second in PAIRS:
        if first in document and document.get(second) is not None:
            return {"text": document[first], "text_pair": document[second]}
    if "question" in document:
        return {name: document.get(name) for name in ("question", "context")}
    for name in ("text", "sentence"):
        if name in document:
            return document[name]
    if "tokens" in document:
        return " ".join(read_text_list(document, "tokens"))
    raise ValueError(
        "it has no input; give `inputs`, `text`, `text` and `text_pair`, `tokens`, `question` and `context`, or `question` and `choices`."
    )


def read_text_list(document: Document, name: str) -> list[str]:
    """Returns a field that is a list of texts.

    Raises:
        ValueError: It is something else.
    """
    value = document[name]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"`{name}` must be a list of texts.")
    return value


def halves(text: str) -> tuple[str, str]:
    """Returns the first and the second half of a text's words."""
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def read_alone(lines: Sequence[Text], passages: Sequence[Text], own: Pairs[Text], pairs_only: bool) -> Arranged[Text]:
    """Returns all texts to read alone, and the user's pairs."""
    return [*lines, *passages], list(own)


def neighbors(lines: Sequence[Text], passages: Sequence[Text]) -> list[tuple[Text, Text]]:
    """Returns each line with the next one, and then each passage with a line before it."""
    pairs = [(line, lines[(i + 1) % len(lines)]) for i, line in enumerate(lines)]
    return [*pairs, *((lines[i % len(lines)], passage) for i, passage in enumerate(passages))]


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
        gold_keys: The keys of a line that `read_gold` reads.
        data_parameters: The parameters of all lines, and their right answers -> the parameters that requests get.
        figures: The names of what `score` returns, without those of which less is better.
        score: Right answers, and results -> metric -> its value.
        notes: Right answers, and results -> metric -> what a reader must know of it, such as that it has no value.
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
    gold_keys: tuple[str, ...] = ()
    data_parameters: Callable[[Sequence[Document], Sequence[Any]], Sequence[Document]] = lambda own, golds: own
    figures: tuple[str, ...] = ()
    score: Callable[[Sequence[Any], Sequence[Any], ModelConfig], dict[str, float]] | None = None
    notes: Callable[[Sequence[Any], Sequence[Any], ModelConfig], dict[str, str]] = lambda golds, results, config: {}

    @property
    def fills_masks(self) -> bool:
        """Whether its graphs have an output per mask, so that its models need a mask token."""
        return any(output.kind == "per_mask" for output in self.outputs)
