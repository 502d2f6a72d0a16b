"""`Scorer` for `map_batches` of Ray Data, and `bert-serve score --ray`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from bertserve.service.bundle import files
from bertserve.service.errors import SettingsError, StartError, install_command
from bertserve.service.scoring.parts import unified_schema, with_predictions
from bertserve.service.scoring.predictor import Predictor, RowTask
from bertserve.service.scoring.rows import RowBlock, rows_of
from bertserve.service.settings import ModelSettings

try:
    import ray
    import ray.data
except ImportError as absent:
    raise SettingsError(f"Ray is not installed; `{install_command('ray')}` adds it.") from absent


class Scorer:
    """Adds `prediction`, `warnings` and `error` to the rows of a batch. Each actor loads the model once."""

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
        self._predictor.reader.check(table.column_names, (*self._names, "error"))
        rows = rows_of(table, self._predictor.reader.by_field.values())
        list(self._predictor.answer([RowBlock(rows, size=0)]))
        errors = [None if row.error is None else row.error.message for row in rows]
        table = with_predictions(table, rows, self._names).append_column("error", pa.array(errors, pa.string()))
        self._schema = unified_schema([self._schema, table.schema])
        return table.cast(self._schema)


def score_on_ray(settings: ModelSettings, task: RowTask, source: str, output: str, address: str) -> int:
    """Scores Parquet files to a new folder with as many actors as the cluster has CPUs; returns the exit code."""
    (bundle,) = files.find_bundles(settings.models)
    shared = ModelSettings.model_fields.keys() - {"config", "models", "model", "threads"}
    arguments = {"model": str(bundle.resolve()), "settings": settings.model_dump(include=shared, exclude_unset=True), **asdict(task)}
    try:
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports about the use of Ray
            ray.init(address=address, logging_level="WARNING")
        pool = ray.data.ActorPoolStrategy(min_size=1)
        scored = ray.data.read_parquet(source).map_batches(Scorer, fn_constructor_kwargs=arguments, batch_format="pyarrow", compute=pool)
        scored.write_parquet(output, mode="error")
    except (ray.exceptions.RayError, OSError, ValueError, RuntimeError) as error:
        raise StartError(f"Ray cannot score `{source}`: {str(error).strip().splitlines()[-1]}") from error
    return 0
