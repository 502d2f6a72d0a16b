"""Loads a checkpoint from a folder or the hub: reads its parts in order, and checks that they match.

It never runs code of the checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel

from bertserve.export.checkpoint import signature
from bertserve.export.checkpoint.card import find_card
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.fast_tokenizer import load_tokenizer, make_tokenizer_spec, read_templates, vocabulary_size
from bertserve.export.checkpoint.padding import find_padding, set_pad_token
from bertserve.export.checkpoint.sentence_head import SentenceHead, attach_sentence_head, read_embedding
from bertserve.export.checkpoint.sentence_transformers import (
    POOLING,
    SETTINGS_FILE,
    SentenceSettings,
    check_cross_encoder,
    read_modules,
    read_transformer_settings,
)
from bertserve.export.checkpoint.source import SourceFiles, find_source, read_with_transformers
from bertserve.export.checkpoint.task_head import adapt_head, choose_task, fixed_labels, read_activation, read_labels
from bertserve.export.checkpoint.token_types import Template, choose_token_types, type_templates
from bertserve.export.checkpoint.weights import load_pretrained
from bertserve.export.errors import ExportError
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.service.bundle.manifest import Combine, Embedding, Layers, MaskToken, Task, TextPart, TokenizerSpec, TokenTypes
from bertserve.service.tasks import embed, question_answering


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The user's choices for a checkpoint; by default, its files decide.

    Attributes:
        task: Hugging Face task name, or `auto` for the task of its architecture.
        revision: Branch, tag or commit of a hub id.
        layers: Layers of an embedding model that requests can use.
        combine: How these layers become one vector if a request names no layers; None for the last layer only.
        attentions: Whether the graph also returns attention.
        ignored_weights: Patterns of the names of weights that can stay unused, with `*` for any characters.
        token_types: The token types that the model was trained with; None for the types that its tokenizer gave at the time.
    """

    task: str = "auto"
    revision: str | None = None
    layers: Layers = "last"
    combine: Combine | None = None
    attentions: bool = False
    ignored_weights: Sequence[str] = ()
    token_types: TokenTypes | None = None


def load_checkpoint(source: str, options: LoadOptions | None = None) -> Checkpoint:
    """Loads a checkpoint from a local folder or the hub."""
    options = options or LoadOptions()
    # the checks below report the causes of its warnings, in one line each
    transformers.utils.logging.set_verbosity_error()
    files = find_source(source, options.revision)
    config = _read_config(files)
    task, auto_class = _find_task(files, config, options.task)
    if options.layers != "last" and not EXPORT_TASKS[task].embeds:
        raise ExportError(f"--layers is for {embed.TASK}, but `{source}` is for {task}; remove it.")
    if options.combine is not None and options.layers == "last":
        raise ExportError(f"--combine {options.combine} needs several layers; give them with --layers, or remove it.")
    settings = SentenceSettings.read(files.folder / SETTINGS_FILE)
    transformer_settings = read_transformer_settings(files.trained_folder)
    tokenizer = load_tokenizer(source, files.tokenizer_folder, lowercase=transformer_settings.lowercase)
    embedding = head = None
    if EXPORT_TASKS[task].embeds:
        embedding, head = _read_embedding(files, config, settings, options)
    else:
        check_cross_encoder(files.folder, settings)
    model = load_pretrained(files, task, auto_class, config, options.ignored_weights)
    adapt_head(model, task)
    if head is not None:
        attach_sentence_head(model, head)
    if embedding is not None:
        graph_layers, numbers = signature.return_layers(model, tokenizer, options.layers)
        defaults = {} if options.combine is None else {"default_layers": numbers, "combine": options.combine}
        embedding = embedding.model_copy(update={"layers": graph_layers} | defaults)
    _check_vocabulary(source, model, vocabulary_size(tokenizer))
    # sentence-transformers replaces the tokenizer's limit by its own
    max_length = _usable_length(source, task, model, transformer_settings.max_length or tokenizer.model_max_length)
    spec, token_types = _read_tokenizer_spec(files, task, model, tokenizer, options, max_length)
    inputs = signature.model_inputs(model, tokenizer, token_types)
    head_labels, export_task, card = fixed_labels(model), EXPORT_TASKS[task], find_card(files.folder)
    checkpoint = Checkpoint(
        origin=files.origin(card, options.ignored_weights, token_types),
        model=model,
        task=task,
        inputs=(*inputs, signature.MASK_INDEX) if export_task.fills_masks else inputs,
        outputs=signature.graph_outputs(task, embedding),
        labels=head_labels or (read_labels(source, model.config) if export_task.labeled else ()),
        activation="softmax" if head_labels else export_task.activation or read_activation(model.config, settings.activation_fn),
        hf_tokenizer=tokenizer,
        tokenizer=spec,
        card=None if card is None else card.read_text(encoding="utf-8-sig", errors="replace"),
        embedding=embedding,
    )
    if not options.attentions:
        return checkpoint
    inputs, outputs = (*checkpoint.inputs, signature.ATTENTION_INDEX), (*checkpoint.outputs, signature.ATTENTIONS)
    return replace(checkpoint, inputs=inputs, outputs=outputs, attention_heads=signature.count_heads(model, tokenizer))


def _read_config(files: SourceFiles) -> Any:
    if not (files.model_folder / "config.json").is_file():
        raise ExportError(f"`{files.model_folder}` has no `config.json`; give a folder that `save_pretrained` of transformers wrote.")
    config = read_with_transformers(f"the configuration of `{files.source}`", AutoConfig.from_pretrained, files.model_folder)
    if getattr(config, "transformers_weights", None) is not None:  # transformers would load another file than model.safetensors
        raise ExportError(f"the config.json of `{files.source}` has `transformers_weights`; remove it, and save model.safetensors.")
    if getattr(config, "attention_type", None) == "block_sparse":
        # after its first short text, BigBird uses full attention for all texts, so its answers depend on earlier texts
        raise ExportError(
            f"the config.json of `{files.source}` has `attention_type` = 'block_sparse', which is not supported; if full attention is "
            "right, set `original_full`."
        )
    config.return_dict = True
    if getattr(config, "chunk_size_feed_forward", 0):
        config.chunk_size_feed_forward = 0  # a traced graph would keep the number of chunks of the example
    return config


def _read_embedding(
    files: SourceFiles, config: Any, settings: SentenceSettings, options: LoadOptions
) -> tuple[Embedding, SentenceHead | None]:
    if (dimensions := getattr(config, "hidden_size", None)) is None:
        raise ExportError(f"the config.json of `{files.source}` has no `hidden_size`; embeddings of such a model are not supported.")
    embedding, head = read_embedding(files.folder, settings, dimensions)
    if options.combine is not None and head is not None:
        raise ExportError(f"--combine {options.combine} needs a pooling by `cls`, `mean` or `max` without Dense layers; remove it.")
    return embedding, head


def _find_task(files: SourceFiles, config: Any, task: str) -> tuple[Task, Any]:
    """Returns the task and the auto class that loads it."""
    if task == "auto" and POOLING in [kind for kind, _ in read_modules(files.folder)]:
        # modules.json decides; all-mpnet-base-v2, for example, names the class in which its base was trained
        task = embed.TASK
    chosen_task, auto_class = choose_task(config, task, files.adapter)
    if auto_class.__name__ in (getattr(config, "auto_map", None) or {}):
        raise ExportError(
            f"the config.json of `{files.source}` names code for {auto_class.__name__} in `auto_map`, which is never run; remove the entry "
            "if transformers' class gives the correct answers, otherwise export the model with --module."
        )
    return chosen_task, auto_class


def _read_tokenizer_spec(
    files: SourceFiles, task: Task, model: PreTrainedModel, tokenizer: Any, options: LoadOptions, max_length: int
) -> tuple[TokenizerSpec, TokenTypes | None]:
    """Returns the manifest's entry for the tokenizer, and the token types of its templates; the tokenizer gets a padding token."""
    source, export_task = files.source, EXPORT_TASKS[task]
    pairs_only = fixed_labels(model) is not None and export_task.takes_pairs  # these classifiers score the relation of two texts
    requires_pair = export_task.needs_pairs or pairs_only
    single, pair, token_types = _templates(files, task, model, tokenizer, options, requires_pair=requires_pair)
    set_pad_token(source, model, tokenizer, (*single, *(pair or ())))
    names = [spec.name for spec in signature.model_inputs(model, tokenizer, token_types)]
    try:  # runs the model for the first time
        padding = find_padding(model, tokenizer, names, max_length)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ExportError(
            f"{type(model).__name__} of `{source}` fails on the inputs of its tokenizer, or its kind is not supported: "
            f"{type(error).__name__}: {error}."
        ) from error
    if export_task.fills_masks and tokenizer.mask_token is None:
        raise ExportError(f"the tokenizer of `{source}` has no mask token; add it to tokenizer_config.json.")
    mask = MaskToken(token=tokenizer.mask_token, id=tokenizer.mask_token_id) if export_task.fills_masks else None
    spec = make_tokenizer_spec(tokenizer, single, pair, padding, max_length=max_length, mask=mask, pairs_only=pairs_only)
    return spec, token_types


def _templates(
    files: SourceFiles, task: Task, model: PreTrainedModel, tokenizer: Any, options: LoadOptions, *, requires_pair: bool
) -> tuple[Template, Template | None, TokenTypes | None]:
    """Returns the templates of a text and of a pair, and the token types that the model was trained with, which these have."""
    source, export_task = files.source, EXPORT_TASKS[task]
    # transformers' scripts and pipeline for question answering put the passage first if the tokenizer pads on the left
    second_text_first = task == question_answering.TASK and tokenizer.padding_side == "left"
    single, pair = read_templates(source, tokenizer, second_text_first=second_text_first)
    texts = [part.text for part in pair if isinstance(part, TextPart)]
    expected = ["b", "a"] if second_text_first else ["a", "b"]
    if texts != expected:
        raise ExportError(f"the tokenizer of `{source}` must have each text of a pair as {expected}, not {texts}; change its template.")
    chosen = choose_token_types(
        source,
        model,
        tokenizer,
        (*single, *pair) if export_task.takes_pairs or export_task.needs_pairs or options.attentions else single,
        version=None if files.adapter else model.config.transformers_version,  # for an adapter, only the base model's version is known
        requested=options.token_types,
    )
    return *type_templates(source, model, single, pair, chosen, requires_pair=requires_pair), chosen


def _check_vocabulary(source: str, model: PreTrainedModel, vocabulary: int) -> None:
    try:
        embeddings: Any = model.get_input_embeddings()
    except NotImplementedError as error:
        raise ExportError(f"{type(model).__name__} of `{source}` has no embedding of token ids, so it is not supported.") from error
    rows = embeddings.weight.shape[0]
    if vocabulary > rows:
        raise ExportError(
            f"the tokenizer of `{source}` has {vocabulary} tokens, but the embedding has only {rows} rows; add the model's own tokenizer."
        )


def _usable_length(source: str, task: Task, model: PreTrainedModel, limit: int) -> int:
    """Returns the maximum length in tokens: from the position table, without RoBERTa's rows for padding, or a limit of the checkpoint."""
    # `padding_idx` identifies a table, because some models have their own class for it
    tables = [table for name, table in model.named_modules() if name.endswith("position_embeddings")]
    tables = [table for table in tables if hasattr(table, "padding_idx") and hasattr(table, "weight")]
    rows = [table.weight.shape[0] - (0 if table.padding_idx is None else table.padding_idx + 1) for table in tables]
    lengths = [*rows, getattr(model.config, "max_position_embeddings", None), limit]
    # transformers stores "no limit" as -1 or as 10^30; nearly all models with only relative positions were trained with 512 tokens
    max_length = int(min((length for length in lengths if length and 0 < length < 10**9), default=512))
    if max_length < EXPORT_TASKS[task].min_length:
        raise ExportError(
            f"`{source}` has a usable length of {max_length} tokens, but {task} needs {EXPORT_TASKS[task].min_length}; check "
            "`max_position_embeddings`, the lengths in tokenizer_config.json and sentence_bert_config.json, and --task."
        )
    return max_length
