"""`bert-serve score --ray`, and its public class in a pipeline of Ray Data, give the predictions of one machine."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertserve.service.errors import SettingsError
from support.app_client import LONG, assert_same
from support.scored import TEXTS, run

pytestmark = pytest.mark.usefixtures("logging_of_pytest", "small_blocks")


@pytest.mark.full_grid
@pytest.mark.serial
@pytest.mark.filterwarnings("ignore")
def test_ray_data_gives_the_predictions_of_one_machine(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a local cluster, with the public class in a pipeline and with `--ray`. A row without an answer has an error.

    A variable of another command is ignored.
    """
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray"), "BERT_SERVE_THREADS": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    import ray
    from ray.data import read_parquet

    from bertserve.service.scoring.ray_data import Scorer

    (tmp_path / "in").mkdir()
    rows = [{"id": index, "review": text} for index, text in enumerate([*TEXTS, LONG])]
    for part in range(3):
        pq.write_table(pa.Table.from_pylist([*rows[part::3], {"id": 100 + part, "review": None}]), tmp_path / f"in/{part}.parquet")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "all.parquet")
    assert run(models, tmp_path / "all.parquet", tmp_path / "scored.parquet", "--columns", "text=review") == 0
    expected = {row["id"]: row for row in pq.read_table(tmp_path / "scored.parquet").to_pylist()}
    with pytest.raises(SettingsError, match="same bundle"):
        Scorer(str(models / "tiny"), version="0")
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        arguments = {"model": str(models / "tiny"), "columns": {"text": "review"}}
        predictions = read_parquet(str(tmp_path / "in")).map_batches(Scorer, fn_constructor_kwargs=arguments, concurrency=1).take_all()
        flags = ("--columns", "text=review", "--ray", "local")
        assert run(models, tmp_path / "all.parquet", tmp_path / "good", *flags, "--actors", "1", "--actor-cpus", "9") == 0
        capsys.readouterr()
        assert run(models, tmp_path / "in", tmp_path / "out", *flags) == 3
        assert "94 rows, 3 with errors, in " in capsys.readouterr().err
        assert run(models, tmp_path / "in", tmp_path / "out", *flags) == 1
    finally:
        ray.shutdown()
    for actual in (predictions, pq.read_table(tmp_path / "out").to_pylist()):
        by_id = {row["id"]: row for row in actual}
        assert {key for key, row in by_id.items() if row["error"] is not None and row["prediction"] is None} == {100, 101, 102}
        assert_same({key: {name: by_id[key][name] for name in expected[key]} for key in expected}, expected)
