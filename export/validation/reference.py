"""The checkpoint in PyTorch float32 as the reference for graphs, at export and for `verify`.

The Hugging Face tokenizer creates the inputs, with its own truncation and windows, so that the service's tokenizer is validated too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.signature import read_output, returning_attention
from bertserve.export.errors import ExportError
from bertserve.export.int8_texts import SplitTexts
from bertserve.export.progress import track
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.export.tasks.sample_texts import LONG_TEXT, NAMES_TEXT, SAMPLE_TEXTS
from bertserve.export.validation.comparison import Reference
from bertserve.export.validation.served_graph import ModelAnswer, model_sample_inputs
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import TextPart, TokenizerSpec
from bertserve.service.errors import EngineError
from bertserve.service.tasks import attention
from bertserve.service.tasks.cost import MAX_RESPONSE_BYTES, NUMBER_BYTES
from bertserve.service.tasks.step import TextInput
from bertserve.service.text.tokenizer import is_tokenizer_failure
from bertserve.service.text.windows import default_stride


def sample_reference(checkpoint: Checkpoint, texts: SplitTexts | None = None) -> Reference:
    """Returns the checkpoint's answers to the samples of its task, and to texts to validate int8, which were not used to create it.

    Raises:
        ExportError: PyTorch or the tokenizer cannot run some of them.
    """
    spec, tokenizer = checkpoint.tokenizer, checkpoint.hf_tokenizer
    texts = texts or SplitTexts()
    texts = replace(texts, passages=tuple(passage for passage in texts.passages if passage not in texts.lines))
    try:
        fixed = model_sample_inputs(checkpoint, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
        inputs = [*fixed, *EXPORT_TASKS[checkpoint.task].validation_inputs(texts, spec)]
        predictions = [ModelAnswer(run_input(checkpoint, input_)) for input_ in track(inputs, "run PyTorch", unit="samples")]
        maps = _sample_attention(checkpoint) if checkpoint.attention_heads else []
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ExportError(
            f"{type(checkpoint.model).__name__} cannot run samples of up to {spec.max_length} tokens in PyTorch: {error}; it is not "
            "supported, or the lengths in its configuration are wrong or too short for its task."
        ) from error

    def predict(input_: Any) -> ModelAnswer:
        try:
            rows = run_input(checkpoint, input_)
        except ValueError as error:
            raise EngineError(str(error)) from error
        if not all(np.isfinite(values).all() for row in rows for values in row.values()):
            raise EngineError("PyTorch's outputs are not finite.")
        return ModelAnswer(rows)

    return Reference("the checkpoint", inputs, predictions, len(fixed), predict, maps=maps)


def run_input(checkpoint: Checkpoint, input_: Any) -> list[Outputs]:
    """Returns the outputs of each window of an input in PyTorch; windows run one by one, because they change each other in some models."""
    texts, options = EXPORT_TASKS[checkpoint.task].tokenizer_call(input_, checkpoint.tokenizer)
    return [_run_window(checkpoint, window) for window in _windows(checkpoint, texts, options)]


def _windows(checkpoint: Checkpoint, texts: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, list[int]]]:
    """Returns the inputs of each window or choice, with the Hugging Face tokenizer's own truncation."""
    tokenizer, spec = checkpoint.hf_tokenizer, checkpoint.tokenizer
    options = {"truncation": "longest_first", "max_length": spec.max_length, **options}
    try:
        if "stride" in options:
            *whole_texts, _ = texts  # each window has the whole first text of a pair
            options["truncation"] = "only_second" if whole_texts and not second_text_first(spec) else "only_first"
            token_count = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in whole_texts)
            max_tokens = options["max_length"] - tokenizer.num_special_tokens_to_add(pair=len(texts) > 1) - token_count
            if options["stride"] is None or options["stride"] >= max_tokens:  # the service refuses a requested stride that is too large
                options["stride"] = default_stride(max(max_tokens, 0))
        batch = tokenizer(
            *(text if isinstance(text, list) else [text] for text in (texts[::-1] if second_text_first(spec) else texts)),
            **options,
            return_overflowing_tokens="stride" in options,
            return_token_type_ids=True,
            return_attention_mask=True,
        )
    except BaseException as error:
        if not is_tokenizer_failure(error):
            raise
        raise ValueError(f"a window of {options['max_length']} tokens has no room for the text and its overlap: {error}") from error
    if not any(part.type_id for part in spec.parts):
        # the library gives other types than the template's from the second window on
        batch["token_type_ids"] = [[0] * len(ids) for ids in batch["input_ids"]]
    names = [model_input.name for model_input in checkpoint.inputs if model_input.name in batch]
    windows = [{name: batch[name][i] for name in names} for i in range(len(batch["input_ids"]))]
    # if the beginning of a text is cut, transformers returns the last window first
    return windows[::-1] if "stride" in options and spec.truncation_side == "left" else windows


def second_text_first(spec: TokenizerSpec) -> bool:
    """Returns whether the second text of a pair is before the first one."""
    return next((part.text for part in spec.pair or () if isinstance(part, TextPart)), "a") == "b"


def _run_window(checkpoint: Checkpoint, window: dict[str, list[int]]) -> Outputs:
    """Returns a window's outputs from PyTorch in the engine's form, float32 by name."""
    with torch.no_grad():
        outputs = checkpoint.model(**{name: torch.tensor([values]) for name, values in window.items()})
    row = {spec.name: read_output(outputs, spec.name)[0].numpy() for spec in checkpoint.outputs if spec.kind != "per_map"}
    if checkpoint.tokenizer.mask is not None:
        masks = [i for i, id_ in enumerate(window["input_ids"]) if id_ == checkpoint.tokenizer.mask.id]
        row = {name: values[masks] for name, values in row.items()}
    return row


def _sample_attention(checkpoint: Checkpoint) -> list[tuple[TextInput[attention.Maps], NDArray[np.float32]]]:
    """Returns the checkpoint's attention for short and long texts, for as many heads as an answer can contain."""
    spec = checkpoint.tokenizer
    all_heads = [(i, head) for i, count in enumerate(checkpoint.attention_heads) for head in range(count)]
    texts = [(text,) for text in (*SAMPLE_TEXTS[:7], LONG_TEXT, LONG_TEXT * 9)]
    pairs = [] if spec.pair is None else [("A man is eating food.", "Someone eats."), (LONG_TEXT * 2, NAMES_TEXT)]
    samples = []
    for parts in (*texts, *pairs):
        ordered = parts[::-1] if second_text_first(spec) else parts
        batch = checkpoint.hf_tokenizer(*ordered, return_tensors="pt", return_token_type_ids=True, return_attention_mask=True)
        length = batch["input_ids"].shape[1]
        if not 0 < length <= min(spec.max_length, 512):  # PyTorch returns the maps of all layers and heads
            continue
        with torch.no_grad(), returning_attention(checkpoint.model):
            weights = checkpoint.model(**{spec.name: batch[spec.name] for spec in checkpoint.inputs if spec.name in batch})["attentions"]
        order = np.random.default_rng(0).permutation(len(all_heads))[: MAX_RESPONSE_BYTES // NUMBER_BYTES // length**2]
        maps = [all_heads[i] for i in sorted(order)]
        input_ = TextInput[attention.Maps](parts[0], maps, parts[1] if len(parts) > 1 else None)
        samples.append((input_, np.stack([weights[layer][0, head].numpy() for layer, head in maps])))
    return samples
