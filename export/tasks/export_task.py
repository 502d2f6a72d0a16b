"""ExportTask: all the exporter's facts about a task. Loading, samples, validation, stored examples and `verify --data` depend on it."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from bertserve.export.errors import UsageError
from bertserve.export.input_fields import JsonObject
from bertserve.export.int8_texts import SplitTexts
from bertserve.export.tasks.evaluation import MetricValue, cosine, micro_f1, spearman
from bertserve.export.tasks.sample_texts import LONG_TEXT, NAMES_TEXT, SAMPLE_TEXTS
from bertserve.service.bundle.graph_spec import Agreement, Measure, OutputSpec
from bertserve.service.bundle.manifest import Activation, ModelConfig, TokenizerSpec
from bertserve.service.messages import plural
from bertserve.service.tasks.task_spec import TaskSpec

TextT = TypeVar("TextT")
# a text, a pair, or two lists of equal length for an input with several pairs; and options of the Hugging Face tokenizer
TokenizerCall = tuple[tuple[Any, ...], dict[str, Any]]


class ExportTask:
    """A task that a bundle can have; the methods whose arguments include `tokenizer_spec` get the model's tokenizer.

    Attributes:
        task_spec: The service's task, with its name and the types of inputs and results.
        head: Suffix of the names of architectures with its head.
        outputs: Outputs of its graphs. A graph with outputs per mask has the positions of masks as an input.
        labeled: Whether the configuration's labels belong to the task.
        activation: The function from logits to scores; None if the configuration defines it.
        embeds: Whether a result is vectors, from layers and a pooling that sentence-transformers' files define.
        takes_pairs: Whether the user's texts for int8 can be pairs.
        needs_pairs: Whether every input is a pair of texts, of which the first is short, and the second one fills the window.
        gold_keys: The keys of a line of data that `read_gold` reads; empty if the task has no correct answers.
        metric_names: Names of the metrics of `compute_metrics`, without metrics for which less is better.
    """

    task_spec: TaskSpec
    head: str
    outputs: tuple[OutputSpec, ...]
    labeled = False
    activation: Activation | None = "softmax"
    embeds = False
    takes_pairs = False
    needs_pairs = False
    gold_keys: tuple[str, ...] = ()
    metric_names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its Hugging Face name, such as `text-classification`."""
        return self.task_spec.name

    @property
    def min_length(self) -> int:
        """Minimum length of a model in tokens, for tracing and samples; fewer than 32 cannot hold a mask and its context."""
        return 32 if self.fills_masks else 16

    @property
    def fills_masks(self) -> bool:
        """Whether its graph has an output per mask, so that its models need a mask token."""
        return any(output.kind == "per_mask" for output in self.outputs)

    def text_input(self, text: str, tokenizer_spec: TokenizerSpec) -> Any:
        """Returns an input around a text, of one window if the model is long enough."""
        raise NotImplementedError

    def sample_inputs(self, tokenizer_spec: TokenizerSpec) -> list[Any]:
        """Returns inputs of every kind, on which each graph must agree with the checkpoint."""
        return [self.text_input(text, tokenizer_spec) for text in ["", *SAMPLE_TEXTS, NAMES_TEXT * 5, LONG_TEXT * 30]]

    def validation_inputs(self, texts: SplitTexts, tokenizer_spec: TokenizerSpec) -> list[Any]:
        """Returns an input for each text, passage and pair that validate int8."""
        return [self.text_input(text, tokenizer_spec) for text in (*texts.lines, *texts.passages)]

    def make_singles_and_pairs(
        self, lines: Sequence[TextT], passages: Sequence[TextT], user_pairs: Sequence[tuple[TextT, TextT]], tokenizer_spec: TokenizerSpec
    ) -> tuple[list[TextT], list[tuple[TextT, TextT]]]:
        """Returns the single texts and the pairs that calibrate and validate int8, from lines, passages and the user's pairs."""
        pairs = [(line, lines[(i + 1) % len(lines)]) for i, line in enumerate(lines)]
        long_pairs = [(lines[i % len(lines)], passage) for i, passage in enumerate(passages)]
        if self.needs_pairs or tokenizer_spec.pairs_only:
            return [], [*pairs, *long_pairs, *user_pairs]
        if not self.takes_pairs or user_pairs or tokenizer_spec.pair is None:
            return [*lines, *passages], list(user_pairs)
        # it is unknown whether the model is used with pairs, so every second text also forms a pair
        return [*lines, *passages], [*pairs[1::2], *long_pairs[1::2]]

    def refuse_pairs(self, texts: Iterable[SplitTexts], tokenizer_spec: TokenizerSpec) -> None:
        """Refuses pairs in the user's texts for int8 if the task or the model takes single texts."""
        count = sum(len(split.pairs) for split in texts)
        if count and (tokenizer_spec.pair is None or not self.takes_pairs):
            raise UsageError(
                f"--int8-texts and --int8-validation have {plural(count, 'pair')}, but this {self.name} model takes single texts; give "
                "single texts."
            )

    def example(self, tokenizer_spec: TokenizerSpec) -> dict[str, Any]:
        """Returns the body of the stored example. Its result must not depend on rounding, because other CPUs check it."""
        raise NotImplementedError

    def tokenizer_call(self, input_: Any, tokenizer_spec: TokenizerSpec) -> TokenizerCall:
        """Returns the texts of an input, and the options with which the Hugging Face tokenizer reads them.

        By default, `max_length` is the model's. An input with a `stride` has several windows; None is the service's default.
        """
        return (input_.text,), {}

    def agreement_measure(self, config: ModelConfig) -> Measure:
        """Returns the measure of `agreement`, which can depend on the model's labels and activation."""
        return "label"

    def compared_value(self, result: Any, config: ModelConfig) -> Any:
        """Returns what matters to a user: spans or a set of labels to count, numbers to rank, a vector, or a value to compare."""
        return result

    def agreement(self, expected: Sequence[Any], actual: Sequence[Any], config: ModelConfig) -> Agreement:
        """Returns the agreement of a graph's results `actual` with the reference's; without decisions it has no value."""
        measure, value, worst = self.agreement_measure(config), None, None
        pairs = [
            (self.compared_value(first, config), self.compared_value(second, config))
            for first, second in zip(expected, actual, strict=True)
        ]
        if measure == "spearman":
            # the scores of each label, of the reference and of the graph; the lowest correlation of a label counts
            by_label = [([a[i] for a, _ in pairs], [b[i] for _, b in pairs]) for i in range(len(config.labels))]
            # a reference with equal scores has no order; a graph with equal scores has lost the order, which is 0
            value = min((spearman(first, second) for first, second in by_label if len(set(first)) > 1), default=None)
        elif measure == "cosine" and pairs:
            cosines = [cosine(*pair) for pair in pairs]
            value, worst = sum(cosines) / len(cosines), min(cosines)
        elif measure == "label" and pairs:
            value = sum(first == second for first, second in pairs) / len(pairs)
        elif measure in ("set_f1", "span_f1") and (pairs := [(a, b) for a, b in pairs if a or b]):
            value = micro_f1(*zip(*pairs, strict=True))
        return Agreement(measure=measure, value=value, decisions=0 if value is None else len(pairs), worst=worst)

    def read_gold(self, document: JsonObject, config: ModelConfig) -> Any:
        """Returns the correct answer in a line of data, or None if it has none.

        Raises:
            ValueError: The answer is invalid.
        """
        return None

    def data_parameters(self, line_parameters: Sequence[JsonObject], golds: Sequence[Any]) -> list[JsonObject]:
        """Returns the parameters of the inputs of lines of data, from the lines' own parameters and correct answers."""
        return list(line_parameters)

    def compute_metrics(self, golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, MetricValue]:
        """Returns the metrics of results, at least one, with correct answers."""
        return {}
