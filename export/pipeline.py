"""Converts a checkpoint to a bundle: runs the stages in order, in a temporary folder next to the output."""

import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import onnx_ir as ir
import onnxruntime

from bertserve import service
from bertserve.export import cpu, onnx_trace
from bertserve.export.build_input import GraphBuildInput, Tracer, choose_precisions
from bertserve.export.checkpoint.checkpoint import Checkpoint, count_flops
from bertserve.export.checkpoint.fast_tokenizer import tokenizer_json
from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.export.checkpoint.module import load_module, module_name
from bertserve.export.checkpoint.padding import refuse_pad_token_in_texts
from bertserve.export.errors import ExportError, first_line, warn
from bertserve.export.gpu.build import build_for_cuda, build_for_tensorrt
from bertserve.export.graph import onnx_files
from bertserve.export.int8_texts import BUILT_IN_TEXTS, Int8Texts, digest_texts, read_int8_texts
from bertserve.export.model_card import bundle_texts, quote
from bertserve.export.progress import stage
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.export.tasks.tags import tag_like_labels
from bertserve.export.validation.comparison import Reference, measure_graph
from bertserve.export.validation.reference import sample_reference
from bertserve.export.validation.served_graph import open_graph
from bertserve.export.workspace import package_bundle, workspace
from bertserve.service.bundle.files import TOKENIZER_FILE, digest
from bertserve.service.bundle.graph_spec import GraphFile, GraphSpec, Precision
from bertserve.service.bundle.manifest import NAME_PATTERN, NAME_RULE, Example, Manifest, Metric, OmittedGraph
from bertserve.service.bundle.validation_policy import has_low_agreement
from bertserve.service.errors import StartError
from bertserve.service.messages import quote_names
from bertserve.service.providers import Provider
from bertserve.service.tasks import token_classification
from bertserve.service.text.tokenizer import Tokenizer

BUILDERS: Mapping[Provider, Callable[[GraphBuildInput, Sequence[Precision]], Iterable[GraphSpec]]] = {
    "cpu": cpu.build_for_cpu,
    "cuda": build_for_cuda,
    "tensorrt": build_for_tensorrt,
}


@dataclass(frozen=True)
class ExportOptions(LoadOptions):
    """The flags of the command (docs/reference/export-flags.md); the inherited ones are for a checkpoint, not for a module.

    Attributes:
        source: A local checkpoint folder, a hub id, or with `module` a trusted `FILE:FACTORY`, whose code is executed.
        precisions: The precisions to keep; the last one of each provider is its default graph. None keeps all; the default is then int8 or
            fp16 if it agrees with the checkpoint, else fp32.
        providers: The stored example is answered by the CPU's default graph, or by the first provider's without a CPU graph.
        metrics: Measured task metrics for manifest and card.
        tracer: The tracer; None for the first one that works.
    """

    source: str
    output: Path
    name: str | None = None
    precisions: Sequence[Precision] | None = None
    providers: Sequence[Provider] = ("cpu",)
    overwrite: bool = False
    metrics: Sequence[Metric] = ()
    int8_texts: Path = BUILT_IN_TEXTS
    int8_validation: Path | None = None
    max_int8_error: float = 0.1
    quick: bool = False
    tracer: Tracer | None = None
    module: bool = False


def export(options: ExportOptions) -> tuple[Path, Manifest]:
    """Converts a checkpoint to a bundle, and writes a line to stderr per finished stage.

    Returns:
        The bundle's folder and its manifest. Graphs that failed are missing in the bundle, and listed with reasons in `omitted`.

    Raises:
        ExportError: A stage failed; no files are left behind.
    """
    name = options.name or (module_name(options.source) if options.module else Path(os.path.abspath(options.source)).name)
    if not re.fullmatch(NAME_PATTERN, name):
        raise ExportError(f"`{name}` is not a valid bundle name, which has {NAME_RULE}; give another with --name.")
    target = options.output / name
    with workspace(name, options.output, overwrite=options.overwrite) as scratch:
        # before the checkpoint is loaded, because the texts can be wrong
        texts = read_int8_texts(options.int8_texts, options.int8_validation)
        with stage("load", options.source):
            checkpoint = load_module(options.source) if options.module else load_checkpoint(options.source, options)
        if checkpoint.task == token_classification.TASK and (names := tag_like_labels(checkpoint.labels)):
            warn(
                f"the labels {quote_names(names[:8])} of `{checkpoint.origin.checkpoint}` look like tags, but are read as names; if they "
                "are tags, rename them in config.json, such as B-PER."
            )
        EXPORT_TASKS[checkpoint.task].refuse_pairs(texts.values(), checkpoint.tokenizer)
        bundle_folder, work = scratch / "bundle", scratch / "work"
        bundle_folder.mkdir()
        work.mkdir()
        manifest = _build_bundle(options, name, checkpoint, texts, bundle_folder, work)
        with stage("package", str(target)):
            card_and_manifest = bundle_texts(manifest, bundle_folder, quote(checkpoint.card))
            package_bundle(bundle_folder, target, card_and_manifest, overwrite=options.overwrite)
    return target, manifest


def _build_bundle(options: ExportOptions, name: str, checkpoint: Checkpoint, texts: Int8Texts, bundle_folder: Path, work: Path) -> Manifest:
    """Writes graphs and tokenizer to `bundle_folder`; returns the manifest."""
    precisions = choose_precisions(options.providers, options.precisions)
    all_texts = [text for split in texts.values() for text in (*split.lines, *chain(*split.pairs))]
    refuse_pad_token_in_texts(options.source, checkpoint.hf_tokenizer, checkpoint.tokenizer.pad_id, all_texts)
    traced = work / "raw.onnx"
    with stage("trace", "to ONNX"):
        inputs, description = onnx_trace.trace(checkpoint, traced, options.tracer)
    checkpoint = replace(checkpoint, inputs=inputs)
    tokenizer = _write_tokenizer(checkpoint, options.source, bundle_folder)
    texts = {name: split.with_passages(tokenizer) for name, split in texts.items()}
    with stage("reference", "PyTorch float32"):
        reference = sample_reference(checkpoint, texts["validation"] if "int8" in precisions.get("cpu", ()) else None)
        flops = count_flops(checkpoint)
    checkpoint.model.to_empty(device="meta")  # no later stage runs it, and sessions of a large model need the memory
    build_input = GraphBuildInput(
        traced=traced,
        description=description,
        folder=bundle_folder,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        texts=texts,
        max_int8_error=options.max_int8_error,
        quick=options.quick,
    )
    graphs, omitted = _make_graphs(build_input, precisions, reference, default_must_agree=options.precisions is None)
    return Manifest(
        format="bertserve-bundle",
        format_version=1,
        name=name,
        task=checkpoint.task,
        labels=checkpoint.labels,
        tags=checkpoint.tags,
        activation=checkpoint.activation,
        embedding=checkpoint.embedding,
        tokenizer=tokenizer.spec,
        flops=flops,
        graphs=tuple(graphs),
        example=_answer_example(build_input, graphs),
        metrics=tuple(options.metrics),
        omitted=tuple(omitted),
        attention_heads=checkpoint.attention_heads,
        int8_texts=digest_texts(texts) if any(graph.precision == "int8" for graph in graphs) else None,
        source=checkpoint.origin.model_copy(update={"versions": _versions()}),
    )


def _write_tokenizer(checkpoint: Checkpoint, source: str, folder: Path) -> Tokenizer:
    """Writes a checkpoint's tokenizer to the bundle, and opens it as the service does."""
    path = folder / TOKENIZER_FILE
    path.write_text(tokenizer_json(checkpoint.hf_tokenizer, checkpoint.tokenizer), encoding="utf-8")
    try:
        return Tokenizer(path, checkpoint.tokenizer.model_copy(update={"sha256": digest(path)}))
    except StartError as error:
        raise ExportError(f"the tokenizer of `{source}` is not supported: {error}") from error


def _answer_example(build_input: GraphBuildInput, graphs: Sequence[GraphSpec]) -> Example:
    """Returns the stored example, with the result of the first default graph on the provider on which it was measured."""
    default = next(graph for graph in graphs if graph.default)
    request = EXPORT_TASKS[build_input.checkpoint.task].example(build_input.tokenizer.spec)
    served = open_graph(build_input.folder, default, build_input.tokenizer, build_input.checkpoint)
    return Example(request=request, result=served.predict_body(request))


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "onnx", "onnxscript", "tokenizers")
    # the package of onnxruntime can be onnxruntime-gpu
    own = {"bertserve": service.__version__, "python": platform.python_version(), "onnxruntime": onnxruntime.__version__}
    return own | {name: version(name) for name in names}


def _make_graphs(
    build_input: GraphBuildInput, precisions: Mapping[Provider, Sequence[Precision]], reference: Reference, *, default_must_agree: bool
) -> tuple[list[GraphSpec], list[OmittedGraph]]:
    """Creates and measures the graphs of all providers, the CPU's first, and removes the files of graphs that are not kept.

    Returns:
        The graphs that passed, and the graphs that failed with the reasons.

    Raises:
        ExportError: The CPU's float32 graph failed, or the float32 graphs of all providers.
    """
    graphs: list[GraphSpec] = []
    omitted: list[OmittedGraph] = []
    failure: Exception | None = None
    for provider in sorted(precisions, key=lambda provider: provider != "cpu"):
        measured: dict[Precision, GraphSpec] = {}
        try:
            # fp32 is measured even if it is not kept; otherwise int8's wide limits could hide an error of the trace
            for graph in BUILDERS[provider](build_input, precisions[provider]):
                with stage("parity", graph.name):
                    spec = _with_files(graph, build_input.folder)
                    spec = measure_graph(build_input.folder, spec, build_input.checkpoint, build_input.tokenizer, reference)
                    measured[graph.precision] = spec
        except OSError:
            raise
        except Exception as error:  # optimizers and onnxruntime have no common base class of errors
            # all graphs are created from the trace, and the CPU's float32 graph shows whether it is right
            if provider == "cpu" and not measured:
                raise
            failure = error
            reason = str(error) if isinstance(error, ExportError) else f"{type(error).__name__}: {first_line(error)}"
            missing = [precision for precision in precisions[provider] if precision not in measured]
            omitted += [OmittedGraph(provider=provider, precision=precision, reason=reason) for precision in missing]
        if kept := [measured[precision] for precision in precisions[provider] if precision in measured] or list(measured.values()):
            default = _choose_default(kept, must_agree=default_must_agree)
            graphs += [graph.model_copy(update={"default": graph is default}) for graph in measured.values() if graph in kept]
        file_names = {file.file for graph in graphs for file in graph.files}
        for path in build_input.folder.glob(f"model.{provider}.*"):
            if path.name not in file_names:
                path.unlink()
    if not graphs:
        assert failure is not None, "there is at least one provider"
        raise failure
    return graphs, omitted


def _choose_default(kept: Sequence[GraphSpec], *, must_agree: bool) -> GraphSpec:
    """Returns a provider's last graph; if it must agree with the checkpoint and does not, the float32 graph, if that is kept."""
    fp32 = next((graph for graph in kept if graph.precision == "fp32"), None)
    return fp32 if must_agree and fp32 is not None and has_low_agreement(kept[-1]) else kept[-1]


def _with_files(graph: GraphSpec, folder: Path) -> GraphSpec:
    """Converts a finished graph to its form in the bundle; returns its entry with its files and their facts."""
    path = folder / graph.file
    onnx_files.finalize(path)
    model = ir.load(path)
    report = graph.validation.model_copy(update={"nodes": len(model.graph), "opset": model.graph.opset_imports.get("")})
    graph_file, *data = (GraphFile(file=file.name, sha256=digest(file), size_bytes=file.stat().st_size) for file in onnx_files.files(path))
    return graph.model_copy(update={**dict(graph_file), "data": tuple(data), "validation": report})
