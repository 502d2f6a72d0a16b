"""A hypothesis strategy for random checkpoints, which the export can refuse for a few reasons, and the files of such a checkpoint."""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from hypothesis import strategies as st

from support.checkpoints import edit_json, edit_weights, naming, save_adapter, sentence_transformers, shard
from support.families import CASES, FAMILIES, HEADS

EMBED = "feature-extraction"
AUTO = {task: auto for task, (_, auto) in HEADS.items()} | {EMBED: transformers.AutoModel}
# The other families have a slow export, differ only in their tokenizers, or have their own tests.
QUICK = [name for name in FAMILIES if name not in ("ERNIE", "CamemBERT", "DeBERTa v2", "XLM", "GPT", "LLaMA", "BART", "T5")]
MODELS = [(family, task) for family, task in CASES if family in QUICK and task in HEADS] + [(family, EMBED) for family in QUICK]
# Name of the activation field in a family's configuration; the other families have `hidden_act`.
ACTIVATIONS = {"DistilBERT": "activation", "XLNet": "ff_activation", "ModernBERT": "hidden_activation", "GPT-2": "activation_function"}
LAYER_FIELDS = {"DistilBERT": "n_layers", "XLNet": "n_layer", "GPT-2": "n_layer"}
# Templates of a single text and of a pair; C and S are the tokenizer's first and last special tokens.
TEMPLATES = {
    "bare": ("$A", "$A $B:1"),
    "first": ("C $A", "C $A $B:1"),
    "last": ("$A S", "$A S $B:1 S:1"),
    "one type": ("C $A S", "C $A S $B S"),
    "double": ("C $A S S", "C $A S S $B:1 S:1"),
    "second text first": ("C $A S", "C $B:1 S:1 $A S"),
}
# Configuration fields that change a model's computation.
_BERT = ({"type_vocab_size": 3}, {"num_attention_heads": 2}, {"intermediate_size": 40})
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "BERT": _BERT,
    "ELECTRA": (*_BERT, {"embedding_size": 32}, {"summary_type": "mean"}),
    "RoBERTa": ({"num_attention_heads": 1}, {"pad_token_id": 3}),
    "DistilBERT": ({"sinusoidal_pos_embds": True}, {"n_heads": 2}),
    "ALBERT": ({"num_hidden_groups": 2}, {"inner_group_num": 2}, {"embedding_size": 32}),
    "MPNet": ({"num_attention_heads": 2},),
    "DeBERTa": (
        {"pos_att_type": ["p2c"]},
        {"pos_att_type": []},
        {"relative_attention": False, "position_biased_input": True},
        {"max_relative_positions": 16},
        {"talking_head": True},
    ),
    "DeBERTa v3": (
        {"position_buckets": -1},
        {"share_att_key": False},
        {"pos_att_type": ["c2p"]},
        {"norm_rel_ebd": "none"},
        {"position_biased_input": True},
        {"conv_kernel_size": 3},
        {"max_relative_positions": 24},
        {"pooler_hidden_act": "relu"},
    ),
    "ModernBERT": (
        {"classifier_pooling": "mean"},
        {"local_attention": 4},
        {"global_attn_every_n_layers": 1},
        {"classifier_activation": "relu"},
        {"norm_bias": True},
        {"attention_bias": True, "mlp_bias": True},
        {"decoder_bias": False},
    ),
    "XLNet": (
        {"summary_type": "first"},
        {"summary_type": "mean"},
        {"clamp_len": 10},
        {"same_length": True},
        {"summary_use_proj": False},
        {"untie_r": False},
    ),
    "GPT-2": ({"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}, {"reorder_and_upcast_attn": True}, {"n_inner": 40}),
}
ADDED = ("[E1]", "<url>", "CO2", "ing", "new york", "é", "🤖", "the", "Film")


@dataclass(frozen=True)
class Case:
    """Properties of a random checkpoint; most real checkpoints have the defaults."""

    family: str
    task: str
    labels: int = 3
    activation: str | None = None
    problem_type: str | None = None
    layers: int = 1
    positions: int = 96
    model_max_length: int = 512
    template: str | None = None
    padding_side: str | None = None
    truncation_side: str = "right"
    added: tuple[tokenizers.AddedToken, ...] = ()
    tied: bool = True
    dtype: str = "float32"
    shards: int = 1
    adapter: str | None = None
    pooling: str | None = None
    normalize: bool = False
    sentence_length: int = 512
    rows: int = 0
    variant: int | None = None
    quirk: str | None = None

    @property
    def limit(self) -> int:
        """Maximum length of a text in tokens when the checkpoint runs in transformers."""
        limit = self.sentence_length if self.pooling else self.model_max_length
        return limit if self.family == "XLNet" else min(self.positions, limit)

    @property
    def reasons(self) -> list[str]:
        """Words that the error can contain; empty for a checkpoint that must be exported."""
        words = {
            "no padding token": self.quirk == "no padding token",
            # in GPT-2's small vocabulary, the token is a parenthesis
            "padding token": self.quirk == "another padding token" and self.family == "GPT-2",
            "each text of a pair": self.template == "second text first",
            "usable length": self.limit < (32 if self.task == "fill-mask" else 16),
            # too short for a question of the samples
            "a window of": self.task == "question-answering" and self.limit < 80,
        }
        return [word for word, applies in words.items() if applies]


@dataclass(frozen=True)
class Quirk:
    """A change of a written checkpoint, and the cases that it applies to; the bundle must match PyTorch or have one of the `reasons`."""

    make: Callable[[Path], object]
    applies: Callable[[Case], bool] = lambda case: True


def configure(**fields: Any) -> Callable[[Path], object]:
    return lambda path: edit_json(path / "config.json", **fields)


def configure_tokenizer(**fields: Any) -> Callable[[Path], object]:
    return lambda path: edit_json(path / "tokenizer_config.json", **fields)


def add_pooler(path: Path) -> None:
    pooler = {"bert.pooler.dense.weight": torch.ones(32, 32), "bert.pooler.dense.bias": torch.ones(32)}
    edit_weights(path, lambda tensors: tensors.update(pooler))


def is_of(*families: str) -> Callable[[Case], bool]:
    return lambda case: case.family in families


QUIRKS: dict[str, Quirk] = {
    "chunked layers": Quirk(configure(chunk_size_feed_forward=1), is_of("BERT", "RoBERTa", "ELECTRA")),
    "causal": Quirk(configure(is_decoder=True), is_of("BERT", "RoBERTa", "ELECTRA")),
    "tuples": Quirk(configure(return_dict=False)),
    "all outputs": Quirk(configure(output_hidden_states=True, output_attentions=True)),
    "no padding token": Quirk(configure(pad_token_id=None), is_of("BERT", "DistilBERT", "ALBERT", "ELECTRA", "GPT-2")),
    "another padding token": Quirk(configure(pad_token_id=7), is_of("BERT", "DistilBERT", "ALBERT", "ELECTRA", "GPT-2")),
    "a cased tokenizer": Quirk(
        configure_tokenizer(do_lower_case=False, strip_accents=False, tokenize_chinese_chars=False),
        is_of("BERT", "DistilBERT", "ELECTRA", "MPNet"),
    ),
    "norm epsilon": Quirk(configure(layer_norm_eps=0.1), is_of("BERT", "RoBERTa", "ELECTRA", "MPNet", "XLNet")),
    "unused pooler": Quirk(add_pooler, lambda case: case.family == "BERT" and case.task == "token-classification" and not case.adapter),
    "no token types": Quirk(configure_tokenizer(model_input_names=["input_ids", "attention_mask"])),
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws a checkpoint."""
    family, task = draw(st.sampled_from(MODELS))
    often = lambda usual, *others: draw(st.sampled_from((usual,) * max(1, len(others)) + others))  # noqa: E731
    classifies = task == "text-classification"
    flags = st.fixed_dictionaries({name: st.booleans() for name in ("special", "lstrip", "rstrip", "single_word", "normalized")})
    tokens = draw(st.lists(st.sampled_from(ADDED), max_size=3, unique=True)) if draw(st.booleans()) else []
    adapts = family not in ("GPT-2", "XLNet", "ALBERT") and task in ("text-classification", "token-classification")
    case = Case(
        family,
        task,
        labels=often(3, 1, 2, 7) if task.endswith("-classification") else 3,
        activation=often(None, "relu", "gelu_new", "silu", "gelu_pytorch_tanh"),
        layers=often(1, 2),
        positions=often(96, 20, 40, 64, 131),
        # XLNet has no other length limit
        model_max_length=often(*((100,) if family == "XLNet" else (512, 10**30)), 15, 33, 64),
        template=often(None, *TEMPLATES),
        padding_side=often(None, "left", "right"),
        truncation_side=often("right", "left"),
        added=tuple(tokenizers.AddedToken(token, **draw(flags)) for token in tokens),
        tied=often(True, False) if task == "fill-mask" else True,
        dtype=often("float32", "bfloat16", "float16", "float64"),
        shards=often(1, 2),
        rows=often(0, 5),
        variant=often(None, *range(len(VARIANTS.get(family, ())))),
        adapter=often(None, "lora", "dora", "rslora") if adapts else None,
        pooling=often(None, "cls", "mean", "max") if task == EMBED else None,
    )
    if classifies:
        problems = (
            ("regression", "multi_label_classification")
            if case.labels == 1
            else ("multi_label_classification", "single_label_classification")
        )
        case = replace(case, problem_type=often(None, *problems))
    if case.pooling:
        case = replace(case, normalize=draw(st.booleans()), sentence_length=often(512, 30))
    quirks = [name for name, quirk in QUIRKS.items() if quirk.applies(case)]
    return replace(case, quirk=draw(st.sampled_from(quirks)) if draw(st.booleans()) else None)


def write(case: Case, folder: Path) -> Path:
    """Writes the checkpoint of a case and returns the path to export."""
    path, family = folder / "checkpoint", FAMILIES[case.family]
    variant = {} if case.variant is None else VARIANTS[case.family][case.variant]
    fields: dict[str, Any] = {LAYER_FIELDS.get(case.family, "num_hidden_layers"): case.layers}
    if case.family != "XLNet":  # XLNet's positions are relative
        fields["max_position_embeddings"] = case.positions + max(family.offset, variant.get("pad_token_id", -1) + 1)
    if case.activation:
        fields[ACTIVATIONS.get(case.family, "hidden_act")] = case.activation
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
    if case.quirk:
        QUIRKS[case.quirk].make(path)
    if case.dtype != "float32":
        dtype = getattr(torch, case.dtype)
        edit_weights(path, lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))
        edit_json(path / "config.json", dtype=case.dtype)
    if case.shards > 1:
        shard(path, case.shards)
    if case.pooling:
        pooling = f"{case.pooling}_token{'s' * (case.pooling != 'cls')}"
        sentence_transformers(path, *(["Normalize"] if case.normalize else []), pooling=pooling, max_length=case.sentence_length)
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
        tokenizer.add_tokens([token], special_tokens=token.special)
    return tokenizer


def _write_adapter(case: Case, base: Path, folder: Path) -> Path:
    """Writes a random adapter with peft and returns its folder."""
    model = AUTO[case.task].from_pretrained(base, dtype=torch.float32)
    layers = [name for name, module in model.base_model.named_modules() if isinstance(module, torch.nn.Linear) and "pool" not in name]
    task_type = "SEQ_CLS" if case.task == "text-classification" else "TOKEN_CLS"
    settings = {"use_dora": case.adapter == "dora", "use_rslora": case.adapter == "rslora"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_adapter(model, folder / "adapter", task_type=task_type, r=2, target_modules=layers[:2], **settings)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder / "adapter")
    return folder / "adapter"
