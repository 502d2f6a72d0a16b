"""The texts on which `bert-export verify --update` validates int8 again, and the length of the longest compared sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import tiny
from bertserve.export import calibration
from bertserve.export.calibration import Split, read_split
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import DataError
from bertserve.export.validation import samples
from bertserve.export.validation.pytorch import sample_reference
from bertserve.export.validation.report import report_texts
from bertserve.service.bundle.files import MANIFEST_FILE, TOKENIZER_FILE, digest, load_bundle
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.text.tokenizer import Tokenizer
from bundles import Run, Verify
from checkpoints import bert
from playback import play_back
from staged import ARCHITECTURES, LABELS
from task_runs import encode

pytestmark = pytest.mark.torch
pytest_plugins = ("export_fixtures",)


def numbered(path: Path, numbers: Sequence[int]) -> Path:
    path.write_text("".join(f"text {i}\n" for i in numbers), encoding="utf-8")
    return path


@pytest.fixture(name="manifest", scope="module")
def any_manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Returns a manifest that does not record the texts of int8."""
    return load_bundle(tiny.bundle(tmp_path_factory.mktemp("bundle"))).manifest


def made_with(manifest: Manifest, split: Split) -> Manifest:
    """Returns the manifest of a bundle whose int8 was created with the texts of this split."""
    return manifest.model_copy(update={"int8_texts": split.digests()})


def test_int8_is_validated_again_on_the_same_texts(manifest: Manifest, tmp_path: Path) -> None:
    """The texts of the export's report are used again, from a user's file or from the built-in file."""
    own = read_split(numbered(tmp_path / "own.txt", range(40)))
    built_in = read_split(calibration.BUILT_IN)

    assert own.report == report_texts(made_with(manifest, own), tmp_path / "own.txt")
    assert built_in.report == report_texts(made_with(manifest, built_in), None)


def test_int8_is_not_validated_on_texts_that_created_it(manifest: Manifest, tmp_path: Path) -> None:
    """The error has the number of shared texts; a file of new texts is accepted."""
    split = read_split(numbered(tmp_path / "own.txt", range(40)), numbered(tmp_path / "validation.txt", range(100, 120)))
    numbered(tmp_path / "others.txt", range(35, 60))
    numbered(tmp_path / "new.txt", range(40, 60))

    with pytest.raises(DataError, match=r" 5 of the 25 texts .*others.txt`"):
        report_texts(made_with(manifest, split), tmp_path / "others.txt")
    assert tuple(f"text {i}" for i in range(40, 60)) == report_texts(made_with(manifest, split), tmp_path / "new.txt").lines


def test_the_built_in_texts_cannot_validate_int8_that_a_file_validated(manifest: Manifest, tmp_path: Path) -> None:
    """After an export with `--validation`, the built-in texts have calibrated int8, so the error asks for a file."""
    split = read_split(calibration.BUILT_IN, numbered(tmp_path / "validation.txt", range(20)))

    with pytest.raises(DataError, match=r" 20 texts .* --validation"):
        report_texts(made_with(manifest, split), None)


@pytest.mark.full_grid
def test_update_refuses_the_calibration_texts(
    source: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, verify: Verify
) -> None:
    """The built-in texts calibrated int8, so they are refused, and nothing is written. The file of the export is accepted."""
    own = numbered(tmp_path / "own.txt", range(17))
    with monkeypatch.context() as patch:
        play_back(patch, source)
        assert 0 == run(source, "--validation", own)[0]
    manifest = output / "tiny-bert" / MANIFEST_FILE
    before = manifest.read_bytes()

    for flags, word in (((), " 17 texts "), (("--validation", calibration.BUILT_IN), "700 of the 700")):
        code, checks = verify(output / "tiny-bert", "--checkpoint", source, "--update", *flags)
        assert (1, before) == (code, manifest.read_bytes())
        assert word in list(checks.values())[-1]["detail"]
    assert 0 == verify(output / "tiny-bert", "--checkpoint", source, "--update", "--validation", own)[0]
    assert json.loads(before)["int8_texts"] == json.loads(manifest.read_bytes())["int8_texts"]


@pytest.mark.parametrize("task", ARCHITECTURES)
@pytest.mark.parametrize("limit", [samples.MAX_FULL_LENGTH, 200])
def test_one_sample_has_the_models_maximum_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, limit: int) -> None:
    """The longest sample has the model's maximum length, or about `MAX_FULL_LENGTH` tokens for a longer model."""
    monkeypatch.setattr(samples, "MAX_FULL_LENGTH", limit)
    checkpoint = load_checkpoint(str(bert(tmp_path, architecture=ARCHITECTURES[task], labels=LABELS.get(task, tiny.LABELS), positions=300)))
    (tmp_path / TOKENIZER_FILE).write_text(checkpoint.tokenizer_json, encoding="utf-8")
    spec = checkpoint.tokenizer_spec.model_copy(update={"sha256": digest(tmp_path / TOKENIZER_FILE)})
    tokenizer = Tokenizer(tmp_path / TOKENIZER_FILE, spec)
    requests = sample_reference(checkpoint).requests
    length = max(map(len, encode(TASKS[task], requests[-1], tokenizer, checkpoint).encodings))

    assert (300 if limit > 300 else 150) <= length <= min(limit, 300)
