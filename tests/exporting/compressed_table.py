"""Compares compressed BERT classifiers with the original in size, speed and error: `python tests/exporting/compressed_table.py TEACHER`.

Each variant is a checkpoint that is exported in fp32 and int8. Distilled variants learn the teacher's logits on the calibration split of
the built-in texts. All variants are evaluated on the report split. Prints the rows of a table.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification

from bertserve.export import calibration
from bertserve.export.pipeline import ExportSpec, export
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.bundle.files import Bundle, load_bundle
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from compression import drop_layers, prune_heads

STEPS, BATCH, LENGTH, TURNS = 120, 16, 64, 31


def distill(path: Path, teacher: Path, texts: Sequence[str]) -> None:
    """Trains a student checkpoint in place to reproduce the teacher's logits."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(teacher)
    models = [AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32) for folder in (teacher, path)]
    taught, student = models[0].eval(), models[1].train()
    for parameter in student.base_model.embeddings.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=1e-4)
    torch.manual_seed(0)
    for _ in range(STEPS):
        chosen = [texts[i] for i in torch.randint(len(texts), (BATCH,)).tolist()]
        batch = tokenizer(chosen, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        with torch.no_grad():
            wanted = taught(**batch).logits
        loss = torch.nn.functional.mse_loss(student(**batch).logits, wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    student.save_pretrained(path)


def least_heads(path: Path, count: int) -> dict[int, list[int]]:
    """Returns for each layer the `count` heads with the smallest weights in the attention output matrix."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    heads = model.config.num_attention_heads
    weights = [layer.attention.output.dense.weight.detach() for layer in model.bert.encoder.layer]
    return {i: weight.view(len(weight), heads, -1).norm(dim=(0, 2)).argsort()[:count].tolist() for i, weight in enumerate(weights)}


def share_layers(path: Path) -> None:
    """Converts a BERT checkpoint to ALBERT in place: all layers share the middle layer's weights; the embedding is not factorized."""
    whole = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    fields = whole.config.to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    config = transformers.AlbertConfig(
        **{
            name: fields[name]
            for name in (*names, "type_vocab_size", "layer_norm_eps", "id2label", "label2id", "hidden_act", "pad_token_id")
        },
        embedding_size=whole.config.hidden_size,
    )
    made: Any = transformers.AlbertForSequenceClassification(config)
    layer, shared = whole.bert.encoder.layer[config.num_hidden_layers // 2], made.albert.encoder.albert_layer_groups[0].albert_layers[0]
    made.albert.embeddings.load_state_dict(whole.bert.embeddings.state_dict(), strict=False)
    torch.nn.init.eye_(made.albert.encoder.embedding_hidden_mapping_in.weight)
    torch.nn.init.zeros_(made.albert.encoder.embedding_hidden_mapping_in.bias)
    pairs = [
        (shared.attention.query, layer.attention.self.query),
        (shared.attention.key, layer.attention.self.key),
        (shared.attention.value, layer.attention.self.value),
        (shared.attention.dense, layer.attention.output.dense),
        (shared.attention.LayerNorm, layer.attention.output.LayerNorm),
        (shared.ffn, layer.intermediate.dense),
        (shared.ffn_output, layer.output.dense),
        (shared.full_layer_layer_norm, layer.output.LayerNorm),
        (made.albert.pooler, whole.bert.pooler.dense),
        (made.classifier, whole.classifier),
    ]
    for target, origin in pairs:
        target.load_state_dict(origin.state_dict())
    made.save_pretrained(path)


def speed(engines: Sequence[OnnxEngine], ids: NDArray[np.int64]) -> list[float]:
    """Returns the median CPU time per text of each engine in milliseconds; the engines run in turn."""
    encoding = Encoding(ids, np.zeros_like(ids))
    taken: list[list[float]] = [[] for _ in engines]
    for _ in range(TURNS):
        for engine, times in zip(engines, taken, strict=True):
            start = time.process_time()
            engine.run([encoding])
            times.append(1000 * (time.process_time() - start))
    return [statistics.median(times) for times in taken]


def logits(bundle: Bundle, engine: OnnxEngine, texts: Sequence[str]) -> NDArray[np.float32]:
    tokenizer = Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)
    encodings = [tokenizer.assemble(tokens.ids[: LENGTH - 2]) for tokens in tokenizer.tokenize(texts)]
    return np.array([engine.run([encoding])[0]["logits"] for encoding in encodings])


def main(teacher: Path) -> int:
    """Creates, exports and measures each variant."""
    split = calibration.read_split(calibration.BUILT_IN)
    seen, unseen = split.calibration.lines, split.report.lines
    layers = range(transformers.AutoConfig.from_pretrained(teacher).num_hidden_layers)
    heads = transformers.AutoConfig.from_pretrained(teacher).num_attention_heads
    forms: dict[str, Callable[[Path], None]] = {
        "teacher": lambda path: None,
        "half of the heads pruned": lambda path: prune_heads(path, least_heads(path, heads // 2), heads=heads),
        "every other layer dropped": lambda path: drop_layers(path, layers[::2]),
        "the same, distilled": lambda path: (drop_layers(path, layers[::2]), distill(path, teacher, seen))[0],
        "one layer, shared by all, distilled": lambda path: (share_layers(path), distill(path, teacher, seen))[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        measured = []
        for i, (name, make) in enumerate(forms.items()):
            source = Path(folder) / f"form-{i}"
            shutil.copytree(teacher, source)
            make(source)
            spec = ExportSpec(str(source), Path(folder) / "models", max_int8_error=1.0, quick=True, precisions=("fp32", "int8"))
            bundle = load_bundle(export(spec)[0])
            pad = bundle.manifest.tokenizer
            for graph in bundle.manifest.graphs:
                engine = OnnxEngine(bundle.path / graph.file, graph, pad_id=pad.pad_id, padding_side=pad.padding_side)
                size = sum((bundle.path / file.file).stat().st_size for file in graph.files) / 2**20
                measured.append((name, graph.precision, size, engine, logits(bundle, engine, unseen)))
        ids = np.random.default_rng(0).integers(1000, 2000, LENGTH)
        times = speed([engine for _, _, _, engine, _ in measured], ids)
        expected = measured[0][4]
        for (name, precision, size, _, found), taken in zip(measured, times, strict=True):
            error = float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())
            agreement = float(np.mean(found.argmax(-1) == expected.argmax(-1)))
            print(
                f"| {name} | {precision} | {size:.1f} | {size / measured[0][2]:.2f} | {taken:.1f} | {times[0] / taken:.2f} "
                f"| {error:.3f} | {agreement:.1%} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
