"""`--attentions`: the weights that a graph returns match PyTorch's eager attention for every family that returns them."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_export_special_models import OTHERS

import bertserve.service.cli
from bertserve.export import cli
from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.export.errors import ExportError
from bertserve.export.validation.comparison import Comparison
from bertserve.export.validation.reference import sample_reference
from bertserve.export.validation.served_graph import ServedGraph
from bertserve.service.bundle.files import Bundle
from bertserve.service.tasks import attention
from bertserve.service.tasks.step import TextInput
from bertserve.service.text.tokenizer import Tokenizer
from support import raises_exactly, tiny
from support.bundles import engine_of, exported, refused
from support.checkpoints import SIZES, prune_heads
from support.families import ALL_HEADS, FAMILIES, HEADS, Family, bert_tokenizer, roberta_tokenizer
from support.task_runs import decode, encode

pytestmark = pytest.mark.torch

CLASSIFIES = "text-classification"
TEXTS = [("good", None), ("A film of the first half hour, not of the second.", None), ("It began to rain.", "We went inside.")]
NARROW = {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}
MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    **{name: (family, {}) for name, family in FAMILIES.items()},
    **OTHERS,
    "MobileBERT": (Family(transformers.MobileBertConfig, bert_tokenizer), NARROW),
    "FNet": (Family(transformers.FNetConfig, bert_tokenizer), {}),
    "Longformer": (Family(transformers.LongformerConfig, roberta_tokenizer, {"type_vocab_size": 1}, offset=2), {"attention_window": 4}),
}
NOT_INVARIANT = {"ConvBERT", "Nyströmformer"}
REFUSED = {
    "BART": "BartForSequenceClassification returns no",
    "FNet": "FNetForSequenceClassification returns no",
    "Longformer": "[1, 4, 5, 6]",
    "T5": "T5ForSequenceClassification returns no",
    "SqueezeBERT": "[1, 4, 5, 5]",
    "YOSO": "[1, 5, 32]",
}

GIVE = [name for name in MODELS if name not in REFUSED]


def checkpoint(name: str, task: str, folder: Path, **fields: Any) -> Path:
    """Writes a random checkpoint of a family with a task's head and returns its path."""
    family, own = MODELS[name]
    return family.save(folder / "checkpoint", task, **own, **fields)


def with_attention(source: Path, **options: Any) -> Bundle:
    return exported(source, name="bundle", attentions=True, **options)


def in_pytorch(source: Path, task: str = CLASSIFIES) -> Any:
    """Returns the model in PyTorch with eager attention, which returns the weights."""
    return ALL_HEADS[task][1].from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()


def worst_error(model: Any, bundle: Bundle, *, batched: bool = True, precision: Any = "fp32") -> float:
    """Returns the largest difference of an attention weight from PyTorch's, unbatched and, if `batched`, also in one batch."""
    manifest, graph = bundle.manifest, bundle.graph("cpu", precision)
    tokenizer = Tokenizer(bundle.tokenizer_path, manifest.tokenizer)
    engine = engine_of(bundle, graph)
    maps = attention.select_maps(attention.AttentionParameters(), manifest.attention_heads)
    requests = [TextInput(texts[0], maps, *texts[1:]) for texts in TEXTS]
    encodings = [encode(attention, request, tokenizer).encodings[0] for request in requests]
    rows = [engine.run([encoding])[0] for encoding in encodings]
    if batched:
        rows += engine.run(encodings)
    worst = 0.0
    for (request, encoding), row in zip(itertools.cycle(zip(requests, encodings, strict=True)), rows, strict=False):
        inputs = {"input_ids": torch.tensor(encoding.ids)[None]}
        if any(spec.fill == "type_ids" for spec in graph.inputs):
            inputs["token_type_ids"] = torch.tensor(encoding.type_ids)[None]
        with torch.no_grad():
            inputs = {name: value[None] if manifest.task == "multiple-choice" else value for name, value in inputs.items()}
            expected = model(**inputs, output_attentions=True).attentions
        for right, layer in zip(expected, decode(attention, request, [row], tokenizer=tokenizer)["attentions"], strict=True):
            assert layer.shape == right[0].shape
            worst = max(worst, float(np.abs(right[0].numpy() - layer).max()))
    return worst


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "BERT" else pytest.mark.full_grid) for name in GIVE])
def test_attention_weights_match_pytorch(name: str, tmp_path: Path) -> None:
    source = checkpoint(name, CLASSIFIES, tmp_path)
    bundle = with_attention(source)
    graph = bundle.manifest.graphs[0]

    assert worst_error(in_pytorch(source), bundle, batched=name not in NOT_INVARIANT) <= 1e-4
    assert graph.validation.attention_error <= 1e-4
    assert graph.validation.worst_abs_error <= 1e-4
    assert bundle.manifest.attention_heads[0] == SIZES["num_attention_heads"] // (2 if name == "ConvBERT" else 1)
    assert graph.has_attentions


@pytest.mark.full_grid
@pytest.mark.parametrize("task", [task for task in HEADS if task != CLASSIFIES])
@pytest.mark.parametrize("tracer", ["dynamo", "torchscript"])
def test_attention_weights_match_pytorch_for_every_task_and_tracer(task: str, tracer: Any, tmp_path: Path) -> None:
    """Fill-mask models also return weights for texts without a mask."""
    source = checkpoint("BERT", task, tmp_path)

    assert worst_error(in_pytorch(source, task), with_attention(source, tracer=tracer)) <= 1e-4


@pytest.mark.full_grid
def test_a_graph_returns_attention_weights_and_hidden_states(tmp_path: Path) -> None:
    source = checkpoint("BERT", CLASSIFIES, tmp_path)
    prune_heads(source, {0: (1, 3), 1: (0,)}, heads=SIZES["num_attention_heads"])
    bundle = with_attention(source, task="feature-extraction", layers=(0, 1))

    assert bundle.manifest.attention_heads == (2, 3)
    assert [spec.name for spec in bundle.manifest.graphs[0].outputs] == ["last_hidden_state", "hidden_states_0_1_2", "attentions"]
    assert worst_error(load_checkpoint(str(source)).model, bundle) <= 1e-4


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "BART" else pytest.mark.full_grid) for name in REFUSED])
def test_a_model_without_full_attention_weights_is_refused(name: str, tmp_path: Path) -> None:
    assert REFUSED[name] in refused(checkpoint(name, CLASSIFIES, tmp_path), attentions=True)


@pytest.mark.full_grid
def test_the_attention_error_of_int8_is_small_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint("BERT", CLASSIFIES, tmp_path)
    bundle = with_attention(source, max_int8_error=1.0, precisions=("fp32", "int8"), quick=True)
    fp32, int8 = (graph.validation for graph in bundle.manifest.graphs)

    assert 1e-4 < worst_error(in_pytorch(source), bundle, precision="int8") < 0.5
    assert int8.quantized["MatMulIntegerToFloat"] >= 1
    assert fp32.attention_error <= 1e-4 < int8.attention_error < 0.5
    card = (bundle.path / "README.md").read_text(encoding="utf-8")
    assert f" cpu/fp32 {fp32.attention_error:.1e}, cpu/int8 {int8.attention_error:.1e}." in card
    assert bertserve.service.cli.main(["check", "--models", str(bundle.path.parent)]) == 0
    assert cli.main(["verify", str(bundle.path), "--checkpoint", str(source)]) == 0
    output = capsys.readouterr().out
    for error in (fp32.attention_error, int8.attention_error):
        assert f"attention weight {error:.1e}" in output


@pytest.mark.full_grid
def test_weights_that_differ_from_pytorch_fail_the_comparison(tmp_path: Path) -> None:
    source = checkpoint("BERT", CLASSIFIES, tmp_path)
    bundle, original = with_attention(source), load_checkpoint(str(source), LoadOptions(attentions=True))
    graph, reference = bundle.graph("cpu"), sample_reference(original)
    graph_run = ServedGraph(graph, engine_of(bundle), Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer), original)
    Comparison(graph_run, reference).check()

    with raises_exactly(ExportError, match=r"attention weights .* 2\.00e-03"):
        Comparison(graph_run, replace(reference, maps=[(request, weights + 2e-3) for request, weights in reference.maps])).check()


def test_a_manifest_with_other_heads_than_the_graph_is_refused(tmp_path: Path) -> None:
    """When the service loads a graph, it requests all heads that the manifest lists."""
    tiny.bundle(tmp_path, attention_heads=(2, 3))
    manifest = json.loads((tmp_path / "tiny" / "manifest.json").read_text())
    for heads in ([2, 4], [2, 3, 1]):
        (tmp_path / "tiny" / "manifest.json").write_text(json.dumps(manifest | {"attention_heads": heads}))
        assert bertserve.service.cli.main(["check", "--models", str(tmp_path)]) == 1
