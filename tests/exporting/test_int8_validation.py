"""int8 is validated on texts that its calibration did not use; if it fails, the bundle has the fp32 graph and the reason."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bertserve.export import int8_texts
from bertserve.export.errors import UsageError
from bertserve.export.int8.quantize import quantize
from bertserve.export.int8_texts import Int8Texts, SplitTexts, read_int8_texts
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, load_bundle
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.check import check
from bertserve.service.settings import Settings
from support import tiny
from support.bundles import Run, Verify, assert_exit, contents, edit_constant
from support.checkpoints import numbered_texts
from support.task_runs import answer_input, classify_input

pytestmark = pytest.mark.torch


def test_int8_is_validated_on_the_texts_of_the_validation_flag(source: Path, output: Path, tmp_path: Path, run: Run) -> None:
    own = numbered_texts(tmp_path / "own.txt", range(17))
    assert run(source, "--int8-validation", own)[0] == 0
    texts = load_bundle(output / "tiny-bert").manifest.int8_texts

    assert texts["validation"] == SplitTexts.of(own.read_text(encoding="utf-8").splitlines()).digests()


def test_validation_texts_change_neither_the_int8_graph_nor_its_gate(source: Path, output: Path, tmp_path: Path, run: Run) -> None:
    built_in = int8_texts.BUILT_IN_TEXTS.read_text(encoding="utf-8").splitlines()
    graphs = []
    for start in (100, 200):
        (tmp_path / "validation.txt").write_text("\n".join(built_in[start : start + 30]), encoding="utf-8")
        assert run(source, "--int8-validation", tmp_path / "validation.txt", "--max-int8-error", 1, "--overwrite")[0] == 0
        graphs.append(load_bundle(output / "tiny-bert").graph("cpu", "int8"))

    assert graphs[1].sha256 == graphs[0].sha256
    assert graphs[1].validation.quantization_error == graphs[0].validation.quantization_error
    assert graphs[0].validation.lengths != graphs[1].validation.lengths


def test_a_classifier_is_also_validated_on_pairs(manifest: Manifest) -> None:
    """Every second text is also sent as a pair with another text. If there are pairs, no others are formed."""
    task, tokenizer = EXPORT_TASKS["text-classification"], manifest.tokenizer
    mixed = task.validation_inputs(SplitTexts(("one", "two")), tokenizer)
    own = task.validation_inputs(SplitTexts(("alone",), pairs=(("a", "b"),)), tokenizer)
    questions = EXPORT_TASKS["question-answering"].validation_inputs(SplitTexts(pairs=(("Who?", "He."),)), tokenizer)

    assert mixed == [classify_input("one"), classify_input("two"), classify_input("two", "one")]
    assert own == [classify_input("alone"), classify_input("a", "b")]
    assert questions == [answer_input("Who?", "He.")]


@pytest.mark.parametrize(("flags", "quick"), [((), False), (("--quick",), True)])
def test_quick_int8_has_no_channels_in_float_and_says_so(source: Path, output: Path, run: Run, flags: tuple[str, ...], quick: bool) -> None:
    assert run(source, "--max-int8-error", 1, *flags)[0] == 0
    graph = load_bundle(output / "tiny-bert").graph("cpu", "int8")

    assert quick is ("FloatInputs" not in graph.validation.quantized)
    assert quick is ("--quick" in graph.description)


def break_a_matrix(source: Path, target: Path, *args: Any, **options: Any) -> Any:
    """Quantizes a graph, and then sets the scales of one matrix to zero, so that it is not the graph that the gate measured."""
    result = quantize(source, target, *args, **options)
    product = next(node for node in onnx.load(str(target)).graph.node if node.op_type == "MatMulIntegerToFloat")
    edit_constant(target, product.input[3], np.zeros_like)
    return result


@pytest.mark.parametrize(
    ("flags", "faulty"), [("--max-int8-error 1e-9", False), ("--max-int8-error 1e-9 --precision int8", False), ("", True)]
)
def test_a_failed_int8_graph_is_replaced_by_the_verified_fp32_graph(
    source: Path, output: Path, run: Run, monkeypatch: pytest.MonkeyPatch, flags: str, faulty: bool
) -> None:
    if faulty:
        monkeypatch.setattr("bertserve.export.int8.quantize.quantize", break_a_matrix)
    result = run(source, *flags.split())
    bundle = load_bundle(output / "tiny-bert")
    [omitted] = bundle.manifest.omitted

    assert_exit(4, result, omitted.reason)
    assert (omitted.provider, omitted.precision) == ("cpu", "int8")
    assert omitted.reason.startswith("int8 outputs" if faulty else "int8 changes")
    assert [(graph.precision, graph.default) for graph in bundle.manifest.graphs] == [("fp32", True)]
    assert set(contents(bundle.path)) == {CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, "model.cpu.fp32.onnx"}
    assert omitted.reason in (bundle.path / CARD_FILE).read_text(encoding="utf-8")
    assert asyncio.run(check(Settings(models=(output,)))) == 0


@pytest.fixture(name="manifest", scope="module")
def any_manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Returns a manifest that does not record the texts of int8."""
    return load_bundle(tiny.bundle(tmp_path_factory.mktemp("bundle"))).manifest


def manifest_with(manifest: Manifest, split: Int8Texts) -> Manifest:
    """Returns the manifest of a bundle whose int8 was created with the texts of this split."""
    return manifest.model_copy(update={"int8_texts": int8_texts.digest_texts(split)})


def test_int8_is_validated_again_on_the_same_texts(manifest: Manifest, tmp_path: Path) -> None:
    """The validation texts of the export are used again, from a user's file or from the built-in file."""
    own = read_int8_texts(numbered_texts(tmp_path / "own.txt", range(40)))
    built_in = read_int8_texts(int8_texts.BUILT_IN_TEXTS)

    assert int8_texts.read_validation_texts(manifest_with(manifest, own), tmp_path / "own.txt") == own["validation"]
    assert int8_texts.read_validation_texts(manifest_with(manifest, built_in), None) == built_in["validation"]


def test_int8_is_not_validated_on_texts_that_created_it(manifest: Manifest, tmp_path: Path) -> None:
    split = read_int8_texts(numbered_texts(tmp_path / "own.txt", range(40)), numbered_texts(tmp_path / "validation.txt", range(100, 120)))
    numbered_texts(tmp_path / "others.txt", range(35, 60))
    numbered_texts(tmp_path / "new.txt", range(40, 60))

    with pytest.raises(UsageError, match=r" 5 of the 25 texts .*others.txt`"):
        int8_texts.read_validation_texts(manifest_with(manifest, split), tmp_path / "others.txt")
    with pytest.raises(UsageError, match=r" 20 texts .* --int8-validation"):  # not silently on the built-in texts
        int8_texts.read_validation_texts(manifest_with(manifest, split), None)
    other_texts = int8_texts.read_validation_texts(manifest_with(manifest, split), tmp_path / "new.txt")
    assert other_texts.lines == tuple(f"text {i}" for i in range(40, 60))


@pytest.mark.full_grid
def test_update_refuses_the_calibration_texts(source: Path, output: Path, tmp_path: Path, run: Run, verify: Verify) -> None:
    """The built-in texts calibrated int8, so they are refused, and nothing is written. The file of the export is accepted."""
    own = numbered_texts(tmp_path / "own.txt", range(17))
    assert run(source, "--int8-texts", int8_texts.BUILT_IN_TEXTS, "--int8-validation", own)[0] == 0
    manifest = output / "tiny-bert" / MANIFEST_FILE
    before = manifest.read_bytes()

    for flags, word in (((), " 17 texts "), (("--int8-validation", int8_texts.BUILT_IN_TEXTS), "700 of the 700")):
        code, checks = verify(output / "tiny-bert", "--checkpoint", source, "--update", *flags)
        assert (code, manifest.read_bytes()) == (1, before)
        assert word in list(checks.values())[-1]["detail"]
    assert verify(output / "tiny-bert", "--checkpoint", source, "--update", "--int8-validation", own)[0] == 0
    assert json.loads(manifest.read_bytes())["int8_texts"] == json.loads(before)["int8_texts"]
