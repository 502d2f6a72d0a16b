"""The command `bert-export`: flags, exit codes, and existing bundles."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bertserve.export import cli
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, load_bundle
from support import tiny
from support.bundles import FAST, FEW_TEXTS, Run, assert_exit, contents, left_in, usage_error
from support.checkpoints import bert
from support.sound_bundles import sound

pytestmark = pytest.mark.torch


def test_progress_goes_to_stderr_and_the_validation_to_stdout(source: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(source), "--output", str(output), "--int8-texts", str(FEW_TEXTS), "--verbose"]) == 0

    captured = capsys.readouterr()
    stages = ["load", "trace", "reference", "optimize", "parity", "quantize", "parity", "package"]
    assert [line.split()[0] for line in captured.err.splitlines() if not line.startswith("bert-export: WARNING")] == stages
    assert captured.out.startswith(f"{output / 'tiny-bert'}: text-classification, labels negative, positive, neutral\n")
    facts = ("model.cpu.fp32.onnx", "model.cpu.int8.onnx", "100.0% of", "MiB  default")
    assert [fact for fact in facts if fact not in captured.out] == []
    tables = captured.out[captured.out.index("| graph") :]
    assert [heading for heading in ("### Errors by length", "### Speed at export") if heading not in tables] == []
    assert set(tables.splitlines()) - set((output / "tiny-bert/README.md").read_text().splitlines()) == set()


@pytest.mark.parametrize(
    ("location", "flags", "name", "checkpoint"),
    [
        (".", (), "tiny-bert", "tiny-bert"),
        ("../link", (), "link", "link"),
        ("{}/", ("--name", "sentiment"), "sentiment", "tiny-bert"),
    ],
)
def test_the_bundle_is_named_after_its_source_or_by_the_name_flag(
    source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch, location: str, flags: tuple[str, ...], name: str, checkpoint: str
) -> None:
    source.with_name("link").symlink_to(source)
    monkeypatch.chdir(source)

    assert run(location.format(source), *FAST, *flags)[0] == 0
    assert left_in(output) == [name]
    manifest = load_bundle(output / name).manifest
    assert (manifest.name, manifest.source.checkpoint) == (name, checkpoint)


def test_an_unreadable_checkpoint_is_named(
    source: Path, output: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message does not speak about the bundle, which an export has not written yet, and which `verify` can read."""

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(source / "config.json"))

    monkeypatch.setattr("bertserve.export.pipeline.load_checkpoint", fail)
    monkeypatch.setattr("bertserve.export.validation.checkpoint_check.load_checkpoint", fail)
    code, message = run(source)
    assert (code, left_in(output)) == (1, [])
    assert cli.main(["verify", str(sound(tmp_path / "sound")), "--checkpoint", str(source)]) == 1
    for error in (message, capsys.readouterr().err):
        assert all(fact in error for fact in ("Permission denied", str(source / "config.json")))


def test_manifest_and_card_contain_the_given_metrics(source: Path, output: Path, run: Run, tmp_path: Path) -> None:
    """Metrics from a file are stored and shown unchanged. A README.md that is not UTF-8 does not stop the export."""
    metrics = [{"name": "accuracy, SST-2", "checkpoint": 0.8784, "graphs": {"cpu/fp32": 0.8784, "cpu/int8": 0.8761}}]
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    (source / "README.md").write_bytes("# Café".encode("latin-1"))

    assert run(source, *FAST, "--metrics-file", tmp_path / "metrics.json")[0] == 0
    bundle = load_bundle(output / "tiny-bert")
    assert [metric.model_dump() for metric in bundle.manifest.metrics] == metrics
    assert "| accuracy, SST-2 | 0.8784 | 0.8784 | 0.8761 |" in (bundle.path / CARD_FILE).read_text(encoding="utf-8")


@pytest.mark.full_grid
def test_a_checkpoint_is_exported_once_and_served(tmp_path: Path) -> None:
    bert(tmp_path, "reviews")
    command = [Path(sys.executable).with_name("bert-serve"), "check", "--model", "reviews", "--cache-dir", "cache", "--precision", "fp32"]
    first, second = (subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True) for _ in range(2))

    assert first.stdout == second.stdout == "reviews: text-classification, cpu/fp32: ok\n"
    assert "parity    cpu/fp32" in first.stderr
    assert second.stderr == ""
    assert "dynamo opset 18" in first.stderr  # the command's default tracer; other tests override it
    assert sorted(path.name for path in tmp_path.glob("cache/*/*")) == [".lock", "reviews"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--precision", "fp64"), "from fp32, fp16, int8"),
        (("--precision", "fp16"), "cpu: cpu takes fp32, int8; cuda takes fp32, fp16; tensorrt takes fp32, fp16"),
        (("--provider", "cuda", "--precision", "fp16,int8"), "--precision: `int8`"),
        (("--provider", "rocm"), "from cpu, cuda, tensorrt"),
        (("--provider", "cpu,cuda", "--attentions"), "--attentions: "),
        *((("--precision", value), f"--precision: `{value}`") for value in ("", "fp32,fp32")),
        *((("--name", value), f"--name: `{value}`") for value in ("../up", ".hidden", "a" * 65)),
        (("--task", "translation"), "'translation'"),
        *(((f"--layers={value}",), f"--layers: `{value}`") for value in ("first", "1,x", "")),
        (("--metrics-file", "no/such/file.json"), "`no/such/file.json`"),
        (("--precison", "fp32"), "--precision?"),
        *((("--max-int8-error", value), f"--max-int8-error: `{value}`") for value in ("0", "1.5", "nan", "little")),
        *(
            (("--precision", "fp32", *flags), "int8")
            for flags in (("--quick",), ("--max-int8-error", "0.5"), ("--int8-validation", "file"))
        ),
    ],
)
def test_a_wrong_flag_is_a_usage_error(output: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], reason: str) -> None:
    assert reason in usage_error(capsys, "checkpoint", "--output", output, *flags)
    assert not output.exists()


@pytest.mark.parametrize("document", ["not json", '[{"name": "f1", "checkpoint": NaN, "graphs": {}}]'])
def test_malformed_metrics_are_a_usage_error(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], document: str) -> None:
    """A manifest with NaN could be written but not read."""
    (tmp_path / "metrics.json").write_text(document)

    assert "metrics" in usage_error(capsys, "checkpoint", "--output", output, "--metrics-file", tmp_path / "metrics.json")


@pytest.mark.parametrize("module", ["torch", "onnxruntime"])
def test_a_missing_extra_is_named_with_its_install_command(output: Path, run: Run, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert_exit(3, run("checkpoint"), f"bert-export: {module} ", "[export,cpu]'")
    assert not output.exists()


def put_aside(target: Path, _: Path) -> None:
    """Writes a bundle, and another one that a killed export put aside."""
    (tiny.bundle(target.parent, target.name) / f".{MANIFEST_FILE}").touch()  # a file of a killed `verify --update`
    (target.parent / ".tiny-bert.old").mkdir()
    (target.parent / ".tiny-bert.old" / MANIFEST_FILE).write_bytes((target / MANIFEST_FILE).read_bytes())


REPLACED: dict[str, Callable[[Path, Path], object]] = {
    "bundle": lambda target, _: (tiny.bundle(target.parent, target.name) / ".DS_Store").touch(),
    "bundle put aside": put_aside,
    "file": lambda target, _: target.write_text("plain"),
    "link to a folder": lambda target, elsewhere: ((elsewhere / "inside").mkdir(parents=True), target.symlink_to(elsewhere)),
    "dangling link": lambda target, elsewhere: target.symlink_to(elsewhere),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_overwrite_replaces_a_bundle_file_or_link(source: Path, output: Path, tmp_path: Path, run: Run, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    output.mkdir()
    REPLACED[kind](output / "tiny-bert", elsewhere)
    others = sorted(elsewhere.rglob("*")), elsewhere.exists()

    assert_exit(2, run(source, *FAST), "--overwrite")
    assert run(source, *FAST, "--overwrite")[0] == 0
    assert left_in(output) == ["tiny-bert"]
    assert load_bundle(output / "tiny-bert").manifest.source.checkpoint == "tiny-bert"
    assert (sorted(elsewhere.rglob("*")), elsewhere.exists()) == others


def touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


KEPT: dict[str, Callable[[Path, Path], Path | None]] = {
    "the source": lambda target, source: source.rename(target),
    "a model without a manifest": lambda target, _: touch(target / "model.onnx"),
    "a bundle with the source": lambda target, source: source.rename(tiny.bundle(target.parent, target.name) / source.name),
    "a bundle with a file": lambda target, _: touch(tiny.bundle(target.parent, target.name) / "tagger.py"),
    "a bundle with a hidden file": lambda target, _: touch(tiny.bundle(target.parent, target.name) / ".env"),
    "a bundle with a hidden folder": lambda target, _: touch(tiny.bundle(target.parent, target.name) / ".git/config"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_folder_that_contains_foreign_files_is_never_replaced(source: Path, output: Path, run: Run, kind: str) -> None:
    output.mkdir()
    new_source = KEPT[kind](output / "tiny-bert", source)
    files = sorted(output.rglob("*"))

    for flags in ((), ("--overwrite",)):
        code, message = run(new_source or source, *FAST, *flags)
        assert code == 2, message
        assert "--overwrite" not in message
        assert sorted(output.rglob("*")) == files


def test_a_failed_rename_keeps_the_existing_bundle(source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    existing = contents(tiny.bundle(output, "tiny-bert"))
    rename = Path.rename

    def fails_for_the_new(self: Path, target: Path) -> Path:
        if self.name == "bundle":
            raise PermissionError(13, "Permission denied", str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new)

    assert run(source, *FAST, "--overwrite")[0] == 1
    assert left_in(output) == ["tiny-bert"]
    assert contents(output / "tiny-bert") == existing
