"""Scoring with Ray Data: `Scorer` for `map_batches`, and `bert-serve score --ray` from a folder of Parquet files to another one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads

from bertserve.service.bundle import files
from bertserve.service.errors import SettingsError, StartError, install_command, plural
from bertserve.service.scoring.parts import merged, with_predictions
from bertserve.service.scoring.predictor import Columns, Predictor, RowTask
from bertserve.service.scoring.rows import Window, rows_of
from bertserve.service.settings import ModelSettings
from bertserve.service.tasks.body import Limits

try:
    import ray
    import ray.data
except ImportError as absent:
    raise SettingsError(f"--ray needs Ray, which is not installed; `{install_command('ray')}` adds it.") from absent


class Scorer:
    """Adds `prediction`, `warnings` and `error` to the rows of a batch, for `map_batches` of Ray Data. Each actor loads the model once."""

    def __init__(self, model: str, settings: Mapping[str, Any] | None = None, **task: Any) -> None:
        """Loads a bundle from a folder that exists on all nodes, with settings of `bert-serve score`, and `task` as in `RowTask`."""
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1) if ray.is_initialized() else None
        threads = {} if cpus is None else {"threads": max(1, int(cpus))}
        self._names = RowTask(**task).names
        self._predictor = Predictor(ModelSettings(**{"models": (Path(model),)} | threads | dict(settings or {})), RowTask(**task))
        self._schema = pa.schema([])

    def __call__(self, batch: Any) -> Any:
        """Returns the rows of a batch, which is a table or has an array for each column, as a table with three more columns."""
        table = batch if isinstance(batch, pa.Table) else pa.table(dict(batch))
        self._predictor.columns.check(table.column_names, (*self._names, "error"))
        rows = rows_of(table, self._predictor.columns.by_field.values())
        list(self._predictor.answered([Window(rows, size=0)]))
        errors = [None if row.error is None else row.error.message for row in rows]
        table = with_predictions(table, rows, self._names).append_column("error", pa.array(errors, pa.string()))
        self._schema = merged([self._schema, table.schema])
        return table.cast(self._schema)


def score_on_ray(command: Any, settings: ModelSettings, task: RowTask) -> int:
    """Scores a folder of Parquet files by the flags of `bert-serve score`; returns the exit code."""
    (bundle,) = files.find_bundles(settings.models)
    columns = Columns(task, files.read_manifest(bundle)[0], Limits(settings.max_inputs, settings.max_chars, settings.max_top_k))
    given = {name: getattr(settings, name) for name in ModelSettings.model_fields if name not in ("config", "models", "model", "threads")}
    try:
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports about the use of Ray
            ray.init(address=command.ray, logging_level="WARNING")
        data = ray.data.read_parquet(command.source)
        columns.check(data.schema().names, (*task.names, "error"))
        pool = ray.data.ActorPoolStrategy(min_size=1, max_size=command.actors)
        arguments = {"model": str(bundle.resolve()), "settings": given, **asdict(task)}
        scored = data.map_batches(
            Scorer, fn_constructor_kwargs=arguments, batch_format="pyarrow", batch_size=4096, compute=pool, num_cpus=command.actor_cpus
        )
        scored.write_parquet(command.output, mode="error")
    except (ray.exceptions.RayError, OSError, ValueError, RuntimeError) as error:
        raise StartError(f"Ray cannot score `{command.source}`: {str(error).strip().splitlines()[-1]}") from error
    written = pads.dataset(command.output)
    rejected = written.count_rows(filter=pads.field("error").is_valid())
    print(f"{plural(written.count_rows(), 'row')}, {rejected} of them with an error", file=sys.stderr)
    return 3 if rejected else 0
