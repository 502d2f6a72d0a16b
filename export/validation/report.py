"""The validation reports of the manifest: each graph is compared with the checkpoint, and timed, at export and by `verify --update`."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bertserve.export import calibration
from bertserve.export.artifact import Artifact
from bertserve.export.bundle import CARD_FIELDS, bundle_texts
from bertserve.export.calibration import Texts, hashes_of, read_texts, split_digest, text_hash
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.errors import DataError, ExportError, ParityError
from bertserve.export.graph import onnx_files
from bertserve.export.progress import stage, time_runs
from bertserve.export.tasks.catalog import TASKS
from bertserve.export.validation.comparison import Reference, compare
from bertserve.export.validation.pytorch import NO_TEXTS, load_checkpoint_of, sample_reference
from bertserve.export.validation.served_graph import open_graph
from bertserve.export.validation.verify import Check, VerifySpec
from bertserve.service.bundle.files import Bundle, digest, load_bundle
from bertserve.service.bundle.graph_spec import GraphFile, GraphSpec, Precision, Speed, Timing, ValidationReport
from bertserve.service.bundle.manifest import Example, Manifest, OmittedGraph
from bertserve.service.bundle.validation_policy import is_low
from bertserve.service.engine.hardware import cpu_instructions, cpu_name
from bertserve.service.engine.onnx_engine import Engine
from bertserve.service.errors import BertServeError
from bertserve.service.providers import Provider
from bertserve.service.text.tokenizer import Encoding, Tokenizer

LENGTHS = (16, 64, 128)  # in tokens; the model's maximum length is timed too
MAX_SECONDS = 0.5  # for each length
RUNS = (3, 15)  # minimum and maximum


def measure_graphs(
    artifacts: Mapping[Provider, Iterable[Artifact]],
    precisions: Mapping[Provider, Sequence[Precision]],
    folder: Path,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    reference: Reference,
    *,
    default_must_agree: bool,
) -> tuple[list[GraphSpec], list[OmittedGraph]]:
    """Measures the graphs of all providers, and removes the files of graphs that are not kept.

    The artifacts of each provider are created by iteration, float32 first. One that cannot be created, loaded or matched with the checkpoint
    does not stop the others, except a provider's float32 graph, from which its others are created.

    The last precision of a provider is its default, unless `default_must_agree` and its agreement with the checkpoint is too low.

    Returns:
        The graphs that passed, and the graphs that failed with the reasons.

    Raises:
        ExportError: The CPU's float32 graph failed, or the float32 graphs of all providers.
    """
    graphs: list[GraphSpec] = []
    omitted: list[OmittedGraph] = []
    failure: Exception | None = None
    for provider, provider_artifacts in artifacts.items():
        measured: dict[Precision, GraphSpec] = {}
        try:
            # fp32 is measured even if it is not kept; otherwise int8's wide limits could hide an error of the trace
            for artifact in provider_artifacts:
                with stage("parity", f"{artifact.provider}/{artifact.precision}"):
                    onnx_files.finalize(artifact.path)
                    entry = _entry(artifact, checkpoint)
                    measured[artifact.precision] = measure_graph(folder, entry, checkpoint, tokenizer, reference)
        except Exception as error:  # optimizers and onnxruntime have no common base class of errors
            # all graphs are created from the trace, and the CPU's float32 graph shows whether it is right
            if isinstance(error, OSError) or (provider == "cpu" and not measured):
                raise
            failure = error
            missing = [precision for precision in precisions[provider] if precision not in measured]
            omitted += [OmittedGraph(provider=provider, precision=precision, reason=_reason(error)) for precision in missing]
        kept = [precision for precision in precisions[provider] if precision in measured] or list(measured)
        default = "fp32" if default_must_agree and "fp32" in kept and is_low(measured[kept[-1]]) else next(reversed(kept), None)
        graphs += [measured[precision].model_copy(update={"default": precision == default}) for precision in measured if precision in kept]
        file_names = {file.file for graph in graphs for file in graph.files}
        for path in folder.glob(f"model.{provider}.*"):
            if path.name not in file_names:
                path.unlink()
    if not graphs:
        assert failure is not None, "there is at least one provider"
        raise failure
    return graphs, omitted


def _reason(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return str(error) if isinstance(error, ExportError) else f"{type(error).__name__}: {first}"


def _entry(artifact: Artifact, checkpoint: Checkpoint) -> GraphSpec:
    """Returns a graph's manifest entry, whose validation report has only the facts of the graph's creation."""
    report = ValidationReport(
        samples=0,
        worst_abs_error=0.0,
        worst_row_error=0.0,
        nodes=0,
        fusions=artifact.fusions,
        quantized=artifact.quantized,
        quantization_error=artifact.error,
        quantization_limit=artifact.max_error,
    )
    graph_file, *data = (
        GraphFile(file=path.name, sha256=digest(path), size_bytes=path.stat().st_size) for path in onnx_files.files(artifact.path)
    )
    return GraphSpec(
        **dict(graph_file),
        data=tuple(data),
        provider=artifact.provider,
        precision=artifact.precision,
        form=artifact.form,
        default=False,
        batch_invariant=False,
        inputs=artifact.inputs,
        outputs=checkpoint.outputs,
        validation=report,
        shapes=artifact.shapes,
    )


def measure_graph(folder: Path, graph: GraphSpec, checkpoint: Checkpoint, tokenizer: Tokenizer, reference: Reference) -> GraphSpec:
    """Compares a graph with its checkpoint, and times it; returns its manifest entry with a new validation report.

    The facts about the graph's creation in the report, on which the bounds depend, stay the same. It raises ParityError if the graph does not
    agree with the checkpoint, or cannot be served.
    """
    spec = checkpoint.tokenizer_spec
    try:
        served = open_graph(folder, graph, spec, tokenizer, checkpoint.task, checkpoint)
        comparison = compare(served, reference)
        comparison.check()
    except BertServeError as error:
        raise ParityError(
            f"{type(checkpoint.model).__name__} is not supported: its {graph.precision} graph cannot be served. {error}"
        ) from error
    model = ir.load(folder / graph.file)
    updates = comparison.measured() | {
        "nodes": len(model.graph),
        "opset": model.graph.opset_imports.get(""),
        "speed": measure_latency(served.engine, max_length=spec.max_length, pad_id=spec.pad_id),
    }
    report = graph.validation.model_copy(update=updates)
    return graph.model_copy(update={"validation": report, "batch_invariant": comparison.batch_invariant})


def measure_latency(engine: Engine, *, max_length: int, pad_id: int) -> Speed:
    """Times a few runs of single texts at each length in tokens, on one thread; the token `pad_id` fills the texts."""

    def median_ms(length: int) -> float:
        batch = [Encoding(np.full(length, pad_id, dtype=np.int64), np.zeros(length, dtype=np.int64), masks=(1,))]
        return round(1000 * statistics.median(time_runs(lambda: engine.run(batch), RUNS, MAX_SECONDS)), 3)

    lengths = sorted({min(length, max_length) for length in (*LENGTHS, max_length)})
    timings = tuple(Timing(length=length, median_ms=median_ms(length)) for length in lengths)
    return Speed(cpu=cpu_name(), instructions=cpu_instructions(), threads=1, timings=timings)


def answer_example(graph: GraphSpec, folder: Path, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Example:
    """Returns a request body and the graph's answer to it, in the format of the HTTP API; the graph runs on the provider of its measurements."""
    spec = checkpoint.tokenizer_spec
    served = open_graph(folder, graph, spec, tokenizer, checkpoint.task, checkpoint)
    request = TASKS[checkpoint.task].example(spec)
    return Example(request=request, result=served.answer_body(request))


def update(spec: VerifySpec) -> Check:
    """Compares all graphs of a verified bundle with its checkpoint again, times them, and writes the new manifest and card."""
    try:
        _write_again(load_bundle(spec.bundle.resolve()), spec)
    except (ExportError, OSError) as error:
        return Check("update", False, f"nothing was written: {error}")
    return Check("update", True, "validation reports and flops of the manifest, and the card, are those measured now")


def _write_again(bundle: Bundle, spec: VerifySpec) -> None:
    manifest, tokenizer = bundle.manifest, Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)
    checkpoint, int8_texts, texts = load_checkpoint_of(manifest, spec), manifest.int8_texts, NO_TEXTS
    if any(graph.precision == "int8" for graph in manifest.graphs):
        texts = report_texts(manifest, spec.validation)
    elif spec.validation is not None:
        raise DataError(f"`{manifest.name}` has no int8 graph, which --validation needs; remove --validation.")
    calibration.refuse_pairs((texts,), manifest.task, manifest.tokenizer)
    if int8_texts is not None:
        int8_texts = int8_texts.model_copy(update={"report": split_digest((*texts.lines, *texts.pairs))})
    reference = sample_reference(checkpoint, texts.with_passages(tokenizer))
    graphs = tuple(measure_graph(bundle.path, graph, checkpoint, tokenizer, reference) for graph in manifest.graphs)
    source = manifest.source.model_copy(update=checkpoint.origin.model_dump(include=CARD_FIELDS))
    updates = {"graphs": graphs, "flops": checkpoint.flops, "source": source, "int8_texts": int8_texts}
    updated = Manifest.model_validate(manifest.model_copy(update=updates).model_dump())
    # each file is replaced as a whole; the card comes first, because the manifest is verified
    for name, text in bundle_texts(updated, bundle.path, checkpoint.card).items():
        aside = bundle.path / f".{name}"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, bundle.path / name)


def report_texts(manifest: Manifest, validation: Path | None) -> Texts:
    """Returns the texts to validate int8 again, without passages: those of the export if the file has them all, otherwise others.

    It raises CheckpointError if the file cannot be read, and DataError if some of its texts were used to create int8.
    """
    path = validation or calibration.BUILT_IN
    splits = manifest.int8_texts or calibration.read_split(calibration.BUILT_IN).digests()
    texts = {text_hash(text): text for text in read_texts(path, "validation")}
    recorded = hashes_of(splits.report)
    if texts.keys() >= set(recorded):
        return Texts.of([texts[digest] for digest in recorded])
    shared = texts.keys() & {*hashes_of(splits.calibration), *hashes_of(splits.gate)}
    if shared:
        raise DataError(
            f"int8 of `{manifest.name}` was made with {len(shared)} of the {len(texts)} texts of `{path}`, but must be judged on others; "
            f"it was judged on {len(recorded)} texts at the export: give their file, or another one, with --validation."
        )
    return calibration.report_texts(list(texts.values()))
