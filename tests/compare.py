"""Compares the speed of this working tree with that of another commit: `python tests/compare.py COMMIT` (make compare BASE=COMMIT).

In each round, both services run one after the other and get the same loads from this tree's load generator. Each has the code and the
bundles of its own tree, and both use the virtual environment of this tree. Only the ratio within a round is meaningful, because the speed
of a shared machine changes from minute to minute. The processor time per request depends less on other work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bertserve.bench import BenchError
from bertserve.bench.bodies import build_bodies
from bertserve.bench.generator import Durations, run_load
from bertserve.bench.target import OK, build_target, parse_url
from replica import Replica, free_ports

TREE = Path(__file__).resolve().parents[1]


class Load(NamedTuple):
    """A closed loop: its name, its workload or a file of bodies, and its number of connections."""

    name: str
    workload: str
    connections: int


class Result(NamedTuple):
    """Requests per second with status 200, and the processor time of the service per request in milliseconds."""

    rps: float
    cpu_ms: float


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
                Load("[]", str(empty), 8),
                *(Load(name, name, 16) for name in ("short", "mixed", "long")),
                Load("short", "short", 1),
            ]
            rounds: list[dict[str, list[Result]]] = []
            for i in range(args.rounds):
                print(f"round {i + 1} of {args.rounds}", file=sys.stderr)
                trees = {"base": base, "new": TREE}
                order = sorted(trees, reverse=i % 2 == 1)  # neither is always the second one
                rounds.append({name: _measure_all(trees[name], Path(folder) / "log", workloads, args.seconds) for name in order})
    except BenchError as error:
        print(f"tests/compare.py: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(args.base, workloads, rounds)))
    return 0


@contextmanager
def _checkout(commit: str, folder: Path) -> Iterator[Path]:
    """Checks out a commit into a folder, and removes it at the end.

    Raises:
        BenchError: The commit does not exist, or git is not installed.
    """
    git = shutil.which("git")
    if git is None:
        raise BenchError("git is not installed; install it.")
    worktree = [git, "-C", str(TREE), "worktree"]
    added = subprocess.run([*worktree, "add", "--detach", str(folder), commit], capture_output=True, text=True, check=False)
    if added.returncode:
        raise BenchError(f"git cannot check out `{commit}`: {added.stderr.strip().splitlines()[-1]}")
    try:
        yield folder
    finally:
        subprocess.run([*worktree, "remove", "--force", str(folder)], check=True)


def _measure_all(tree: Path, log: Path, loads: Sequence[Load], seconds: float) -> list[Result]:
    """Runs the service of a tree, and returns the result of each load.

    Raises:
        BenchError: The service does not start or does not answer.
    """
    [port] = free_ports(1)
    replica = Replica(tree / "models", port, log, tree=tree)
    replica.spawn()
    try:
        replica.wait_until_it_listens()
        return [_measure(replica, load, seconds) for load in loads]
    finally:
        replica.kill()


def _measure(replica: Replica, load: Load, seconds: float) -> Result:
    target = build_target(parse_url(f"{replica.url}/classify"), build_bodies(load.workload, path="/classify"), {})
    before = _cpu_s(replica.process.pid)
    result = run_load(target, Durations(seconds, 0.5, 30), connections=load.connections, stop=threading.Event())
    cpu_s = _cpu_s(replica.process.pid) - before
    answered = [record for record in result.records if record.outcome == OK]
    start, end = result.measured
    if not answered:
        raise BenchError(f"no request of `{load.name}` was answered; the log of the service: {replica.log.read_text()}")
    return Result(sum(start <= record.ended < end for record in answered) / (end - start), 1000 * cpu_s / len(answered))


def _cpu_s(pid: int) -> float:
    """Returns the processor seconds of a process with all its threads. Linux counts them in ticks of usually 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def table(base: str, loads: Sequence[Load], rounds: Sequence[dict[str, list[Result]]]) -> Iterator[str]:
    """Yields the lines of a Markdown table: medians over the rounds, and the lowest and highest ratio of a round."""
    yield f"| texts | connections | {base} requests/s | new requests/s | speed | lowest to highest | {base} CPU ms | new CPU ms | CPU |"
    yield "|---|---|---|---|---|---|---|---|---|"
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


if __name__ == "__main__":
    sys.exit(main())
