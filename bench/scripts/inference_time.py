"""Rewrites the tables of inference time in bench/results: `python bench/scripts/inference_time.py`.

- Without --teacher: BERT encoders with random weights by length and precision, and by layers, heads and hidden size.
- With --teacher: compressed forms of a BERT classifier by size, speed and error. Distilled forms learn from the built-in texts.

A time is the median CPU time on one thread. Compared graphs run in turn, so that other load on the machine affects all of them.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
import transformers
from numpy.typing import NDArray

from bertserve.export import int8_texts
from bertserve.export.graph import onnx_files
from bertserve.export.pipeline import ExportOptions, export
from bertserve.export.progress import stage
from bertserve.service.bundle.graph_spec import InputSpec, Precision
from bertserve.service.engine.onnx_engine import build_feed
from bertserve.service.engine.sessions import session_options
from bertserve.service.text.tokenizer import Encoding

ROOT = Path(__file__).resolve().parents[2]
SHAPES_PAGE, COMPRESSED_PAGE = "2026-11-23-inference-time.md", "2026-11-22-compressed-berts.md"
SHAPES = "12,12,768 3,12,768 6,12,768 12,1,768 12,3,768 12,6,768 12,24,768 12,3,192 12,6,384"
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
BATCH = 4  # texts
TEXT_TOKENS = 64  # of each text of the compressed models, also in the distillation


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and rewrites the tables in the folder of results."""
    parser = argparse.ArgumentParser(description="Rewrite the tables of inference time in bench/results.")
    parser.add_argument("--teacher", type=Path, metavar="DIR", help="a BERT classifier: rewrite the table of its compressed forms instead")
    parser.add_argument("--shapes", default=SHAPES, help="layers,heads,hidden size of each encoder; others are compared with the first")
    parser.add_argument("--lengths", default="16,64,128,256,512", help="tokens of the texts; shapes are compared at the middle one")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of the runs of each graph and length (default: 4)")
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results", help="folder of the pages (default: bench/results)")
    args = parser.parse_args(argv)
    if args.teacher is not None:
        write_table(args.results / COMPRESSED_PAGE, "compressed models", compressed_rows(args.teacher, args.seconds))
    else:
        shapes = [tuple(map(int, shape.split(","))) for shape in args.shapes.split()]
        lengths, graphs = sorted(map(int, args.lengths.split(","))), build_encoder(*shapes[0])
        write_table(args.results / SHAPES_PAGE, "lengths", length_rows(shapes[0], graphs, lengths, args.seconds))
        write_table(args.results / SHAPES_PAGE, "shapes", shape_rows(shapes, graphs, lengths[len(lengths) // 2], args.seconds))


def write_table(page: Path, name: str, rows: Iterable[Sequence[str]]) -> None:
    """Replaces the table between the comments with this name; the first row is the head."""
    head, *body = rows
    table = "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))
    begin, end = f"<!-- written by bench/scripts/inference_time.py: {name} -->\n", "<!-- end of written -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(before + begin + table + end + rest.partition(end)[2], encoding="utf-8")


class Graph:
    """A graph on one thread; its files are not needed after it is loaded."""

    def __init__(self, path: Path, inputs: Sequence[InputSpec]) -> None:
        self.mib = sum(file.stat().st_size for file in onnx_files.files(path)) / 2**20
        self._inputs = inputs
        self._session = ort.InferenceSession(str(path), session_options(1), providers=["CPUExecutionProvider"])

    def run(self, ids: NDArray[np.int64]) -> Any:
        """Returns the first output for a batch of token ids: [texts, length]."""
        encodings = [Encoding(row, np.zeros_like(row)) for row in ids]
        return self._session.run(None, build_feed(encodings, self._inputs, ids.shape))[0]


def export_graphs(source: str, task: str) -> dict[str, Graph]:
    """Exports a checkpoint; returns its graph in each precision, however much int8 differs."""
    with tempfile.TemporaryDirectory() as folder:
        options = ExportOptions(
            source=source, output=Path(folder), name="model", task=task, precisions=PRECISIONS, max_int8_error=inf, quick=True
        )
        bundle, manifest = export(options)
        return {graph.precision: Graph(bundle / graph.file, graph.inputs) for graph in manifest.graphs}


def cpu_ms(runs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Returns the median CPU milliseconds of each run without its first time; on average, each has `seconds` in total."""
    times: list[list[float]] = [[] for _ in runs]
    end = time.monotonic() + seconds * len(runs)
    while len(times[0]) <= 3 or time.monotonic() < end:
        for run, measured in zip(runs, times, strict=True):
            start = time.thread_time()
            run()
            measured.append(1000 * (time.thread_time() - start))
    return [statistics.median(measured[1:]) for measured in times]


def random_ids(texts: int, length: int) -> NDArray[np.int64]:
    """Returns random token ids: [texts, length]."""
    return np.random.default_rng(0).integers(1000, 1100, (texts, length))


def gflop(shape: Sequence[int], length: int) -> float:
    """Returns the operations of a text of `length` tokens in 10^9: matrices, and attention."""
    layers, _, hidden = shape
    return layers * (24 * hidden**2 * length + 4 * hidden * length**2) / 1e9


def build_encoder(layers: int, heads: int, hidden: int) -> dict[str, Graph]:
    """Returns the graph of a BERT encoder in each precision. Its weights are random, which does not change the time of a run."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    with tempfile.TemporaryDirectory() as folder, stage("build", f"{layers} layers, {heads} heads, hidden size {hidden}"):
        transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
        shutil.copy(ROOT / "models/sentiment/tokenizer.json", folder)
        return export_graphs(folder, "feature-extraction")


def length_rows(shape: Sequence[int], graphs: dict[str, Graph], lengths: Sequence[int], seconds: float) -> Iterable[Sequence[str]]:
    """Yields the head, and a row for each length in tokens."""
    columns = [f"{precision}, {texts}" for precision in PRECISIONS for texts in ("one text", f"per text of a batch of {BATCH}")]
    yield ["tokens", "GFLOP", *columns, "int8 / fp32, one text"]
    for length in lengths:
        runs = [partial(graphs[precision].run, random_ids(texts, length)) for precision in PRECISIONS for texts in (1, BATCH)]
        fp32, fp32_batch, int8, int8_batch = cpu_ms(runs, seconds)
        times = [fp32, fp32_batch / BATCH, int8, int8_batch / BATCH]
        yield [str(length), f"{gflop(shape, length):.1f}", *(f"{ms:.1f}" for ms in times), f"{int8 / fp32:.2f}"]


def shape_rows(shapes: Sequence[Sequence[int]], graphs: dict[str, Graph], length: int, seconds: float) -> Iterable[Sequence[str]]:
    """Yields the head, and a row for each shape: its operations and CPU times for one text, relative to the first shape."""
    yield ["layers", "heads", "hidden size", "GFLOP ratio", *PRECISIONS]
    yield [*map(str, shapes[0]), "1", "1", "1"]
    for shape in shapes[1:]:
        variant, ratios = build_encoder(*shape), [gflop(shape, length) / gflop(shapes[0], length)]
        for precision in PRECISIONS:
            base_ms, ms = cpu_ms([partial(one[precision].run, random_ids(1, length)) for one in (graphs, variant)], seconds)
            ratios.append(ms / base_ms)
        yield [*map(str, shape), *(f"{ratio:.2f}" for ratio in ratios)]


def compressed_rows(teacher: Path, seconds: float) -> Iterable[Sequence[str]]:
    """Yields the head, and a row for each form and precision, compared with the teacher in fp32."""
    split = int8_texts.read_int8_texts(int8_texts.BUILT_IN_TEXTS)
    tokenize = partial(transformers.AutoTokenizer.from_pretrained(teacher), truncation=True, max_length=TEXT_TOKENS)
    unseen = [np.array([ids]) for ids in tokenize(split["validation"].lines)["input_ids"]]
    load = partial(transformers.AutoModelForSequenceClassification.from_pretrained, teacher, dtype=torch.float32)
    graphs: dict[tuple[str, str], Graph] = {}
    for name, (compress, distilled) in FORMS.items():
        with tempfile.TemporaryDirectory() as folder, stage("build", name):
            model = compress(load())
            if distilled:
                distill(model, load(), tokenize, split["calibration"].lines)
            shutil.copytree(teacher, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
            model.save_pretrained(folder)
            graphs |= {(name, precision): graph for precision, graph in export_graphs(folder, "text-classification").items()}
    times = cpu_ms([partial(graph.run, random_ids(1, TEXT_TOKENS)) for graph in graphs.values()], seconds)
    logits = [np.concatenate([graph.run(ids) for ids in unseen]) for graph in graphs.values()]
    yield ["form", "precision", "MiB", "ratio", "ms", "times as fast", "error", "equal labels"]
    for (names, graph), ms, values in zip(graphs.items(), times, logits, strict=True):
        ratio = graph.mib / graphs["teacher", "fp32"].mib
        error = np.sqrt(np.mean((values - logits[0]) ** 2)) / logits[0].std()
        equal = np.mean(values.argmax(-1) == logits[0].argmax(-1))
        yield [*names, f"{graph.mib:.1f}", f"{ratio:.2f}", f"{ms:.1f}", f"{times[0] / ms:.2f}", f"{error:.3f}", f"{equal:.1%}"]


def prune_heads(model: Any) -> Any:
    """Removes the half of each layer's heads that the attention's output weighs least, in the format of transformers 4."""
    heads, model.config.pruned_heads = model.config.num_attention_heads, {}
    for i, layer in enumerate(model.bert.encoder.layer):
        output = layer.attention.output.dense
        norms = output.weight.detach().view(len(output.weight), heads, -1).norm(dim=(0, 2))
        pruned = norms.argsort()[: heads // 2].tolist()
        kept = [row for row in range(output.in_features) if row * heads // output.in_features not in pruned]
        output.weight = torch.nn.Parameter(output.weight[:, kept])
        for linear in (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value):
            linear.weight, linear.bias = torch.nn.Parameter(linear.weight[kept]), torch.nn.Parameter(linear.bias[kept])
        model.config.pruned_heads[i] = pruned
    return model


def drop_layers(model: Any) -> Any:
    """Removes every other layer."""
    model.bert.encoder.layer = model.bert.encoder.layer[::2]
    model.config.num_hidden_layers = len(model.bert.encoder.layer)
    return model


def share_layers(bert: Any) -> Any:
    """Returns an ALBERT in which all layers share the weights of BERT's middle layer; the embedding is not factorized."""
    fields = bert.config.to_dict() | {"model_type": "albert", "architectures": None, "embedding_size": bert.config.hidden_size}
    model: Any = transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**fields))
    model.albert.embeddings.load_state_dict(bert.bert.embeddings.state_dict(), strict=False)
    torch.nn.init.eye_(model.albert.encoder.embedding_hidden_mapping_in.weight)
    torch.nn.init.zeros_(model.albert.encoder.embedding_hidden_mapping_in.bias)
    old, new = bert.bert.encoder.layer[len(bert.bert.encoder.layer) // 2], model.albert.encoder.albert_layer_groups[0].albert_layers[0]
    pairs = [(old.attention.get_submodule(f"self.{name}"), new.attention.get_submodule(name)) for name in ("query", "key", "value")]
    pairs += [(old.attention.output.get_submodule(name), new.attention.get_submodule(name)) for name in ("dense", "LayerNorm")]
    pairs += [(old.intermediate.dense, new.ffn), (old.output.dense, new.ffn_output), (old.output.LayerNorm, new.full_layer_layer_norm)]
    for source, target in [*pairs, (bert.bert.pooler.dense, model.albert.pooler), (bert.classifier, model.classifier)]:
        target.load_state_dict(source.state_dict())
    return model


def distill(student: Any, teacher: Any, tokenize: Callable[..., Any], texts: Sequence[str]) -> None:
    """Trains a student, except its embedding, to give the teacher's logits."""
    student.train().base_model.embeddings.requires_grad_(False)
    optimizer = torch.optim.AdamW([parameter for parameter in student.parameters() if parameter.requires_grad], lr=1e-4)
    torch.manual_seed(0)
    for _ in range(120):
        chosen = [texts[i] for i in torch.randint(len(texts), (16,)).tolist()]
        batch = tokenize(chosen, padding=True, return_tensors="pt")
        with torch.no_grad():
            expected = teacher(**batch).logits
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(student(**batch).logits, expected).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


# form -> the function that compresses the teacher, and whether the result is distilled
FORMS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "teacher": (lambda model: model, False),
    "half of the heads pruned": (prune_heads, False),
    "every other layer dropped": (drop_layers, False),
    "the same, distilled": (drop_layers, True),
    "one layer, shared by all, distilled": (share_layers, True),
}

if __name__ == "__main__":
    main()
