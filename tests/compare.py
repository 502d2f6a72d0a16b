"""Compares the speed of this working tree with that of another commit: `python tests/compare.py COMMIT` (make compare BASE=COMMIT).

In each round, both services run one after the other and get the same loads from this tree's load generator. Each has the code and the
bundles of its own tree, and both use the virtual environment of this tree. Only the ratio within a round is meaningful, because the speed
of a shared machine changes from minute to minute. The processor time per request depends less on other work. For short texts, the graph
then runs alone in batches of the same size, which gives the factor between the processor times of the service and of its graph.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bertserve.bench import generator
from bertserve.bench.measurement import summarize
from bertserve.bench.raw_loop import WARM_UP_SHARE, RawLoop, encode_bodies
from bertserve.bench.target import OK, Body, Target, build_bodies, parse_url, read_run_totals
from bertserve.service.engine.onnx_engine import build_feed
from bertserve.service.errors import StartError
from support.replica import ServeProcess, free_ports

TREE = Path(__file__).resolve().parents[1]
GRAPH = "sentiment"  # the bundle that answers /classify
WARM_UP_S = 1.5  # during this time, a service can also create its multi-threaded session


class LoadSpec(NamedTuple):
    """A closed loop: its name, its workload or a file of bodies, its number of connections, and whether the graph then runs alone."""

    name: str
    workload: str
    connections: int
    graph_alone: bool = False


class Result(NamedTuple):
    """Requests per second with status 200, and per request the processor time in milliseconds: of all threads, and of the graph alone."""

    rps: float
    cpu_ms: float
    graph_ms: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit code: 0, or 2 if the commit does not exist or a service does not start or answer."""
    parser = argparse.ArgumentParser(prog="tests/compare.py", description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("base", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; each starts both services (default: 7)")
    parser.add_argument("--seconds", type=float, default=3, help="seconds of each load (default: 3)")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder, _checkout(args.base, Path(folder) / "base") as base:
            empty = Path(folder) / "empty.jsonl"  # a request without texts measures only the cost of the service
            empty.write_text('{"inputs": []}\n', encoding="utf-8")
            workloads = [
                LoadSpec("[]", str(empty), 8),
                *(LoadSpec(name, name, 16, graph_alone=name == "short") for name in ("short", "mixed", "long")),
                LoadSpec("short", "short", 1),
            ]
            rounds: list[dict[str, list[Result]]] = []
            for i in range(args.rounds):
                print(f"round {i + 1} of {args.rounds}", file=sys.stderr)
                trees = {"base": base, "new": TREE}
                order = sorted(trees, reverse=i % 2 == 1)  # neither is always the second one
                rounds.append({name: _measure_all(trees[name], Path(folder) / "log", workloads, args.seconds) for name in order})
    except StartError as error:
        print(f"tests/compare.py: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(args.base, workloads, rounds)))
    return 0


@contextmanager
def _checkout(commit: str, folder: Path) -> Iterator[Path]:
    """Checks out a commit into a folder, and removes it at the end.

    Raises:
        StartError: The commit does not exist.
    """
    worktree = ["git", "-C", str(TREE), "worktree"]
    checkout = subprocess.run([*worktree, "add", "--detach", str(folder), commit], capture_output=True, text=True, check=False)
    if checkout.returncode:
        raise StartError(f"git cannot check out `{commit}`: {checkout.stderr.strip().splitlines()[-1]}")
    try:
        yield folder
    finally:
        subprocess.run([*worktree, "remove", "--force", str(folder)], check=True)


def _measure_all(tree: Path, log: Path, loads: Sequence[LoadSpec], seconds: float) -> list[Result]:
    """Runs the service of a tree, and returns the result of each load.

    Raises:
        StartError: The service does not start or does not answer.
    """
    [port] = free_ports(1)
    replica = ServeProcess(tree / "models", port, log, tree=tree)
    replica.spawn()
    try:
        replica.wait_until_it_listens()
        return [_measure(replica, load, seconds, TREE / "models" / GRAPH if load.graph_alone else None) for load in loads]
    finally:
        replica.kill()


def _measure(replica: ServeProcess, load: LoadSpec, seconds: float, bundle: Path | None) -> Result:
    bodies = build_bodies(load.workload, path="/classify")
    target = Target(parse_url(f"{replica.url}/classify"), bodies, {}, {"name": GRAPH})
    cpu_s, totals = _cpu_s(replica.process.pid), read_run_totals(target)
    result = generator.Load(target, load.connections, seconds=seconds, warmup_s=WARM_UP_S, timeout_s=30)
    generator.send_loads([result], threading.Event())
    cpu_s, totals = _cpu_s(replica.process.pid) - cpu_s, read_run_totals(target) - totals
    metrics = summarize(load.name, result, totals, open_loop=False)
    if not metrics.latency:
        raise StartError(f"no request of `{load.name}` was answered; the log of the service: {replica.log.read_text()}")
    graph_ms = None if bundle is None else 1000 * _graph_s(bundle, bodies, metrics.batches["mean_rows"], seconds)
    answers = sum(record.outcome == OK for record in result.records)
    return Result(metrics.rps, 1000 * cpu_s / answers, graph_ms)


def _cpu_s(pid: int) -> float:
    """Returns the processor seconds of all threads of a process."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _graph_s(bundle: Path, bodies: Sequence[Body], rows: float, seconds: float) -> float:
    """Returns the processor seconds per text of only a bundle's graph, on a thread per core, in batches of `rows` texts on average."""
    loop = RawLoop(bundle)
    encodings, inputs = list(chain.from_iterable(encode_bodies(loop.bundle, bodies))), loop.bundle.graph("cpu", "auto").inputs
    ends = [round(i * rows) for i in range(1, int(len(encodings) / rows) + 1)]
    batches = [encodings[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]
    feeds = [(build_feed(batch, inputs, (len(batch), max(map(len, batch)))), len(batch)) for batch in batches]
    began = time.process_time()
    texts_per_s = loop.measure(feeds, threads=os.cpu_count() or 1, seconds=seconds, stop=threading.Event())
    return (time.process_time() - began) / (texts_per_s * seconds * (1 + WARM_UP_SHARE))


def table(base: str, loads: Sequence[LoadSpec], rounds: Sequence[dict[str, list[Result]]]) -> Iterator[str]:
    """Yields the lines of a Markdown table: medians over the rounds, and the lowest and highest ratio of a round."""
    yield f"| texts | connections | {base} requests/s | new requests/s | speed | lowest to highest | {base} CPU ms | new CPU ms | CPU |"
    yield "|---|---|---|---|---|---|---|---|---|"
    alone = []
    for i, load in enumerate(loads):
        old, new = ([results[name][i] for results in rounds] for name in ("base", "new"))
        speeds = [mine.rps / its.rps for its, mine in zip(old, new, strict=True)]
        cpu = statistics.median(mine.cpu_ms / its.cpu_ms for its, mine in zip(old, new, strict=True) if its.cpu_ms)
        old_rps, new_rps, old_ms, new_ms = (
            statistics.median(getattr(result, metric) for result in results) for metric in ("rps", "cpu_ms") for results in (old, new)
        )
        yield (
            f"| {load.name} | {load.connections} | {old_rps:.1f} | {new_rps:.1f} | {statistics.median(speeds):.3f} | "
            f"{min(speeds):.3f} to {max(speeds):.3f} | {old_ms:.3f} | {new_ms:.3f} | {cpu:.3f} |"
        )
        if load.graph_alone:
            factors = (statistics.median(result.cpu_ms / (result.graph_ms or 1) for result in results) for results in (old, new))
            alone.append("\nprocessor time of {} over that of the graph alone: {:.2f} and {:.2f}".format(load.name, *factors))
    yield from alone


if __name__ == "__main__":
    sys.exit(main())
