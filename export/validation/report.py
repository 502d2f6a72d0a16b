"""The validation reports of the manifest: each graph is compared with the checkpoint, and timed, at export and by `verify --update`.

At export, a graph that cannot be created, loaded or matched with the checkpoint does not stop the others; the manifest has the reason. A
provider's float32 graph is an exception: its other graphs are created from it, and without it their wider limits could hide an error.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bertserve.export import calibration
from bertserve.export.artifact import Artifact
from bertserve.export.bundle import CARD_FIELDS, model_card
from bertserve.export.calibration import Texts, hashes_of, read_texts, split_digest, text_hash
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.errors import DataError, ExportError, ParityError
from bertserve.export.graph import onnx_files
from bertserve.export.progress import stage, time_runs
from bertserve.export.tasks.catalog import TASKS
from bertserve.export.validation.agreement import measure_row_errors
from bertserve.export.validation.comparison import Reference, compare
from bertserve.export.validation.data import Check
from bertserve.export.validation.pytorch import NO_TEXTS, load_checkpoint_of, sample_reference
from bertserve.export.validation.served_graph import open_graph
from bertserve.export.validation.verify import VerifySpec
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, Bundle, digest, load_bundle
from bertserve.service.bundle.graph_spec import GraphFile, GraphSpec, Precision, Speed, Timing, ValidationReport
from bertserve.service.bundle.manifest import Example, Manifest, OmittedGraph
from bertserve.service.bundle.validation_policy import is_low
from bertserve.service.engine.hardware import cpu_instructions, cpu_name
from bertserve.service.engine.onnx_engine import Engine
from bertserve.service.engine.sessions import why_not
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

    Args:
        artifacts: The graphs of each provider, created by iteration; float32 first.
        precisions: The precisions to keep; the last one of each provider is its default graph.
        folder: The bundle's folder.
        checkpoint: The checkpoint of the graphs.
        tokenizer: The bundle's tokenizer.
        reference: The checkpoint's own outputs.
        default_must_agree: Whether a provider's float32 graph becomes its default if another graph has too low agreement with the
            checkpoint.

    Returns:
        The graphs that passed, and the graphs that failed with the reasons.

    Raises:
        ExportError: The CPU's float32 graph failed, or the float32 graphs of all providers.
        OSError: A file cannot be written.
    """
    graphs: list[GraphSpec] = []
    omitted: list[OmittedGraph] = []
    failure: Exception | None = None
    for provider, provider_artifacts in artifacts.items():
        measured: list[GraphSpec] = []
        kept = list(precisions[provider])
        try:
            # fp32 is measured even if it is not kept; otherwise int8's wide limits could hide an error of the trace
            for artifact in provider_artifacts:
                with stage("parity", f"{artifact.provider}/{artifact.precision}"):
                    onnx_files.finalize(artifact.path)
                    measured.append(measure_graph(folder, _entry(artifact, checkpoint), checkpoint, tokenizer, reference))
        except Exception as error:  # optimizers and onnxruntime have no common base class of errors
            # all graphs are created from the trace, and the CPU's float32 graph shows whether it is right
            if isinstance(error, OSError) or (provider == "cpu" and not measured):
                raise
            failure = error
            missing = [precision for precision in kept if precision not in {graph.precision for graph in measured}]
            missing = missing[:1] if measured else missing
            omitted += [OmittedGraph(provider=provider, precision=precision, reason=_reason(error)) for precision in missing]
            kept = [precision for precision in kept if precision not in missing] or ["fp32"]
        graphs += _keep(measured, kept, folder, provider, default_must_agree=default_must_agree)
    if not graphs:
        assert failure is not None, "there is at least one provider"
        raise failure
    return graphs, omitted


def _reason(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return str(error) if isinstance(error, ExportError) else f"{type(error).__name__}: {first}"


def _keep(
    measured: Sequence[GraphSpec], kept: Sequence[Precision], folder: Path, provider: Provider, *, default_must_agree: bool
) -> list[GraphSpec]:
    """Returns a provider's graphs with these precisions and its default graph, and removes all its other files, also of failed graphs."""
    graphs = [graph for graph in measured if graph.precision in kept]
    low = {graph.precision for graph in graphs if is_low(graph)}
    default = "fp32" if default_must_agree and kept[-1] in low and "fp32" in kept else kept[-1]
    file_names = {file.file for graph in graphs for file in graph.files}
    for path in folder.glob(f"model.{provider}.*"):
        if path.name not in file_names:
            path.unlink()
    return [graph.model_copy(update={"default": graph.precision == default}) for graph in graphs]


def _entry(artifact: Artifact, checkpoint: Checkpoint) -> GraphSpec:
    """Returns a graph's manifest entry, whose validation report has only the facts of the graph's creation."""
    report = ValidationReport(
        samples=0,
        worst_abs_error=0.0,
        label_agreement=None,
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
        evidence=report,
        shapes=artifact.shapes,
    )


def measure_graph(folder: Path, graph: GraphSpec, checkpoint: Checkpoint, tokenizer: Tokenizer, reference: Reference) -> GraphSpec:
    """Compares a graph with its checkpoint, and times it; returns its manifest entry with a new validation report.

    The facts about the graph's creation in the report, on which the bounds depend, stay the same.

    Raises:
        ParityError: The graph does not agree with the checkpoint, or cannot be served.
    """
    measured_on, spec = graph.provider if why_not(graph.provider) is None else "cpu", checkpoint.tokenizer_spec
    try:
        served = open_graph(folder, graph, spec, tokenizer, checkpoint.task, checkpoint, measured_on)
        comparison = compare(served, reference)
        comparison.check()
        row_errors = measure_row_errors(served.engine, comparison.encodings, comparison.rows)
        attention_error = reference.attention_error(served)
    except BertServeError as error:
        raise ParityError(
            f"{type(checkpoint.model).__name__} is not supported: its {graph.precision} graph cannot be served. {error}"
        ) from error
    model = ir.load(folder / graph.file)
    updates = comparison.measured() | {
        "worst_row_error": row_errors.worst,
        "nodes": len(model.graph),
        "opset": model.graph.opset_imports.get(""),
        "speed": measure_latency(served.engine, max_length=spec.max_length, pad_id=spec.pad_id),
        "provider": measured_on,
        "attention_error": attention_error,
    }
    is_invariant = row_errors.is_rounding(graph.precision)
    return graph.model_copy(update={"evidence": graph.evidence.model_copy(update=updates), "batch_invariant": is_invariant})


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
    served = open_graph(folder, graph, spec, tokenizer, checkpoint.task, checkpoint, graph.evidence.provider)
    request = TASKS[checkpoint.task].example(spec)
    return Example(request=request, result=served.answer_body(request))


def update(spec: VerifySpec, validation: Path | None = None) -> Check:
    """Compares all graphs of a verified bundle with its checkpoint again, times them, and writes the new manifest and card.

    Args:
        spec: The options of the verification, which all passed.
        validation: A file of texts to validate int8; None for the built-in ones.

    Returns:
        Whether it was written, or why not.
    """
    try:
        bundle = load_bundle(spec.bundle.resolve())
        _write_again(bundle, load_checkpoint_of(bundle, spec), validation)
    except (ExportError, OSError) as error:
        return Check("update", False, f"nothing was written: {error}")
    return Check("update", True, "evidence and flops of the manifest, and the card, are those measured now")


def _write_again(bundle: Bundle, checkpoint: Checkpoint, validation: Path | None) -> None:
    manifest, tokenizer = bundle.manifest, Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)
    int8_texts, texts = manifest.int8_texts, NO_TEXTS
    if any(graph.precision == "int8" for graph in manifest.graphs):
        texts = report_texts(manifest, validation)
    elif validation is not None:
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
    for name, text in (
        (CARD_FILE, model_card(updated, bundle.path, checkpoint.card)),
        (MANIFEST_FILE, updated.model_dump_json(indent=1) + "\n"),
    ):
        aside = bundle.path / f".{name}"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, bundle.path / name)


def report_texts(manifest: Manifest, validation: Path | None) -> Texts:
    """Returns the texts to validate int8 again, without passages: those of the export if the file has them all, otherwise others.

    Args:
        manifest: Its entry `int8_texts` has the texts of int8. Without it, they are those of an export without flags.
        validation: A file; None for the built-in texts.

    Raises:
        CheckpointError: The file cannot be read.
        DataError: Some of the texts were used to create int8.
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
