"""The checkpoint of a finished bundle: the baseline of `verify`, and the source of a new validation report for `verify --update`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from bertserve.export import calibration
from bertserve.export.bundle import CARD_FIELDS, model_card
from bertserve.export.calibration import Texts, hashes_of, read_texts, split_digest, text_hash
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.checkpoint.module import load_module
from bertserve.export.errors import CheckpointError, DataError, ExportError
from bertserve.export.validation.data import Check
from bertserve.export.validation.measure import measure_graph
from bertserve.export.validation.reference import NO_TEXTS, fixed_requests, measure_attention, run, sample_attention, sample_reference
from bertserve.export.validation.served_graph import Answer
from bertserve.export.validation.verify import Baseline, VerifySpec
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, Bundle, load_bundle
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import EngineError
from bertserve.service.text.tokenizer import Tokenizer

_SHOWN_CHARS = 200  # of a setting in the report


def load_checkpoint_of(bundle: Bundle, spec: VerifySpec) -> Checkpoint:
    """Loads the checkpoint of a verification for the task and layers of its bundle.

    Raises:
        CheckpointError: It cannot be loaded, or the bundle was made from another one.
        MissingPackageError: It is a LoRA adapter, and peft is not installed.
    """
    manifest, source = bundle.manifest, spec.checkpoint
    assert source is not None, "the caller asks for it"
    if spec.module:
        checkpoint = load_module(source)
        if checkpoint.task != manifest.task:
            raise CheckpointError(
                f"the module of `{source}` is for {checkpoint.task}, but the bundle is for {manifest.task}; give the right one."
            )
        return checkpoint
    if re.fullmatch(r".+\.py:\w+", manifest.source.checkpoint):
        raise CheckpointError(
            f"the bundle was made from the module `{manifest.source.checkpoint}`; give --module FILE:FACTORY and "
            "--trust-module instead of --checkpoint."
        )
    layers = "last" if manifest.embedding is None else manifest.embedding.layers
    return load_checkpoint(
        source,
        task=manifest.task,
        revision=spec.revision,
        layers=layers,
        attentions=bool(manifest.attention_heads),
        ignored_weights=manifest.source.ignored_weights,
        token_types=manifest.source.token_types,
    )


def check_checkpoint(bundle: Bundle, spec: VerifySpec) -> Generator[Check, None, Baseline]:
    """Checks the weights' digest and the settings of the checkpoint, and returns it as the baseline.

    Raises:
        CheckpointError: It cannot be loaded, or the bundle was made from another one.
        MissingPackageError: It is a LoRA adapter, and peft is not installed.
    """
    manifest, checkpoint = bundle.manifest, load_checkpoint_of(bundle, spec)
    expected, actual = manifest.source.weights_sha256, checkpoint.origin.weights_sha256
    detail = f"sha256 over its weights is {actual[:12]}…, the manifest says {expected[:12]}…"
    yield Check("checkpoint", expected == actual, detail, {"weights_sha256": actual})
    differences = compare_settings(manifest, checkpoint)
    detail = "; ".join(differences) or "labels, activation, embedding and tokenizer are those of the checkpoint"
    yield Check("settings", not differences, detail, {"differences": differences})
    attention = sample_attention(checkpoint)

    def answer(request: Any) -> Answer:
        try:
            rows = run(checkpoint, request)
        except ValueError as error:
            raise EngineError(str(error)) from error
        if not all(np.isfinite(values).all() for row in rows for values in row.values()):
            raise EngineError("PyTorch's outputs are not finite.")
        return Answer((), rows, None)

    return Baseline(
        "the checkpoint", answer, fixed_requests(checkpoint), attention_error=lambda served: measure_attention(served, attention)
    )


def compare_settings(manifest: Manifest, checkpoint: Checkpoint) -> list[str]:
    """Returns the settings of a bundle that differ from its checkpoint, except the choices of the user at the export.

    The comparison of outputs cannot find them, because it decodes both outputs with the settings of the checkpoint.
    """
    chosen = {"embedding": {"layers", "default_layers", "combine"}, "tokenizer": {"sha256"}}
    from_bundle = manifest.model_dump(include={"labels", "activation", "embedding", "tokenizer"}, exclude=chosen)
    updates = {name: getattr(checkpoint, name) for name in ("labels", "activation", "embedding")} | {"tokenizer": checkpoint.tokenizer_spec}
    from_checkpoint = manifest.model_copy(update=updates).model_dump(include=set(from_bundle), exclude=chosen)
    pairs = []
    for name, value in from_bundle.items():
        other = from_checkpoint[name]
        if isinstance(value, dict) and isinstance(other, dict):
            pairs += [(f"{name}.{key}", value[key], other[key]) for key in value]
        else:
            pairs.append((name, value, other))
    texts = [
        (name, *(f"{json.dumps(side, ensure_ascii=False):.{_SHOWN_CHARS}}" for side in sides))
        for name, *sides in pairs
        if sides[0] != sides[1]
    ]
    return [f"`{name}` is {value}, but {other} in the checkpoint" for name, value, other in texts]


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
        _remeasure(bundle, load_checkpoint_of(bundle, spec), validation)
    except (ExportError, OSError) as error:
        return Check("update", False, f"nothing was written: {error}")
    return Check("update", True, "evidence and flops of the manifest, and the card, are those measured now")


def _remeasure(bundle: Bundle, checkpoint: Checkpoint, validation: Path | None) -> None:
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
    graphs = tuple(measure_graph(bundle.path, graph, checkpoint, tokenizer, reference)[0] for graph in manifest.graphs)
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
