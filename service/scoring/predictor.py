"""Predictor: answers rows with a model's tokenizer, task and engine on a pool of threads, without the queue of the service."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from bertserve.service.body.reading import describe_value, required_fields, validate_as
from bertserve.service.body.task_body import TRUSTED_LIMITS, Limits, types_within
from bertserve.service.bundle import files
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.engine.hardware import usable_cores
from bertserve.service.errors import BertServeError, EngineError, InvalidValueError, SettingsError
from bertserve.service.messages import SHOWN_CHARS, did_you_mean, quote_names
from bertserve.service.models import loading
from bertserve.service.models.batch_run import run_within_limits
from bertserve.service.models.request_progress import EncodingItem, RequestProgress, truncation_warning
from bertserve.service.scoring.rows import Row, rejecting
from bertserve.service.settings import ScoreSettings
from bertserve.service.tasks.catalog import TASKS, answered_tasks, requested_task
from bertserve.service.tasks.cost import MAX_RESPONSE_BYTES
from bertserve.service.tasks.step import TaskModel
from bertserve.service.tasks.task_spec import UNNAMED_TEXT

# Maximum rows of a block, and bytes of its answers as JSON: all answers of two blocks are in memory.
BLOCK_ROWS, BLOCK_BYTES = 4096, 2**27


class RowReader:
    """Reads the input of the task from a row: a body of the endpoint with the columns `column_by_input` (input -> column)."""

    def __init__(self, settings: ScoreSettings, manifest: Manifest) -> None:
        """Checks the task for a model, and its parameters with the example of the endpoint.

        Raises:
            SettingsError: The task, its columns or its parameters do not fit the model.
        """
        self._manifest = manifest
        self._limits = Limits(settings.max_inputs, settings.max_chars, settings.max_top_k)
        columns, parameters, tasks = settings.columns, settings.parameters, answered_tasks(manifest)
        implied = requested_task(manifest.task, parameters | columns | {"inputs": columns, "parameters": parameters})
        task = next((task for task, spec in TASKS.items() if settings.task in (task, spec.path)), settings.task or implied)
        if task not in tasks:
            raise SettingsError(f"the task is `{task}`, but the model supports {', '.join(tasks)}; choose one with --task.")
        self.spec = TASKS[task]
        fields, body = self.spec.input_fields, self.spec.body
        if unknown := [name for name in columns if name not in fields]:
            raise SettingsError(f"--columns has `{unknown[0]}`, but {task} has the inputs {quote_names(list(fields))}.")
        self._required_inputs = {name for name, info in fields.items() if info.is_required()}
        self._rejects_empty = settings.empty == "reject"
        self._lists = {name for name, info in fields.items() if list in types_within(info.annotation)}
        inputs = self._required_inputs | columns.keys() if columns else fields
        self.column_by_input = {name: columns.get(name, name) for name in fields if name in inputs}
        self._required_columns = [column for name, column in self.column_by_input.items() if columns or name in self._required_inputs]
        self._body_keys = required_fields(body)
        # options of /rerank are fields of the body, except the options of decisions
        options = body.model_fields.keys() - body.parameters_type.model_fields.keys() - {"model", *self._body_keys}
        inner = {key: value for key, value in parameters.items() if key not in options}
        self._parameters = {key: parameters[key] for key in parameters if key in options} | ({"parameters": inner} if inner else {})
        example = {key: value for key, value in body.example().items() if key in self._body_keys} | self._parameters
        try:  # the other limits are for rows, not for the example
            input_ = validate_as(body, example, replace(TRUSTED_LIMITS, max_top_k=settings.max_top_k)).task_inputs(manifest)[0]
        except BertServeError as error:
            raise SettingsError(f"--parameters does not fit /{self.spec.path}: {error.message}") from error
        self.has_one_label = self.spec.has_one_label(input_, manifest)
        result_bytes = min(MAX_RESPONSE_BYTES, self.spec.result_bytes(input_, manifest.tokenizer.max_length))
        self.block_rows = min(BLOCK_ROWS, BLOCK_BYTES // max(1, result_bytes))

    def check(self, columns: Sequence[str], added: Sequence[str]) -> None:
        """Checks the columns of a file, and the columns that the output adds.

        Raises:
            SettingsError: The file lacks a required column, or the output would repeat a column.
        """
        if missing := [column for column in self._required_columns if column not in columns]:
            hint = did_you_mean(missing[0], columns, "choose others with --columns.")
            shown = quote_names([name[:SHOWN_CHARS] for name in columns[:20]])
            raise SettingsError(f"the input has no column `{missing[0]}`, but it has {shown}; {hint}")
        names = [*columns, *added]
        if twice := [name[:SHOWN_CHARS] for name in names if names.count(name) > 1]:
            raise SettingsError(f"the output would have `{twice[0]}` twice; rename it, or set --prediction-column or --warnings-column.")

    def task_input(self, values: Mapping[str, Any]) -> Any:
        """Returns the input of a row, given its values by column.

        Raises:
            InvalidValueError: A value is missing or wrong.
            TooLargeError: A text or a list is too long.
        """
        inputs: dict[str, Any] = {}
        for name, column in self.column_by_input.items():
            value = values.get(column)
            if value in (None, "") and name not in self._required_inputs and (column in values or column not in self._required_columns):
                continue
            if name in self._lists and isinstance(value, str):
                with suppress(orjson.JSONDecodeError):
                    value = orjson.loads(value)
            # the endpoint would read a list of texts as several inputs
            if not isinstance(value, list if name in self._lists else str):
                kind = 'a JSON list of texts, such as ["a", "b"]' if name in self._lists else "a text"
                description = "a text" if isinstance(value, str) else describe_value(value)
                actual = f"it is {description}" if column in values else f"the row has {quote_names(list(values)[:20])}"
                raise InvalidValueError("the column `{column}` must be {kind}; {actual}.", column=column, kind=kind, actual=actual)
            if self._rejects_empty and name in self._required_inputs and isinstance(value, str) and not value.strip():
                raise InvalidValueError("the column `{column}` is empty, and --empty is `reject`.", column=column)
            inputs[name] = value
        if self._body_keys == ["inputs"]:
            inputs = {"inputs": inputs[UNNAMED_TEXT] if list(inputs) == [UNNAMED_TEXT] else inputs}
        return validate_as(self.spec.body, inputs | self._parameters, self._limits).task_inputs(self._manifest)[0]


class Predictor:
    """The model of the settings, and the threads that answer rows.

    Results do not depend on the number of threads: a chunk depends only on the rows of a call, and a batch only on its chunk.
    """

    def __init__(self, settings: ScoreSettings) -> None:
        """Loads the only model of the settings' folders.

        Raises:
            StartError: It cannot be loaded, or does not support the task.
        """
        (path,) = files.find_bundles(settings.models)
        bundle = files.load_bundle(path)
        tokenizer, self._engine = loading.open_bundle(bundle, loading.with_provider(settings, [path]))
        self.graph = self._engine.graph
        self.manifest, self.version = bundle.manifest, bundle.version
        self._task_model = TaskModel(tokenizer, bundle.manifest, self.graph.calibration)
        self.reader = RowReader(settings, bundle.manifest)
        is_on_cpu = self.graph.provider == "cpu"
        # on a CPU, more rows save no time (bench/results/2026-11-23-score.md)
        self._batch_tokens = min(settings.batch_tokens(self.graph.precision), 256 if is_on_cpu else sys.maxsize)
        self._shares_batches = self.graph.batch_invariant or settings.batch_variant_graphs
        self._pool = ThreadPoolExecutor(settings.threads or (usable_cores() if is_on_cpu else 2), thread_name_prefix="scoring")
        self.close = partial(self._pool.shutdown, cancel_futures=True)  # the threads end after their current chunks

    def answer_rows(self, rows: Sequence[Row]) -> Iterator[None]:
        """Starts to answer rows, by length in chunks. The result ends when all are answered, and raises an unexpected error of a thread."""
        for row in rows:
            if row.error is None:
                with rejecting(row):
                    row.input = self.reader.task_input(row.values)
        remaining, chunks = sorted((row for row in rows if row.error is None), key=lambda row: -row.input.chars), []
        while remaining:
            # rows and characters that are enough for the batches of a GPU; on a CPU a chunk takes one or two seconds
            count = max(1, min(256, 2**15 // max(1, remaining[0].input.chars)))
            chunks.append(remaining[:count])
            remaining = remaining[count:]
        return self._pool.map(self._answer_chunk, chunks)

    def _answer_chunk(self, chunk: Sequence[Row]) -> None:
        """Answers a chunk. A row that cannot be encoded or decoded, or that the graph cannot score, is the only one with an error."""
        open_rows: list[tuple[Row, RequestProgress, list[EncodingItem]]] = []
        for row in chunk:
            progress = RequestProgress([self.reader.spec.function(row.input, self._task_model)], max_tokens=sys.maxsize)
            with rejecting(row):
                open_rows.append((row, progress, progress.prepare()))
                row.warnings = [warning for _, warning in progress.prediction.warnings]
                if progress.prediction.truncated:
                    row.warnings.append(truncation_warning(self.manifest.tokenizer.max_length))
        while open_rows:  # runs the current steps of all rows together
            outputs = self._outputs([item for _, _, items in open_rows for item in items])
            run_rows, open_rows = open_rows, []
            for row, progress, items in run_rows:
                with rejecting(row):
                    if errors := [outputs[item] for item in items if isinstance(outputs[item], EngineError)]:
                        raise errors[0]
                    if next_items := progress.proceed([outputs[item] for item in items]):
                        open_rows.append((row, progress, next_items))
                    (row.prediction,) = progress.prediction.results

    def _outputs(self, items: Sequence[EncodingItem]) -> dict[EncodingItem, Any]:
        """Returns what the task keeps of each encoding's outputs, or an error; encodings of similar length run together."""
        outputs: dict[EncodingItem, Any] = {}
        remaining = sorted(items, key=lambda item: -len(item.encoding))
        while remaining:
            count, length = 1, len(remaining[0].encoding)
            while self._shares_batches and count < len(remaining):
                shape = self.graph.padded_shape(count + 1, length)
                if shape is None or shape[0] * shape[1] > self._batch_tokens:
                    break
                count += 1
            outputs |= zip(remaining[:count], self._run(remaining[:count]), strict=True)
            remaining = remaining[count:]
        return outputs

    def _run(self, items: Sequence[EncodingItem]) -> list[Any]:
        """Runs a batch, and after an error each of its encodings without the others."""
        try:
            return run_within_limits(self._engine, items, self._task_model.tokenizer.vocabulary_size)
        except EngineError as error:
            return [error] if len(items) == 1 else [self._run([item])[0] for item in items]
