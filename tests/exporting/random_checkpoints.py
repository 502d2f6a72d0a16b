"""A hypothesis strategy for random checkpoints, some of which the export must refuse, and the files of such a checkpoint."""

import json
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

from checkpoints import edit_json, edit_weights, naming, save_adapter, sentence_transformers, shard, write_modules
from families import CASES, FAMILIES, HEADS

EMBED = "feature-extraction"
AUTO = {task: auto for task, (_, auto) in HEADS.items()} | {EMBED: transformers.AutoModel}
# Families with a quick export. The other families differ only in their tokenizers, or have their own tests.
QUICK = (
    "BERT",
    "RoBERTa",
    "DistilBERT",
    "ALBERT",
    "ELECTRA",
    "MPNet",
    "XLM-RoBERTa",
    "DeBERTa",
    "DeBERTa v3",
    "ModernBERT",
    "XLNet",
    "GPT-2",
)
MODELS = [(family, task) for family, task in CASES if family in QUICK and task in HEADS] + [(family, EMBED) for family in QUICK]
# Name of the activation field in a family's configuration; the other families have `hidden_act`.
ACTIVATION_FIELDS = {
    "DistilBERT": "activation",
    "XLNet": "ff_activation",
    "ModernBERT": "hidden_activation",
    "GPT-2": "activation_function",
}
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
class Added:
    """A token that training added."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


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
    added: tuple[Added, ...] = ()
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
    fault: str | None = None

    @property
    def limit(self) -> int:
        """Maximum length of a text in tokens when the checkpoint runs in transformers."""
        limit = self.sentence_length if self.pooling else self.model_max_length
        return limit if self.family == "XLNet" else min(self.positions, limit)

    @property
    def must_be_refused(self) -> bool:
        """Whether a bundle could not reproduce the results of the trained model."""
        return self.fault is not None or self.adapter == "pissa"

    @property
    def reasons(self) -> list[str]:
        """Words that the error can contain; empty for a checkpoint that must be exported."""
        found = {
            FAULTS[self.fault].word if self.fault else None: True,
            QUIRKS[self.quirk].word if self.quirk else None: True,
            "init_lora_weights": self.adapter == "pissa",
            # in GPT-2's small vocabulary, the token is a parenthesis
            "padding token": self.quirk == "another padding token" and self.family == "GPT-2",
            "each text of a pair": self.template == "second text first",
            "usable length": self.limit < (32 if self.task == "fill-mask" else 16),
            # too short for a question of the samples
            "a window of": self.task == "question-answering" and self.limit < 80,
        }
        return [word for word, applies in found.items() if word and applies]


@dataclass(frozen=True)
class Change:
    """A change of a written checkpoint, and the cases that it applies to."""

    word: str | None  # in the error message of the export; None if the checkpoint must be exported
    make: Callable[[Path], object]
    fits: Callable[[Case], bool] = lambda case: True


def _config(**fields: Any) -> Callable[[Path], object]:
    return lambda path: edit_json(path / "config.json", **fields)


def _weights(**tensors: torch.Tensor) -> Callable[[Path], object]:
    return lambda path: edit_weights(path, lambda found: found.update({name.replace("__", "."): value for name, value in tensors.items()}))


def _first_linear(path: Path, change: Callable[[dict[str, torch.Tensor], str], object]) -> None:
    edit_weights(
        path, lambda found: change(found, next(name for name in sorted(found) if name.endswith(".weight") and found[name].ndim == 2))
    )


def _poison(found: dict[str, torch.Tensor], name: str) -> None:
    found[name] = torch.full_like(found[name], torch.nan)


def _drop(found: dict[str, torch.Tensor], prefix: str) -> None:
    for name in [name for name in found if name.startswith(prefix)]:
        del found[name]


def _relative_positions(path: Path) -> None:
    edit_json(path / "config.json", position_embedding_type="relative_key")
    prefix = "" if json.loads((path / "config.json").read_text())["architectures"] == ["BertModel"] else "bert."
    name = f"{prefix}encoder.layer.0.attention.self.distance_embedding.weight"
    edit_weights(path, lambda found: found.update({name: torch.ones(191, 8)}))


def _classifies(case: Case) -> bool:
    return case.task.endswith("-classification")


# Changes that the export must refuse: transformers would fail, or give other results than the trained model.
FAULTS: dict[str, Change] = {
    "CRF": Change("crf.transitions", _weights(crf__transitions=torch.zeros(3, 3))),
    "LSTM": Change("lstm.weight_ih_l0", _weights(lstm__weight_ih_l0=torch.zeros(64, 32))),
    "adapter module": Change("adapters.nli", _weights(encoder__layer__0__adapters__nli__down=torch.zeros(2, 32))),
    "relative positions": Change("distance_embedding", _relative_positions, lambda case: case.family == "BERT"),
    "no head": Change(
        "classifier.",
        lambda path: edit_weights(path, lambda found: _drop(found, "classifier.")),
        lambda case: _classifies(case) and case.family == "BERT",
    ),
    "NaN": Change("NaN", lambda path: _first_linear(path, _poison), lambda case: case.tied),
    "custom activation": Change("zorp", _config(hidden_act="zorp"), lambda case: case.family in ("BERT", "RoBERTa", "ELECTRA", "MPNet")),
    "other weights": Change("transformers_weights", _config(transformers_weights="other.safetensors")),
    "labels twice": Change("labels", _config(id2label={"0": "a", "1": "a", "2": "b"}), lambda case: _classifies(case) and case.labels == 3),
    "one token type": Change(
        "token types",
        lambda path: (
            edit_json(path / "config.json", type_vocab_size=1),
            edit_weights(path, lambda found: found.update({n: found[n][:1].clone() for n in list(found) if "token_type" in n})),
        ),
        lambda case: case.family == "BERT" and case.task in ("question-answering", "multiple-choice") and case.template != "one type",
    ),
    "small vocabulary": Change("the embedding has", lambda path: _add_tokens(path, 3000), lambda case: case.family == "BERT"),
    "own code": Change("`auto_map`", _config(auto_map={"AutoConfig": "code.Config"}, model_type="zorp")),
    "split special tokens": Change(
        "split_special_tokens", lambda path: edit_json(path / "tokenizer_config.json", split_special_tokens=True)
    ),
    "dense module": Change("Dense", lambda path: write_modules(path, "Dense"), lambda case: case.task == EMBED),
}
# Changes after which the bundle must match PyTorch, or the export must fail with one of the `reasons`.
QUIRKS: dict[str, Change] = {
    "chunked layers": Change(None, _config(chunk_size_feed_forward=1), lambda case: case.family in ("BERT", "RoBERTa", "ELECTRA")),
    "causal": Change(None, _config(is_decoder=True), lambda case: case.family in ("BERT", "RoBERTa", "ELECTRA")),
    "tuples": Change(None, _config(return_dict=False)),
    "all outputs": Change(None, _config(output_hidden_states=True, output_attentions=True)),
    "no padding token": Change(
        "no padding token", _config(pad_token_id=None), lambda case: case.family in ("BERT", "DistilBERT", "ALBERT", "ELECTRA", "GPT-2")
    ),
    "another padding token": Change(
        None, _config(pad_token_id=7), lambda case: case.family in ("BERT", "DistilBERT", "ALBERT", "ELECTRA", "GPT-2")
    ),
    "a cased tokenizer": Change(
        None,
        lambda path: edit_json(path / "tokenizer_config.json", do_lower_case=False, strip_accents=False, tokenize_chinese_chars=False),
        lambda case: case.family in ("BERT", "DistilBERT", "ELECTRA", "MPNet"),
    ),
    "norm epsilon": Change(None, _config(layer_norm_eps=0.1), lambda case: case.family in ("BERT", "RoBERTa", "ELECTRA", "MPNet", "XLNet")),
    "leftover pooler": Change(
        None,
        _weights(bert__pooler__dense__weight=torch.ones(32, 32), bert__pooler__dense__bias=torch.ones(32)),
        lambda case: case.family == "BERT" and case.task == "token-classification" and not case.adapter,
    ),
    "no token types": Change(
        None, lambda path: edit_json(path / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    ),
}


def _add_tokens(path: Path, count: int) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([f"token{i}" for i in range(count)])
    tokenizer.save_pretrained(path)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws a checkpoint; about one in five has a fault."""
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
        added=tuple(Added(token, **draw(flags)) for token in tokens),
        tied=often(True, False) if task == "fill-mask" else True,
        dtype=often("float32", "bfloat16", "float16", "float64"),
        shards=often(1, 2),
        rows=often(0, 5),
        variant=often(None, *range(len(VARIANTS.get(family, ())))),
        adapter=often(None, "lora", "dora", "rslora", "pissa") if adapts else None,
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
    if draw(st.integers(0, 4)) == 4:
        case = replace(case, adapter=None, shards=1)  # a fault changes only a single weights file without an adapter
        return replace(case, fault=draw(st.sampled_from([name for name, fault in FAULTS.items() if fault.fits(case)])))
    quirks = [name for name, quirk in QUIRKS.items() if quirk.fits(case)]
    return replace(case, quirk=draw(st.sampled_from(quirks)) if draw(st.booleans()) else None)


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
        shard(path, case.shards)
    if case.pooling and case.fault != "dense module":
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
        options = {name: getattr(token, name) for name in ("special", "lstrip", "rstrip", "single_word", "normalized")}
        tokenizer.add_tokens([tokenizers.AddedToken(token.content, **options)], special_tokens=token.special)
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
    if case.adapter == "pissa":  # PiSSA also changes the base model
        edit_json(folder / "adapter" / "adapter_config.json", init_lora_weights="pissa")
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder / "adapter")
    return folder / "adapter"
