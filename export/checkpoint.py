"""Loads a checkpoint: model, fast tokenizer, labels, lengths. All quirks of checkpoints end in this file.

What leaves it is plain: a PyTorch model in float32 and evaluation mode, a clean `tokenizer.json`, a template of special
tokens. No pickle is ever loaded and no code of the checkpoint is ever run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from export import adapter, embedding, leftovers, quirks
from export.errors import CheckpointError
from service.graph import InputSpec, OutputSpec
from service.manifest import Activation, Embedding, Flops, Layers, MaskToken, Piece, SpecialPiece, Task, TextPiece

HEADS: dict[str, tuple[Task, Any]] = {
    # suffix of the architecture's name -> task, and the class that loads it
    "ForSequenceClassification": ("text-classification", AutoModelForSequenceClassification),
    "ForTokenClassification": ("token-classification", AutoModelForTokenClassification),
    "ForQuestionAnswering": ("question-answering", AutoModelForQuestionAnswering),
    "ForMaskedLM": ("fill-mask", AutoModelForMaskedLM),
    "Model": ("feature-extraction", AutoModel),
}
TASKS = tuple(task for task, _ in HEADS.values())
FILLS: dict[str, InputSpec] = {
    "input_ids": InputSpec(name="input_ids", fill="token_ids"),
    "attention_mask": InputSpec(name="attention_mask", fill="attention_mask"),
    "token_type_ids": InputSpec(name="token_type_ids", fill="type_ids"),
}
MASK_INDEX = InputSpec(name="mask_index", fill="mask_index")
OUTPUTS: dict[Task, tuple[OutputSpec, ...]] = {
    "text-classification": (OutputSpec(name="logits", kind="per_text"),),
    "token-classification": (OutputSpec(name="logits", kind="per_token"),),
    "question-answering": (OutputSpec(name="start_logits", kind="per_token"), OutputSpec(name="end_logits", kind="per_token")),
    "fill-mask": (OutputSpec(name="logits", kind="per_mask"),),
    "feature-extraction": embedding.OUTPUTS["last"],
}


# of a model whose positions are all relative and whose tokenizer says nothing: what nearly all were trained with
DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class Checkpoint:
    """Everything the later stages need of a checkpoint.

    Attributes:
        name: Name of the source's last path component.
        source: What the user gave.
        revision: Hub revision, if any.
        commit: The hub's commit that was loaded, or None for a local folder.
        weights_sha256: Digest over the weight files.
        model: In float32, evaluation mode, with eager attention.
        task: Hugging Face task name.
        inputs: The graph's inputs: what the model takes and the tokenizer fills, and for fill-mask the masks' positions.
        outputs: The graph's outputs.
        labels: Label names by id.
        activation: What turns logits into scores.
        tokenizer: The Hugging Face tokenizer, for the reference side of parity.
        tokenizer_json: Fast tokenizer without truncation and padding.
        max_length: Usable length in tokens, special tokens counted.
        pad_id: Padding token id.
        padding_side: `left` or `right`.
        single: Template of one text.
        pair: Template of a pair.
        cls_index: Where [CLS] stands in both templates: 0, -1 for the end, or None.
        subword_prefix: What begins a token that continues a word, or None.
        mask: The mask token, for fill-mask.
        flops: Arithmetic of one run.
        card: The checkpoint's README.md, if it has one.
        embedding: What a text's vector is made of, for feature extraction.
    """

    name: str
    source: str
    revision: str | None
    commit: str | None
    weights_sha256: str
    model: PreTrainedModel
    task: Task
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    labels: tuple[str, ...]
    activation: Activation
    tokenizer: Any
    tokenizer_json: str
    max_length: int
    pad_id: int
    padding_side: Literal["left", "right"]
    single: tuple[Piece, ...]
    pair: tuple[Piece, ...]
    cls_index: int | None
    subword_prefix: str | None
    mask: MaskToken | None
    flops: Flops
    card: str | None
    embedding: Embedding | None = None


def load(source: str, *, task: str = "auto", revision: str | None = None, layers: Layers = "last") -> Checkpoint:
    """Loads a checkpoint from a local folder or the hub.

    Args:
        source: A folder with `config.json` and `model.safetensors`, or a hub id.
        task: A Hugging Face task name, or `auto` to read it from the architecture.
        revision: Branch, tag or commit of a hub id.
        layers: What an embedding graph gives out: the last layer, or the last four side by side too.

    Raises:
        CheckpointError: Something is missing or not understood; the message says what.
    """
    # what it warns of is judged below, and said in one line
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    folder = _folder(source, revision)
    lora = adapter.read(folder)
    base = folder if lora is None else _folder(lora.base, lora.revision)
    _refuse_pickled_parts(source, base)
    config = _read(f"the configuration of `{source}`", AutoConfig.from_pretrained, base)
    built, loader = _head(config, task) if lora is None else _adapted(config, task, lora)
    tokenizer = _tokenizer(source, folder if lora is None or (folder / "tokenizer_config.json").is_file() else base)
    model, report = _read(
        f"the weights of `{source}`",
        loader.from_pretrained,
        base,
        config=config,
        use_safetensors=True,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # only to say it better
    )
    replaced = set() if lora is None else lora.merge(model)
    _refuse_other_shapes(source, [entry for entry in report["mismatched_keys"] if entry[0] not in replaced])
    embeds = built == "feature-extraction"
    sentences = embedding.read(folder) if embeds else embedding.Sentences()
    missing = set(report["missing_keys"]) - replaced
    if embeds:
        missing = set(embedding.drop_pooler(model, missing))
    if layers != "last":
        if not embeds:
            raise CheckpointError(f"--layers {layers} is for feature-extraction, and `{source}` is for {built}; leave it out.")
        embedding.give_layers(model, layers)
    if missing:
        raise CheckpointError(
            f"`{source}` lacks weights that a {built} model needs: {', '.join(sorted(missing)[:3])}. "
            f"It was not fine-tuned for this task, or its architecture {config.architectures or ''} is not {type(model).__name__}, "
            "which transformers has for it; give the right --task or checkpoint."
        )
    leftovers.refuse(
        source,
        report["unexpected_keys"],
        taken=model.state_dict(),
        modules={name for name, _ in model.named_modules()},
        encoder=model.base_model_prefix,
    )
    _check_weights(source, model, max(len(tokenizer), *(id_ + 1 for id_ in tokenizer.get_vocab().values())))
    model.eval()
    inputs = _inputs(model, tokenizer)
    single, pair = _template(tokenizer, ("a",)), _template(tokenizer, ("a", "b"))
    _check_types(source, config, inputs, (*single, *pair))
    cls_index = _cls_index(tokenizer, single, pair)
    if built == "question-answering" and cls_index is None:
        raise CheckpointError(
            f"the tokenizer of `{source}` neither begins nor ends its inputs with a [CLS] token, which question answering needs."
        )
    return Checkpoint(
        name=Path(source.rstrip("/")).name,
        source=Path(source).name if Path(source).is_dir() else source,
        revision=revision,
        commit=None if Path(source).is_dir() else _commit(folder),
        weights_sha256=_weights_digest(folder) if lora is None else _weights_digest(folder, base),
        model=model,
        task=built,
        inputs=(*inputs, MASK_INDEX) if built == "fill-mask" else inputs,
        outputs=embedding.OUTPUTS[layers] if embeds else OUTPUTS[built],
        labels=_labels(source, config) if built.endswith("-classification") else (),
        activation=_activation(config) if built == "text-classification" else "none" if embeds else "softmax",
        tokenizer=tokenizer,
        tokenizer_json=_tokenizer_json(tokenizer, built),
        max_length=min(_usable_length(model, tokenizer), sentences.max_length or sys.maxsize),
        pad_id=tokenizer.pad_token_id,
        padding_side=_padding_side(source, model, tokenizer, inputs),
        single=single,
        pair=pair,
        cls_index=cls_index,
        subword_prefix=_subword_prefix(tokenizer),
        mask=_mask(source, tokenizer) if built == "fill-mask" else None,
        flops=_flops(model),
        card=(folder / "README.md").read_text(encoding="utf-8", errors="replace") if (folder / "README.md").is_file() else None,
        embedding=sentences.embedding(model, layers) if embeds else None,
    )


def _folder(source: str, revision: str | None) -> Path:
    """Returns the local folder of a source, downloading a hub id's small set of files first."""
    if Path(source).is_dir():
        return Path(source)
    if source.count("/") > 1 or source.startswith((".", "/", "~")):
        raise CheckpointError(f"the folder `{source}` does not exist.")
    try:
        # no pickles, no Python: what is not fetched cannot be loaded
        return Path(
            snapshot_download(source, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "README.md"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"`{source}` is no local folder, and the hub did not give it ({type(error).__name__}); check the id, --revision and the network."
        ) from error


def _read(what: str, read: Any, folder: Path, **options: Any) -> Any:
    """Calls a `from_pretrained`, translating what transformers raises for broken files."""
    try:
        return read(folder, trust_remote_code=False, local_files_only=True, **options)
    except Exception as error:  # whatever its parsing met: transformers checks few fields, and what it raises has no common base
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{what} needs custom code of the checkpoint's own (`auto_map`), which is never run; only architectures that "
                f"transformers {transformers.__version__} has itself can be exported."
            ) from error
        hint = ""
        if "weights" in what:
            hint = (
                "; the file is damaged or not the real one, so fetch it again."
                if any(folder.glob("*.safetensors"))
                else " Pickled weights are never loaded: save them with `save_pretrained` as safetensors."
            )
        raise CheckpointError(f"{what} cannot be read: {said}{hint}") from error


def _refuse_other_shapes(source: str, mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Refuses weights of other shapes than config.json gives them: transformers would put random ones in their place."""
    if mismatched:
        name, given, configured = min(mismatched, key=lambda entry: entry[0])
        raise CheckpointError(
            f"{len(mismatched)} weights of `{source}` have another shape than its config.json says: `{name}` is {list(given)}, configured is "
            f"{list(configured)}. Mend config.json (`vocab_size`, the labels, `hidden_size` and the like) or take the weights that belong to it."
        )


def _refuse_pickled_parts(source: str, folder: Path) -> None:
    """Refuses an index of weights that names other files than safetensors, which transformers would unpickle."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return
    try:
        parts = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"the weights of `{source}` cannot be read: `{path.name}` is no index of weights.") from error
    wrong = sorted(str(part) for part in parts if not str(part).endswith(".safetensors") or Path(str(part)).name != part)
    if wrong:
        raise CheckpointError(
            f"the weights of `{source}` cannot be read: `{path.name}` names `{wrong[0]}`, which is no safetensors file of its folder. "
            "Pickled weights are never loaded: save them with `save_pretrained` as safetensors."
        )


def _tokenizer(source: str, folder: Path) -> Any:
    """Returns the fast tokenizer, refusing what cannot be served."""
    tokenizer = _read(f"the tokenizer of `{source}`", AutoTokenizer.from_pretrained, folder)
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"`{source}` has no fast tokenizer (`tokenizer.json`); save one with `save_pretrained` and export again.")
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        # transformers 5 makes up a tokenizer of special tokens where there is no file
        raise CheckpointError(f"`{source}` has no tokenizer: neither `tokenizer.json` nor a vocabulary; save one with `save_pretrained`.")
    if tokenizer.pad_token_id is None:
        raise CheckpointError(f"the tokenizer of `{source}` has no padding token; set `pad_token` and save it again.")
    return tokenizer


def _head(config: Any, task: str) -> tuple[Task, Any]:
    """Returns the task and the class that loads it, from the architecture's name or the user's choice."""
    names = config.architectures or []
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False):
        raise CheckpointError(f"architecture {names or 'none'} has a decoder; only encoders are exported: text in, scores out in one run.")
    # a language model's name ends in "LMHeadModel", which is no bare encoder
    read = next(
        (t for name in names for suffix, (t, loader) in HEADS.items() if "HeadModel" not in name and _has_head(name, suffix, loader)), None
    )
    wanted = read if task == "auto" else task
    if wanted is None:
        raise CheckpointError(f"cannot tell the task of architecture {names or 'none'}; give --task, one of {', '.join(TASKS)}.")
    # there is an encoder below every head
    if read not in (None, wanted) and wanted != "feature-extraction":
        raise CheckpointError(f"the checkpoint is a {names[0]}, made for {read}; --task {wanted} does not fit it.")
    built, loader = next((t, loader) for t, loader in HEADS.values() if t == wanted)
    if type(config) not in loader._model_mapping:
        raise CheckpointError(f"transformers has no head for {wanted} on a {type(config).__name__} (architecture {names or 'none'}).")
    return built, loader


def _adapted(config: Any, task: str, lora: adapter.Adapter) -> tuple[Task, Any]:
    """Returns the task and the class of a model that an adapter is merged into; the model's own head is another's, or none."""
    wanted = lora.task if task == "auto" else task
    if wanted == "auto":
        return _head(config, task)
    config.architectures = None
    built, loader = _head(config, wanted)
    with torch.device("meta"):  # shapes alone
        labels = lora.labels(_read("the configuration of the adapter's model", lambda _, **__: loader.from_config(config), lora.folder))
    if labels is not None:
        config.num_labels = labels
    return built, loader


def _has_head(architecture: str, suffix: str, loader: Any) -> bool:
    """Returns whether an architecture is one that transformers has for a head; XLNet's, for one, end in another suffix."""
    return architecture.endswith(suffix) or architecture in loader._model_mapping._model_mapping.values()


def _check_types(source: str, config: Any, inputs: tuple[InputSpec, ...], pieces: tuple[Piece, ...]) -> None:
    """Refuses token types that the model has no row for: PyTorch would stop at the first pair."""
    rows = getattr(config, "type_vocab_size", None)
    highest = max(piece.type_id for piece in pieces)
    if rows and highest >= rows and any(spec.fill == "type_ids" for spec in inputs):
        raise CheckpointError(
            f"the tokenizer of `{source}` gives token types up to {highest}, and the model has {rows}; they do not belong together."
        )


def _check_weights(source: str, model: PreTrainedModel, vocabulary: int) -> None:
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"`{source}` has NaN or infinite weights in `{name}`; the training diverged.")
    try:
        embeddings: Any = model.get_input_embeddings()
    except NotImplementedError as error:
        raise CheckpointError(f"{type(model).__name__} of `{source}` has no embedding of token ids, which is not understood.") from error
    rows = embeddings.weight.shape[0]
    if vocabulary > rows:
        raise CheckpointError(
            f"the tokenizer of `{source}` has {vocabulary} tokens, the embedding only {rows} rows; they do not belong together. "
            "Save the tokenizer that the model was trained with beside it."
        )


def _template(tokenizer: Any, texts: tuple[str, ...]) -> tuple[Piece, ...]:
    """Reads the special-token template off an encoding of short texts, whatever the post-processor is."""
    encoding = tokenizer(*texts, return_special_tokens_mask=True)[0]
    pieces: list[Piece] = []
    for token, id_, type_id, sequence, special in zip(
        encoding.tokens, encoding.ids, encoding.type_ids, encoding.sequence_ids, encoding.special_tokens_mask, strict=True
    ):
        if special:
            pieces.append(SpecialPiece(special=token, id=id_, type_id=type_id))
            continue
        piece = TextPiece(text="a" if sequence == 0 else "b", type_id=type_id)
        if not pieces or pieces[-1] != piece:
            pieces.append(piece)
    return tuple(pieces)


def _inputs(model: PreTrainedModel, tokenizer: Any) -> tuple[InputSpec, ...]:
    taken = inspect.signature(model.forward).parameters
    if model.main_input_name not in FILLS:
        raise CheckpointError(f"{type(model).__name__} reads `{model.main_input_name}`, not token ids; only models of text are exported.")
    needed = [
        n for n, p in taken.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n not in FILLS
    ]
    if needed:
        raise CheckpointError(
            f"{type(model).__name__} needs inputs that are not understood: {', '.join(needed)}; known are {', '.join(FILLS)}."
        )
    unknown = [name for name in tokenizer.model_input_names if name not in FILLS]
    if unknown:
        raise CheckpointError(f"the tokenizer gives inputs that are not understood: {', '.join(unknown)}.")
    # in the model's own order, which the tracer goes by
    return tuple(FILLS[name] for name in taken if name in FILLS and name in tokenizer.model_input_names)


def _padding_side(source: str, model: PreTrainedModel, tokenizer: Any, inputs: tuple[InputSpec, ...]) -> quirks.Side:
    """Returns where padding goes; finds out by running the model, which is the first time that it runs."""
    try:
        return quirks.padding_side(model, tokenizer, [spec.name for spec in inputs])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{type(model).__name__} of `{source}` does not run on what its tokenizer gives: {type(error).__name__}: {error}; "
            "mend the checkpoint, or it is of a kind that is not understood."
        ) from error


def _labels(source: str, config: Any) -> tuple[str, ...]:
    labels = tuple(str(config.id2label[i] or "") for i in sorted(config.id2label))
    if sorted(config.id2label) != list(range(len(labels))) or len(set(labels)) != len(labels) or "" in labels:
        raise CheckpointError(
            f"the labels of `{source}` are not distinct names for the ids 0 to {len(labels) - 1}: {config.id2label}; mend config.json."
        )
    return labels


def _activation(config: Any) -> Activation:
    """The rule of the Hugging Face text-classification pipeline."""
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"


def _tokenizer_json(tokenizer: Any, task: Task) -> str:
    """Returns `tokenizer.json` without the truncation and padding settings of its training.

    For fill-mask the mask is marked as no special token: the service reads special tokens spelled in a text as text, and
    this one must go on standing for a mask.
    """
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in document["added_tokens"]:
        if task == "fill-mask" and token["id"] == tokenizer.mask_token_id:
            token["special"] = token["normalized"] = False
    return json.dumps(document | {"truncation": None, "padding": None}, ensure_ascii=False)


def _cls_index(tokenizer: Any, single: tuple[Piece, ...], pair: tuple[Piece, ...]) -> int | None:
    """Returns where [CLS] stands, if that is the first place of both templates, or the last, -1."""
    for index in (0, -1):
        pieces = single[index], pair[index]
        if all(isinstance(piece, SpecialPiece) and piece.id == tokenizer.cls_token_id for piece in pieces):
            return index
    return None


def _subword_prefix(tokenizer: Any) -> str | None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return model.get("continuing_subword_prefix") or None


def _mask(source: str, tokenizer: Any) -> MaskToken:
    if tokenizer.mask_token is None:
        raise CheckpointError(f"the tokenizer of `{source}` has no mask token; add it to tokenizer_config.json.")
    return MaskToken(token=tokenizer.mask_token, id=tokenizer.mask_token_id)


def _usable_length(model: PreTrainedModel, tokenizer: Any) -> int:
    """The position table, less the rows that RoBERTa's family keeps for padding, and what the tokenizer admits."""
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings") and isinstance(m, torch.nn.Embedding)]
    rows = [m.num_embeddings - (0 if m.padding_idx is None else m.padding_idx + 1) for m in tables]
    lengths = [*rows, getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length]
    # transformers writes "no limit" as -1 or as 10^30
    return int(min((length for length in lengths if length and 0 < length < 10**9), default=DEFAULT_LENGTH))


def _flops(model: PreTrainedModel) -> Flops:
    """2 FLOP per weight of every linear layer and token; attention adds 4 S H per layer and token (S tokens, H hidden)."""
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return Flops(linear=2.0 * weights, quadratic=4.0 * model.config.num_hidden_layers * model.config.hidden_size)


def _commit(folder: Path) -> str | None:
    """Returns the commit of a hub download, after which its snapshot folder is named."""
    return folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else None


def _weights_digest(*folders: Path) -> str:
    hasher = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            hasher.update(hashlib.file_digest(file, "sha256").digest())
    return hasher.hexdigest()
