"""The check of a checkpoint against a bundle, and new measurements with it: `verify --checkpoint` and `--update`. It needs torch."""

import os
from pathlib import Path

from bertserve.export import int8_texts
from bertserve.export.checkpoint.card import CARD_FIELDS
from bertserve.export.checkpoint.checkpoint import Checkpoint, count_flops
from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.export.checkpoint.module import load_module
from bertserve.export.errors import ExportError, UsageError
from bertserve.export.int8_texts import SplitTexts
from bertserve.export.model_card import bundle_texts, quote
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.export.validation.comparison import measure_graph
from bertserve.export.validation.reference import sample_reference
from bertserve.export.validation.verify import VerifyOptions, VerifyReport
from bertserve.export.workspace import ignore_signals
from bertserve.service.bundle.example import difference
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.text.tokenizer import Tokenizer


def load_bundle_checkpoint(manifest: Manifest, options: VerifyOptions, report: VerifyReport) -> Checkpoint:
    """Loads the checkpoint or the trusted module for the task and layers of a bundle, and compares weights and settings."""
    assert options.checkpoint is not None, "the caller asks for it"
    if options.module:
        checkpoint = load_module(options.checkpoint)
        if checkpoint.task != manifest.task:
            raise ExportError(f"the module of `{options.checkpoint}` is for {checkpoint.task}, but the bundle is for {manifest.task}.")
    elif ".py:" in manifest.source.checkpoint:
        raise ExportError(f"the bundle's module is `{manifest.source.checkpoint}`; give --module FILE:FACTORY and --trust-module.")
    else:
        load_options = LoadOptions(
            task=manifest.task,
            revision=options.revision,
            layers="last" if manifest.embedding is None else manifest.embedding.layers,
            attentions=bool(manifest.attention_heads),
            ignored_weights=manifest.source.ignored_weights,
            token_types=manifest.source.token_types,
        )
        checkpoint = load_checkpoint(options.checkpoint, load_options)
    expected, actual = manifest.source.weights_sha256, checkpoint.origin.weights_sha256
    detail = f"sha256 over its weights is {actual[:12]}…, the manifest says {expected[:12]}…"
    report.add("checkpoint", expected == actual, detail, {"weights_sha256": actual})
    reason = compare_settings(manifest, checkpoint)
    detail = f"in the checkpoint {reason}" if reason else "labels, activation, embedding and tokenizer are those of the checkpoint"
    report.add("settings", reason is None, detail)
    return checkpoint


def compare_settings(manifest: Manifest, checkpoint: Checkpoint) -> str | None:
    """Returns a setting of a bundle that differs from its checkpoint, except the choices of the user at the export; None if none does.

    The comparison of outputs cannot find it, because it decodes both outputs with the same settings.
    """
    user_choices = {"embedding": {"layers", "default_layers", "combine"}, "tokenizer": {"sha256"}}
    updates = {name: getattr(checkpoint, name) for name in ("labels", "activation", "embedding", "tokenizer")}
    manifest_settings, checkpoint_settings = (
        side.model_dump(mode="json", include={*updates}, exclude=user_choices) for side in (manifest, manifest.model_copy(update=updates))
    )
    return difference(manifest_settings, checkpoint_settings, 0.0)


def update(bundle: Bundle, checkpoint: Checkpoint, tokenizer: Tokenizer, validation: Path | None) -> None:
    """Compares all graphs of a verified bundle with its checkpoint again, times them, and writes the new manifest and card.

    `validation` has texts to validate int8, none of which it was created with; None for the texts of the export.

    Raises:
        ExportError: A graph does not agree with the checkpoint, or the texts cannot be used.
        OSError: A file cannot be written.
    """
    manifest, digests, texts = bundle.manifest, bundle.manifest.int8_texts, SplitTexts()
    if any(graph.precision == "int8" for graph in manifest.graphs):
        texts = int8_texts.read_validation_texts(manifest, validation)
    elif validation is not None:
        raise UsageError(f"`{manifest.name}` has no int8 graph, which --int8-validation needs; remove --int8-validation.")
    EXPORT_TASKS[manifest.task].refuse_pairs((texts,), manifest.tokenizer)
    if digests is not None:
        digests = {**digests, "validation": texts.digests()}
    reference = sample_reference(checkpoint, texts.with_passages(tokenizer))
    graphs = tuple(measure_graph(bundle.path, graph, checkpoint, tokenizer, reference) for graph in manifest.graphs)
    source = manifest.source.model_copy(update=checkpoint.origin.model_dump(include={*CARD_FIELDS}))
    updates = {"graphs": graphs, "flops": count_flops(checkpoint), "source": source, "int8_texts": digests}
    new_manifest = Manifest.model_validate(manifest.model_copy(update=updates).model_dump())
    # each file is replaced as a whole; the manifest comes last, because it is verified
    with ignore_signals():
        for name, text in bundle_texts(new_manifest, bundle.path, quote(checkpoint.card)).items():
            aside = bundle.path / f".{name}"
            try:
                aside.write_text(text, encoding="utf-8")
                os.replace(aside, bundle.path / name)
            finally:
                aside.unlink(missing_ok=True)
