"""`bert-serve score --ray` on a local cluster gives the same bytes as without Ray, even if a process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from application import LONG
from bertserve.service.cli import main

# Ray itself emits warnings
pytestmark = [
    pytest.mark.full_grid,
    pytest.mark.serial,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("logging_of_pytest"),
]

# no usage reports, even if the cluster is configured to send them
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9", "RAY_DEDUP_LOGS": "0"}
WORDS = "a good bad film very the was book".split()
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Yields the address of a cluster on loopback that has two nodes with one CPU each."""
    folder = tempfile.mkdtemp(prefix="ray")  # pytest's temporary paths are too long for socket names
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (QUIET | {"RAY_TMPDIR": folder}).items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        # Ray replaces 127.0.0.1 by the machine's own address
        node = {"num_cpus": 1, "node_ip_address": "127.0.0.2", "object_store_memory": 10**8}
        made = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        try:
            made.add_node(**node)
            yield made.address
        finally:
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def write(path: Path, rows: int, *, more: Mapping[int, Any] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [(more or {}).get(i, " ".join(WORDS[(i * k) % 8] for k in range(1 + i * 7 % 9))) for i in range(rows)]
    pq.write_table(pa.table({"id": range(rows), "review": pa.array(texts, pa.string())}), path)


def arguments(models: Path, *more: str | Path) -> list[str]:
    return ["score", "--models", str(models), "--model", "tiny", "--text", "review", *map(str, more)]


def start(models: Path, *more: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bertserve.service.cli", *arguments(models, *more)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder without `_bertserve.json`."""
    names = [path for path in folder.rglob("*") if path.is_file() and path.name != "_bertserve.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


def scored_one_by_one(models: Path, source: Path, output: Path) -> dict[str, bytes]:
    for path in source.rglob("*.parquet"):
        made = output / path.relative_to(source)
        made.parent.mkdir(parents=True, exist_ok=True)
        assert main(arguments(models, path, made)) in (0, 3)
    return contents(output)


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < until, what
        time.sleep(0.01)
    return found


def actors(address: str) -> list[int]:
    """Returns the process ids of this cluster's actors that have started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name = (entry / "cmdline").read_bytes()
            if b"ray::MapWorker(MapBatches(FileScorer))" in name:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if address.encode() in Path(f"/proc/{parent}/cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def test_outputs_are_byte_identical_to_those_of_one_machine(
    cluster: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    write(source / "a.parquet", 5000, more={17: LONG, 4500: None})
    write(source / "b/c.parquet", 300)
    write(source / "b/none.parquet", 0)
    write(source / "b/bad.parquet", 3, more={0: None, 1: None, 2: None})
    expected = scored_one_by_one(models, source, tmp_path / "expected")
    write(source / "_b/d.parquet", 5)
    write(source / ".e.parquet", 5)

    assert 3 == main(arguments(models, "--ray", cluster, source, output))

    assert expected == contents(output)
    assert {"a.parquet", "b/bad.parquet", "b/c.parquet", "b/none.parquet"} == {name for name in expected if name.endswith(".parquet")}
    assert {"a.parquet.rejected.jsonl", "b/bad.parquet.rejected.jsonl"} == {name for name in expected if name.endswith(".jsonl")}
    assert "4 files; 5303 rows: 5299 answered, 1 of them with warnings, 4 rejected" in capsys.readouterr().err


def test_a_killed_actor_loses_and_duplicates_no_rows(cluster: str, models: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    for i in range(2):
        write(source / f"{i}.parquet", 9_000, more={5 + i: None})
    expected = scored_one_by_one(models, source, tmp_path / "expected")
    with start(models, "--ray", cluster, source, output) as process:
        wait_for(lambda: list(output.glob(".*.parquet.*.made")), "no file was begun")
        killed = actors(cluster)
        for each in killed:
            os.kill(each, signal.SIGKILL)
        done = list(output.glob("*.parquet"))
        _, said = process.communicate(timeout=100)

    assert 0 < len(killed) <= 2
    assert [] == done, "a file was whole before the kill; give it more rows"
    assert (3, expected) == (process.returncode, contents(output)), said
    assert "2 files; 18000 rows: 17998 answered" in said


def test_a_run_resumes_with_the_missing_files_after_its_driver_was_killed(
    cluster: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `kill -9` of the driver, the same command scores the other files. Other options are refused."""
    source, output = tmp_path / "in", tmp_path / "out"
    for i in range(4):
        write(source / f"{i}.parquet", 4500)
    with start(models, "--ray", cluster, source, output) as process:
        wait_for(lambda: list(output.glob("*.parquet")), "no file is done")
        process.kill()
    wait_for(lambda: not actors(cluster), "actors outlive their driver")
    kept = {path: path.stat().st_mtime_ns for path in output.glob("*.parquet")}
    assert 0 < len(kept) < 4

    assert 2 == main(arguments(models, "--ray", cluster, "--parameters", '{"top_k": 1}', source, output))
    assert "different parameters" in capsys.readouterr().err
    assert 0 == main(arguments(models, "--ray", cluster, source, output))

    assert f"{4 - len(kept)} files and {len(kept)} done before" in capsys.readouterr().err
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert scored_one_by_one(models, source, tmp_path / "expected") == contents(output)


def test_a_signal_stops_the_run(cluster: str, models: Path, tmp_path: Path) -> None:
    """SIGTERM ends the run with exit code 143 and stops all actors."""
    for i in range(4):
        write(tmp_path / f"in/{i}.parquet", 9_000)
    with start(models, "--ray", cluster, tmp_path / "in", tmp_path / "out") as process:
        wait_for(lambda: list((tmp_path / "out").glob("*.parquet")), "no file is done")
        process.terminate()
        _, said = process.communicate(timeout=60)

    assert 143 == process.returncode
    assert "the same command" in said
    wait_for(lambda: not actors(cluster), "actors outlive their driver")


def test_a_broken_file_is_named_and_the_other_files_are_scored(
    cluster: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run then exits with code 1. Too many rejected rows, or an actor larger than the cluster's nodes, also end a run."""
    source, output = tmp_path / "in", tmp_path / "out"
    write(source / "0.parquet", 20)
    write(source / "2.parquet", 20, more={3: None, 4: None})
    (source / "1.parquet").write_bytes(b"PAR1 no")

    assert 1 == main(arguments(models, "--ray", cluster, source, output))
    assert {"0.parquet", "2.parquet", "2.parquet.rejected.jsonl"} == set(contents(output))
    assert "1 of 3 files" in (message := capsys.readouterr().err) and "1.parquet: " in message
    assert [4, 5] == [json.loads(line)["row"] for line in (output / "2.parquet.rejected.jsonl").read_text().splitlines()]

    (source / "1.parquet").unlink()
    assert 1 == main(arguments(models, "--ray", cluster, "--restart", "--max-rejected", "1", source, output))
    assert "--max-rejected is 1" in capsys.readouterr().err
    assert 2 == main(arguments(models, "--ray", cluster, "--actor-cpus", "3", "--restart", source, output))
    assert "--actor-cpus is 3, " in capsys.readouterr().err
