"""`Scorer` for `map_batches` of Ray Data, and `bert-serve score --ray`."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from bertserve.service.bundle import files
from bertserve.service.errors import SettingsError, StartError
from bertserve.service.messages import install_command, plural
from bertserve.service.scoring.predictor import Predictor
from bertserve.service.scoring.rows import read_table, with_predictions
from bertserve.service.settings import ScoreSettings

try:
    import ray.data
except ImportError as absent:
    raise SettingsError(f"Ray is not installed; `{install_command('ray')}` adds it.") from absent


class Scorer:
    """Adds `prediction`, `warnings` and `error` to the rows of a batch. Each actor loads the model once."""

    def __init__(self, model: str, *, version: str | None = None, **settings: Any) -> None:
        """Loads a bundle, of this `version` if given, from a folder on all nodes; `settings` are named like the flags of `score`."""
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1) if ray.is_initialized() else None
        options = ScoreSettings(**{"models": (Path(model),), "threads": None if cpus is None else max(1, int(cpus))} | settings)
        self._names, self._predictor, self._schema = options.added_columns, Predictor(options), pa.schema([])
        if version not in (None, self._predictor.version):
            raise SettingsError(f"`{model}` has the version {self._predictor.version}, not {version}; give all nodes the same bundle.")

    def __call__(self, batch: Any) -> Any:
        """Returns the rows of a batch, a table or an array for each column, as a table with three more columns."""
        table = batch if isinstance(batch, pa.Table) else pa.table(dict(batch))
        self._predictor.reader.check(table.column_names, (*self._names, "error"))
        rows = read_table(table, self._predictor.reader.column_by_input.values())
        list(self._predictor.answer_rows(rows))
        table = with_predictions(table, rows, self._names, self._schema)
        table = table.append_column("error", pa.array([row.error and row.error.message for row in rows], pa.string()))
        self._schema = pa.unify_schemas([self._schema, table.schema], promote_options="permissive")
        return table.cast(self._schema)


def score_on_ray(settings: ScoreSettings, source: str, output: str, address: str, actors: int | None, actor_cpus: int | None) -> int:
    """Scores Parquet files to a new folder with at most so many actors, if given; returns the exit code, 3 if rows have errors."""
    (bundle,) = files.find_bundles(settings.models)
    arguments = {"model": str(bundle.resolve()), "version": files.load_bundle(bundle).version} | settings.affecting_answers()
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports about the use of Ray
        dashboard = False if address == "local" else None
        ray.init(address=address, include_dashboard=dashboard, logging_level="WARNING", ignore_reinit_error=True)
        # with short texts, a process can feed about five cores; a run without a CPU for reading and writing would wait forever
        largest = max(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
        cpus, pool = max(1, min(actor_cpus or 4, largest - 1)), ray.data.ActorPoolStrategy(min_size=1, max_size=actors)
        options = {"fn_constructor_kwargs": arguments, "batch_format": "pyarrow", "compute": pool, "num_cpus": cpus}
        start = time.perf_counter()
        ray.data.read_parquet(source).map_batches(Scorer, **options).write_parquet(output, mode="error")
        seconds, total, rejected = time.perf_counter() - start, 0, 0
        with suppress(FileNotFoundError):  # a result without rows is not written
            errors = ray.data.read_parquet(output, columns=["error"])
            total, rejected = errors.count(), errors.filter(lambda row: row["error"] is not None).count()
        print(f"{plural(total, 'row')}, {rejected} with errors, in {seconds:.1f} s: {total / seconds:,.0f} rows/s", file=sys.stderr)
        return 3 if rejected else 0
    except (ray.exceptions.RayError, OSError, ValueError, RuntimeError) as error:
        raise StartError(f"Ray cannot score `{source}`: {str(error).strip().splitlines()[-1]}") from error
