"""Compares the speed of this working tree with that of a commit: `python -m overhead.commits COMMIT`.

Both get the same loads in turn. Each uses the bundles of its own tree, and both use the virtual environment of this tree. Only the
ratio within a round is meaningful, because the speed of a shared machine changes from minute to minute.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bertserve.bench.errors import BenchError
from bertserve.bench.load.generator import Durations
from bertserve.bench.progress import BenchProgress
from overhead.comparison import Candidate, Comparison, Load, Running
from overhead.replica import Replica, free_ports

_TREE = Path(__file__).resolve().parents[2]
_START = "import sys; from {}cli import main; sys.exit(main())"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit code: 0, or 2 if a commit does not exist or its service does not start."""
    parser = argparse.ArgumentParser(prog="python -m overhead.commits", description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("base", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; each starts both services (default: 7)")
    parser.add_argument("--seconds", type=float, default=3, help="seconds of each load (default: 3)")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _compare(args.base, Path(folder), rounds=args.rounds, seconds=args.seconds)
    except BenchError as error:
        print(f"overhead.commits: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(base: str, folder: Path, *, rounds: int, seconds: float) -> None:
    empty = folder / "empty.jsonl"  # a request without texts measures only the cost of the service
    empty.write_text('{"inputs": []}\n', encoding="utf-8")
    names = {
        Load(str(empty), 8): "no text",
        **{Load(workload, 16): workload for workload in ("short", "mixed", "long")},
        Load("short", 1): "short",
    }
    with _worktree(base, folder / "base") as tree:
        candidates = [_candidate("base", tree), _candidate("new", _TREE)]
        progress = BenchProgress()
        comparison = Comparison(candidates, list(names), Durations(seconds, 0.5, 30), models=Path(), threads=2, progress=progress)
        for i in range(rounds):
            progress.log(f"round {i + 1} of {rounds}")
            comparison.run_round()
    print(
        f"| texts | connections | {base} requests/s | new requests/s | speed | {base} CPU ms | new CPU ms |\n|---|---|---|---|---|---|---|"
    )
    for load, name in names.items():
        rps = [comparison.median(each, load, "rps") for each in ("base", "new")]
        cpu = [comparison.median(each, load, "cpu_ms") for each in ("base", "new")]
        ratio = comparison.ratio("new", "base", load)
        print(f"| {name} | {load.connections} | {rps[0]:.1f} | {rps[1]:.1f} | {ratio:.3f} | {cpu[0]:.3f} | {cpu[1]:.3f} |")


@contextmanager
def _worktree(commit: str, folder: Path) -> Iterator[Path]:
    """Checks out a commit into a folder, and removes the folder at the end.

    Raises:
        BenchError: The commit does not exist, or git is not installed.
    """
    git = shutil.which("git")
    if git is None:
        raise BenchError("git is not installed; install it.")
    try:
        subprocess.run(
            [git, "-C", str(_TREE), "worktree", "add", "--detach", str(folder), commit], check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as error:
        raise BenchError(f"git cannot check out `{commit}`: {error.stderr.strip().splitlines()[-1]}") from error
    try:
        yield folder
    finally:
        subprocess.run([git, "-C", str(_TREE), "worktree", "remove", "--force", str(folder)], check=True)


def _candidate(name: str, tree: Path) -> Candidate:
    package = "bertserve.service." if (tree / "bertserve").exists() else "service."

    @contextmanager
    def serve(_: Path, _threads: int, folder: Path) -> Iterator[Running]:
        (port,) = free_ports(1)
        program = [sys.executable, "-c", _START.format(package)]
        replica = Replica(tree / "models", port, folder / "log", [], program=program, tree=tree)
        replica.spawn()
        try:
            replica.wait_until_it_listens()
            yield Running((replica.url,), lambda: (replica.process.pid,))
        finally:
            replica.kill()

    return Candidate(name, f"the code of {tree}", serve)


if __name__ == "__main__":
    sys.exit(main())
