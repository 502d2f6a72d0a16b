"""Writes the files of a random checkpoint in the format of a trained one."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file

from checkpoints import edit_json, edit_weights, naming
from families import FAMILIES
from random_checkpoints import ACTIVATION_FIELDS, AUTO, EMBED, FAULTS, LAYER_FIELDS, QUIRKS, TEMPLATES, VARIANTS, Case


def write(case: Case, folder: Path) -> Path:
    """Writes the checkpoint of a case and returns the path to export."""
    path, family = folder / "checkpoint", FAMILIES[case.family]
    variant = {} if case.variant is None else VARIANTS[case.family][case.variant]
    fields: dict[str, Any] = {LAYER_FIELDS.get(case.family, "num_hidden_layers"): case.layers}
    if case.family != "XLNet":  # XLNet's positions are relative
        fields["max_position_embeddings"] = case.positions + max(family.offset, variant.get("pad_token_id", -1) + 1)
    if case.activation:
        fields[ACTIVATION_FIELDS.get(case.family, "hidden_act")] = case.activation
    if case.task.endswith("-classification"):
        fields |= naming(tuple(f"L{i}" for i in range(case.labels))) | {"problem_type": case.problem_type}
    fields |= variant
    if case.rows:
        fields["vocab_size"] = len(tokenizer_of(case)) + case.rows
    if case.task == "fill-mask":
        fields["tie_word_embeddings"] = case.tied
    replace(family, tokenizer=lambda: tokenizer_of(case)).save(path, "text-classification" if case.task == EMBED else case.task, **fields)
    if case.task == EMBED:
        AUTO[EMBED].from_pretrained(path).save_pretrained(path)
    if case.template:  # the family's own tokenizer class has a fixed template
        names = FAMILIES[case.family].tokenizer().model_input_names
        edit_json(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", model_input_names=names)
    for change in (QUIRKS.get(case.quirk or ""), FAULTS.get(case.fault or "")):
        if change:
            change.make(path)
    if case.dtype != "float32":
        dtype = getattr(torch, case.dtype)
        edit_weights(path, lambda found: found.update({name: value.to(dtype) for name, value in found.items()}))
        edit_json(path / "config.json", dtype=case.dtype)
    if case.shards > 1:
        _shard(path, case.shards)
    if case.pooling and case.fault != "dense module":
        _write_pooling(path, case)
    return _write_adapter(case, path, folder) if case.adapter else path


def tokenizer_of(case: Case) -> Any:
    """Returns the family's tokenizer with the settings of a case."""
    tokenizer = FAMILIES[case.family].tokenizer()
    tokenizer.model_max_length, tokenizer.truncation_side = case.model_max_length, case.truncation_side
    tokenizer.padding_side = case.padding_side or tokenizer.padding_side
    first, last = tokenizer.cls_token or tokenizer.bos_token or tokenizer.eos_token, tokenizer.sep_token or tokenizer.eos_token
    if case.template:
        names = {"C": first, "S": last}
        single, pair = (" ".join(names.get(piece[0], piece[0]) + piece[1:] for piece in text.split()) for text in TEMPLATES[case.template])
        ids = {(token, tokenizer.convert_tokens_to_ids(token)) for token in names.values()}
        tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=sorted(ids)
        )
    for token in case.added:
        options = {name: getattr(token, name) for name in ("special", "lstrip", "rstrip", "single_word", "normalized")}
        tokenizer.add_tokens([tokenizers.AddedToken(token.content, **options)], special_tokens=token.special)
    return tokenizer


def _shard(path: Path, count: int) -> None:
    tensors, weight_map = load_file(path / "model.safetensors"), {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::count]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_pooling(path: Path, case: Case) -> None:
    """Writes the files of sentence-transformers."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"} | ({"Normalize": "2_Normalize"} if case.normalize else {})
    modules = [{"idx": i, "path": folder, "type": f"sentence_transformers.models.{kind}"} for i, (kind, folder) in enumerate(paths.items())]
    (path / "1_Pooling").mkdir()
    pooling = {f"pooling_mode_{case.pooling}_token{'s' * (case.pooling != 'cls')}": True}
    for file, document in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": case.sentence_length}),
    ):
        (path / file).write_text(json.dumps(document))


def _write_adapter(case: Case, base: Path, folder: Path) -> Path:
    """Writes a random adapter with peft and returns its folder."""
    from peft import LoraConfig, get_peft_model

    model = AUTO[case.task].from_pretrained(base, dtype=torch.float32)
    layers = [name for name, module in model.base_model.named_modules() if isinstance(module, torch.nn.Linear) and "pool" not in name]
    task_type = "SEQ_CLS" if case.task == "text-classification" else "TOKEN_CLS"
    settings = {"use_dora": case.adapter == "dora", "use_rslora": case.adapter == "rslora"}
    config = LoraConfig(task_type=task_type, r=2, target_modules=layers[:2], **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    adapted.save_pretrained(folder / "adapter")
    if case.adapter == "pissa":  # PiSSA also changes the base model
        edit_json(folder / "adapter" / "adapter_config.json", init_lora_weights="pissa")
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder / "adapter")
    return folder / "adapter"
