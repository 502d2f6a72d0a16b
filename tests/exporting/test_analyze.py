"""`bert-export analyze` without torch: shapes, layers and bundles."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bertserve.export import analyze_cli, cli
from bertserve.export.analyze.profiling import Node, find_parts
from bertserve.export.analyze.shapes import NAMED, Shape, choose_lengths, variants
from bertserve.export.errors import CheckpointError
from bertserve.service.bundle.files import load_bundle
from bundles import Analyze

pytest_plugins = ("export_fixtures",)

MODELS = Path(__file__).parent.parent.parent / "models"


def test_variants_differ_in_one_dimension() -> None:
    """Variants have fewer layers, other heads in matrices of the same size, or a smaller hidden size with the same proportions."""
    base = NAMED["bert-base"]

    assert [3, 6, 12] == [shape.layers for shape in variants(base, "layers")]
    assert [1, 3, 6, 12, 24] == [shape.heads for shape in variants(base, "heads")]
    assert [Shape(12, 3, 192, 768), Shape(12, 6, 384, 1536), base] == variants(base, "hidden")
    assert {base} == {replace(shape, layers=12, heads=12) for axis in ("layers", "heads") for shape in variants(base, axis)}


@pytest.mark.parametrize("shape", [Shape(1, 1, 7, None), Shape(1, 3, 48, 10), *NAMED.values()])
def test_every_variant_is_a_valid_shape(shape: Shape) -> None:
    """The heads divide the hidden size, no layers or heads are 0, and the base shape is one of the variants."""
    for axis in ("layers", "heads", "hidden"):
        found = variants(shape, axis)
        assert shape in found
        assert all(v.layers and v.heads and v.hidden % v.heads == 0 for v in found)


def test_an_explicit_length_beyond_the_model_is_an_error() -> None:
    assert [16, 64] == choose_lengths(None, (16, 64, 128), 100)
    assert [10] == choose_lengths(None, (16, 64), 10)
    assert [16, 100] == choose_lengths((16, 100), (64,), 100)
    with pytest.raises(CheckpointError, match=r"100 tokens, .* --lengths has 101"):
        choose_lengths((16, 101), (64,), 100)


def chain(*ops: str) -> list[Node]:
    names = ["x", *(f"v{i}" for i in range(len(ops)))]
    return [Node(op, [a], [b]) for op, (a, b) in zip(ops, pairwise(names), strict=True)]


LAYER = ("MatMul", "MultiHeadAttention", "MatMul", "LayerNormalization", "MatMul", "Gelu", "MatMul", "LayerNormalization")


def test_a_layer_begins_with_the_inputs_of_its_attention() -> None:
    nodes = chain("Gather", "LayerNormalization", *LAYER, *LAYER, "MatMul", "LayerNormalization", "MatMul")

    assert ["embeddings"] * 2 + ["layer 1"] * 8 + ["layer 2"] * 8 + ["head"] * 3 == find_parts(nodes)


def test_unfused_attention_is_found_by_its_softmax() -> None:
    """The value projection and the product after the softmax belong to the same layer. A mask that all layers read belongs to no layer."""
    norm = Node("LayerNormalization", ["x"], ["n"])
    mask = Node("Cast", ["attention_mask"], ["mask"])
    layer = [
        Node("MatMul", ["n"], ["q"]),
        Node("MatMul", ["n"], ["v"]),
        Node("Add", ["q", "mask"], ["scores"]),
        Node("Softmax", ["scores"], ["p"]),
        Node("MatMul", ["p", "v"], ["context"]),
        Node("Add", ["context", "n"], ["sum"]),
        Node("LayerNormalization", ["sum"], ["n2"]),
        Node("MatMul", ["n2"], ["m"]),
        Node("LayerNormalization", ["m"], ["n3"]),
    ]

    assert ["embeddings"] * 2 + ["layer 1"] * 9 + ["head"] == find_parts([norm, mask, *layer, Node("MatMul", ["n3"], ["logits"])])


def test_a_graph_without_attention_has_no_layers() -> None:
    assert ["head", "head"] == find_parts(chain("Gather", "MatMul"))


def test_a_bundle_is_analyzed_by_layer_and_operator(analyze: Analyze) -> None:
    """Each kernel belongs to a part. The model has six layers with twelve heads; the last layer computes only the first token."""
    report, printed = analyze(MODELS / "sentiment", "--lengths", "16,64", "--seconds", "0.5")
    [graph] = report["graphs"]
    lines = [line.split() for line in printed.splitlines()]

    assert [16, 64] == [profile["length"] for profile in graph["profiles"]]
    layers = {f"layer {i}" for i in range(1, 7)}
    for profile in graph["profiles"]:
        assert {"embeddings", "head", *layers} == {node["part"] for node in profile["nodes"]}
        assert layers == {node["part"] for node in profile["nodes"] if node["attention"]}
        assert dict.fromkeys(layers, 12) == profile["heads"]
        sums = {part: sum(node["ms"] for node in profile["nodes"] if node["part"] == part) for part in layers}
        if profile["length"] == 64:
            assert sums["layer 6"] < sums["layer 3"] / 2
    assert 2 == sum(line[:1] == ["MultiHeadAttention"] for line in lines)
    assert ["12"] * 12 == [line[5] for line in lines if line[:1] == ["layer"]]


@pytest.mark.full_grid
def test_a_bundle_is_analyzed_without_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys; from bertserve.export import cli; print(cli.main(['analyze', *sys.argv[1:]]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(MODELS / "sentiment"), "--lengths", "8", "--seconds", "0.1"]

    assert "0 False" == subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def test_plots_are_omitted_if_matplotlib_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bertserve.export.analyze.report.find_spec", lambda name: None)
    assert 0 == cli.main(["analyze", str(MODELS / "sentiment"), "--lengths", "8", "--seconds", "0.1", "--output", str(tmp_path)])

    assert "[bench]'" in capsys.readouterr().err
    assert [] == list(tmp_path.rglob("*.svg"))
    assert (tmp_path / analyze_cli.REPORT_FILE).exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((str(MODELS / "sentiment"), "--by", "layers"), "--batch and --by"),
        (("bert-tiny", "--precision", "fp16"), "--precision: fp16"),
        (("bert-tiny", "--by", "layers,depth"), "--by: `layers,depth`"),
        (("bert-tiny", "--lengths", "16,0"), "--lengths: `0`"),
        (("bert-tiny", "--lengths", "1e3"), "--lengths: `1e3`"),
        (("bert-tiny", "--seconds", "0"), "--seconds: `0`"),
        (("bert-tiny", "--seconds", "nan"), "--seconds: `nan`"),
    ],
)
def test_an_invalid_flag_of_analyze_is_a_usage_error(flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["analyze", *flags])

    assert 2 == exit_.value.code
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--lengths", "600"), "512 tokens"),
        (("--precision", "fp32"), "cpu/int8"),
    ],
)
def test_an_unsupported_length_or_precision_is_an_error(flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 512 == load_bundle(MODELS / "sentiment").manifest.tokenizer.max_length
    assert 1 == cli.main(["analyze", str(MODELS / "sentiment"), *flags])

    assert reason in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("bertserve.export.flags.find_spec", lambda name: None)

    assert 3 == cli.main(["analyze", "bert-tiny"])
    assert "torch, transformers, sentencepiece, onnx, onnxscript, onnxruntime " in capsys.readouterr().err
