"""Scoring with Ray Data: a folder of Parquet files to a folder of files with predictions, one file at a time per actor.

Each actor has the model and scores a file like `bert-serve score`, with the same output bytes. Only file names and counts are sent
through Ray; an actor reads and writes the files itself. A file appears when it is complete. So if an actor dies, another actor scores its
file, and if the driver dies, a new run continues with the files that are missing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from bertserve.service import __version__
from bertserve.service.backend import sessions
from bertserve.service.bundle import files
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import BertServeError, SettingsError, StartError, install_command, plural
from bertserve.service.scoring.columns import Columns, read_parameters, task_for
from bertserve.service.scoring.formats import PARQUET, make_writer
from bertserve.service.scoring.parquet_folder import REJECTED_SUFFIX, FileFacts, ParquetFolder, ParquetOutput, undone
from bertserve.service.scoring.part import ScoringProgress
from bertserve.service.scoring.runner import ProgressBar, ScoringRun, TooManyRejectedError
from bertserve.service.scoring.score import REJECTED
from bertserve.service.scoring.scorer import LoadedModel, ScoringSpec
from bertserve.service.settings import Settings
from bertserve.service.tasks.body import Limits
from bertserve.service.tasks.catalog import tasks_of

try:
    import ray
    import ray.data
except ImportError as absent:
    raise SettingsError(f"--ray needs Ray, which is not installed; `{install_command('ray')}` adds it.") from absent


@dataclass(frozen=True, slots=True)
class ActorTask:
    """The task of an actor: settings with one model, the version of its bundle, the options, and the folders of input and output files."""

    settings: Settings
    version: str
    spec: ScoringSpec
    source: ParquetFolder
    output: ParquetFolder


class FileScorer:
    """An actor: the model, and a loop that scores file after file."""

    def __init__(self, work: ActorTask) -> None:
        """Loads the model, with one thread per CPU that Ray assigns."""
        self._work = work
        self._error: StartError | None = None
        try:
            self._load(round(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
        except StartError as error:  # becomes the answer for each file, so that the driver gets its message
            self._error = error

    def _load(self, threads: int) -> None:
        work = self._work
        self._loaded = loaded = LoadedModel(work.settings.model_copy(update={"threads": max(threads, 1)}), work.spec)
        if loaded.model.bundle.version != work.version:
            raise SettingsError(
                f"node {socket.gethostname()} has another version of the model `{loaded.model.name}` than the driver: "
                f"{loaded.model.bundle.version} instead of {work.version}; give all nodes the same bundle."
            )
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    async def _start(self) -> None:
        self._loaded.state.scheduler.start()

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
        """Scores the only file of a batch; returns its counts and its error."""
        (name,) = batch["file"]
        progress, error = ScoringProgress(), self._error
        try:
            if error is None:
                progress = self._runner.run(self._score(str(name)))
        except StartError as caught:
            error = caught
        except BertServeError:
            # an inference thread died or hangs; Ray replaces this process and starts the file again
            os._exit(1)
        fatal = self._error is not None or isinstance(error, SettingsError | TooManyRejectedError)
        return {
            "file": [str(name)],
            "rows": [progress.place.row],
            "rejected": [progress.rejected],
            "warned": [progress.warned],
            "error": ["" if error is None else error.message],
            "fatal": [fatal],
        }

    async def _score(self, name: str) -> ScoringProgress:
        work = self._work
        columns, spec = self._loaded.columns, work.spec
        before = work.source.facts(name)
        reader = work.source.reader(name, list(columns.by_field.values()))
        try:
            columns.check(reader.columns)
            writer: Any = make_writer(PARQUET, reader, columns.task, spec.names, known=None)
            output = ParquetOutput(work.output, name, writer)
            rejected = Path(name + REJECTED_SUFFIX)
            bar = ProgressBar(None, 0)
            scorer, rows = self._loaded.scorer, self._loaded.window_rows
            run = ScoringRun(reader, scorer, writer, output, ScoringProgress(), bar, spec.max_rejected, rejected, rows)
            try:
                await run()
                if work.source.facts(name) != before:  # otherwise the output would count as newer than the changed file
                    raise StartError("the input changed while it was read.")
                await asyncio.to_thread(output.finish)
            except OSError as error:
                raise StartError(f"the output cannot be written: {error}.") from error
            finally:
                output.discard()
        finally:
            reader.close()
        return run.progress


LOCAL = "local"
# Default threads of an actor: with short texts, a process can feed about five cores (docs/explanation/speed.md).
MOST_CPUS = 4
CONNECT_S = 10.0
# Number of attempts after an actor died, because a file may kill its actors every time.
RETRIES = 3
# Facts that affect the output, other than the files; readers of the folder skip its name.
FACTS_FILE = "_bertserve.json"


@dataclass(slots=True)
class Totals:
    """The results of a run: numbers of finished files and of their rows, and an error for each file that cannot be read or written.

    Rejected rows have no answer; warned rows have an answer and warnings.
    """

    files: int = 0
    rows: int = 0
    rejected: int = 0
    warned: int = 0
    broken: list[str] = field(default_factory=list)


def score_on_ray(settings: Settings, spec: ScoringSpec) -> int:
    """Scores a folder with the settings of one model, whose folder exists on all nodes; returns the exit code.

    Raises:
        StartError: Flags, the cluster, a file or the model are wrong, or too many rows were rejected; the message says what to do.
    """
    work, todo, done = _plan(settings, spec)
    total, seconds = Totals(), 0.0
    if todo:
        started = not ray.is_initialized()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            _connect(spec.ray or LOCAL)
            bar = ProgressBar(sum(todo.values()), 0)
            try:
                _collect(_results(work, list(todo), spec), todo, total, bar, spec)
            finally:
                seconds = bar.close()
        except (KeyboardInterrupt, _TerminatedError) as stop:
            print(f"stopped after {plural(total.files, 'file')}; run {spec.continue_command} to continue with the others.", file=sys.stderr)
            return 128 + (signal.SIGTERM if isinstance(stop, _TerminatedError) else signal.SIGINT)
        finally:
            signal.signal(signal.SIGTERM, handler)
            if started:
                ray.shutdown()
        work.output.tidy()
    _say(total, done, seconds, spec.output)
    if total.broken:
        raise StartError(
            f"{len(total.broken)} of {len(todo)} files have no output. The first: {total.broken[0]} Fix or remove "
            f"them, and run {spec.continue_command} to continue with these."
        )
    return REJECTED if total.rejected or any(name.endswith(REJECTED_SUFFIX) for name in work.output.files()) else 0


def _plan(settings: Settings, spec: ScoringSpec) -> tuple[ActorTask, dict[str, int], int]:
    """Returns the work, the files to score with their sizes, and the number of finished files."""
    parameters = read_parameters(spec.parameters)
    source, output = ParquetFolder(spec.source, "the input"), ParquetFolder(spec.output, "the output")
    if output.overlaps(source):
        raise SettingsError("the output is the input, or one of them is inside the other, so files would be replaced; give another folder.")
    there = source.parquet_files()
    if not there:
        raise SettingsError(
            f"the input `{spec.source}` has no Parquet files; with --ray it must be a folder of files that end with .parquet."
        )
    (bundle,) = files.find_bundles(settings.models)
    manifest, version = files.read_manifest(bundle)
    task = task_for(tasks_of(manifest), spec.task, parameters, spec.columns)
    limits = Limits(max_inputs=settings.max_inputs, max_chars=settings.max_chars)
    columns = Columns(task, spec.columns, parameters, limits, spec.names, spec.empty)
    first = source.reader(next(iter(there)), list(columns.by_field.values()))
    columns.check(first.columns)
    first.close()
    facts = _facts(settings, manifest, version, columns, parameters, spec)
    undone_names = undone(there, {} if spec.restart else _begun(output, facts))
    if spec.restart or output.read(FACTS_FILE) is None:
        output.write(FACTS_FILE, json.dumps(facts, indent=1).encode())
    return (
        ActorTask(settings, version, spec, source, output),
        {name: there[name].size for name in undone_names},
        len(there) - len(undone_names),
    )


def _facts(
    settings: Settings, manifest: Manifest, version: str, columns: Columns, parameters: Mapping[str, Any], spec: ScoringSpec
) -> dict[str, Any]:
    """Returns the facts that affect the output; their names are used in errors."""
    facts = {
        "model": [manifest.name, version, settings.provider, settings.precision],
        "version": [__version__, sessions.VERSION],
        "task": columns.task,
        "columns": [columns.by_field, *spec.names],
        "parameters": parameters,
        "--empty": spec.empty,
        "limits": [settings.max_chars, settings.max_inputs, settings.max_batch_tokens],
        "--max-queue-tokens": settings.max_queue_tokens,
        "--batch-variant-graphs": settings.batch_variant_graphs,
    }
    return dict(json.loads(json.dumps(facts)))


def _begun(output: ParquetFolder, facts: Mapping[str, Any]) -> Mapping[str, FileFacts]:
    """Returns the files of an output that was started with the same facts, without those from before the start."""
    written, stored_facts = output.parquet_files(), output.read(FACTS_FILE)
    if stored_facts is None:
        if written:
            raise SettingsError(
                f"`{output.uri}` has Parquet files that were not made by --ray; choose another folder, or give --restart "
                "to replace those with the names of the input."
            )
        if mine := next((name for name in output.files() if name.endswith(REJECTED_SUFFIX)), None):
            raise SettingsError(f"`{output.uri}` has the file `{mine}`, which was not made by --ray; choose another folder, or move it.")
        return {}
    before = json.loads(stored_facts)
    if differs := [name for name in facts if before.get(name) != facts[name]]:
        raise SettingsError(
            f"`{output.uri}` was started with different {', '.join(differs)}; use the same again to continue, "
            "or give --restart to score all files again."
        )
    since = output.files()[FACTS_FILE].changed
    return {name: file for name, file in written.items() if file.changed >= since}


class _TerminatedError(BaseException):
    """The process received SIGTERM."""


def _connect(address: str) -> None:
    """Connects to a cluster, or starts one on this machine."""
    if not ray.is_initialized():
        options: dict[str, Any] = {}
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray logs its own warnings to stderr
        if address == LOCAL:
            options["include_dashboard"] = False
            # disables Ray's usage reports
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # about the cluster's authentication
        try:
            host, _, port = address.rpartition(":")
            if port.isdigit():
                # Ray itself would try for minutes, and then report little
                socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
            ray.init(address=address, log_to_driver=False, logging_level="WARNING", **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise StartError(
                f"--ray is `{address}`, but no cluster answers there: {error}. Give `{LOCAL}` for one on this machine, "
                "`auto` for the one that this machine belongs to, or HOST:PORT."
            ) from error

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TerminatedError

    signal.signal(signal.SIGTERM, stop)


def _results(work: ActorTask, names: Sequence[str], spec: ScoringSpec) -> Iterator[dict[str, Any]]:
    """Yields the counts of each file as it finishes."""
    cpus, actors = _pool(spec, len(names))
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # disables a warning that progress bars are off
    pool = ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=1)  # otherwise files would wait for a busy actor
    listed = ray.data.from_items([{"file": name} for name in names], override_num_blocks=len(names))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ray.util.annotations.RayDeprecationWarning)  # no other option sets the number of attempts
        scored = listed.map_batches(
            FileScorer,
            fn_constructor_args=(work,),
            batch_size=1,
            compute=pool,
            num_cpus=cpus,
            ray_remote_args_fn=lambda: {"max_task_retries": RETRIES},
        )
    yield from scored.iter_rows()


def _pool(spec: ScoringSpec, count: int) -> tuple[int, int]:
    """Returns the CPUs of an actor, and the number of actors for `count` files."""
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    nodes = [cpus for cpus in nodes if cpus]
    if not nodes:
        raise StartError("no node of the cluster offers a CPU; start one with --num-cpus.")
    cpus = spec.actor_cpus or min(MOST_CPUS, *nodes)
    room = sum(node // cpus for node in nodes)
    if not room:
        raise SettingsError(f"--actor-cpus is {cpus}, but the largest node of the cluster has {max(nodes)}; give at most that.")
    return cpus, min(spec.actors or room, count)


def _collect(results: Iterator[dict[str, Any]], sizes: Mapping[str, int], total: Totals, bar: ProgressBar, spec: ScoringSpec) -> None:
    try:
        for result in results:
            if result["fatal"]:
                raise StartError(f"{result['file']}: {result['error']}")
            if result["error"]:
                total.broken.append(f"{result['file']}: {result['error']}")
                continue
            total.files += 1
            total.rows += result["rows"]
            total.rejected += result["rejected"]
            total.warned += result["warned"]
            bar.advance(sizes[result["file"]], result["rows"])
            if total.rejected > spec.max_rejected:
                raise StartError(
                    f"{plural(total.rejected, 'row')} of {plural(total.files, 'file')} cannot be answered, and --max-rejected is {spec.max_rejected}. "
                    f"The files *{REJECTED_SUFFIX} of the output say why. Fix the input or the flags, or raise --max-rejected "
                    "and start again."
                )
    except ray.exceptions.RayError as error:
        raise StartError(
            f"Ray gave up after {plural(total.files, 'file')}: {str(error).strip().splitlines()[-1]} Run {spec.continue_command} "
            "to continue with the others."
        ) from error


def _say(total: Totals, done: int, seconds: float, output: str) -> None:
    """Prints the results."""
    rate = f" in {seconds:.1f} s, {total.rows / seconds:,.0f} rows/s" if total.rows else ""
    before = f" and {done} done before" if done else ""
    rejected = f", {total.rejected} rejected ({output}/*{REJECTED_SUFFIX})" if total.rejected else ""
    print(
        f"{plural(total.files, 'file')}{before}; {plural(total.rows, 'row')}: {total.rows - total.rejected} answered, {total.warned} of them with warnings"
        f"{rejected}{rate}",
        file=sys.stderr,
    )
