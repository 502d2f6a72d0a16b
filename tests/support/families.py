"""Tiny random checkpoints of every encoder family, each with a fast tokenizer of the family's type."""

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import normalizers, pre_tokenizers, trainers
from transformers.models.auto import modeling_auto

from bertserve.export.int8_texts import BUILT_IN_TEXTS
from support import tiny
from support.checkpoints import SIZES, naming, save_random

LENGTH = 144  # usable tokens; enough for a window with any question of the parity samples
PIECES = 1100  # the int8 stage quantizes only embeddings with at least 1024 rows
HEADS: dict[str, tuple[dict[str, str], type]] = {
    "text-classification": (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, transformers.AutoModelForSequenceClassification),
    "token-classification": (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, transformers.AutoModelForTokenClassification),
    "question-answering": (modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES, transformers.AutoModelForQuestionAnswering),
    "fill-mask": (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
    "multiple-choice": (modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES, transformers.AutoModelForMultipleChoice),
}
PRETRAINING: dict[str, tuple[dict[str, str], type]] = {
    # pretraining heads, which few families have
    "next-sentence": (modeling_auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES, transformers.AutoModelForNextSentencePrediction),
    "sentence-order": ({"albert": "AlbertForPreTraining"}, transformers.AutoModelForPreTraining),
    "replaced-tokens": ({"electra": "ElectraForPreTraining"}, transformers.AutoModelForPreTraining),
}
ALL_HEADS = HEADS | PRETRAINING
LABELS = {
    "text-classification": tiny.LABELS,
    "token-classification": ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"),
    "question-answering": ("LABEL_0", "LABEL_1"),
    "fill-mask": tiny.LABELS,
    "multiple-choice": ("LABEL_0",),
    **dict.fromkeys(PRETRAINING, ("LABEL_0", "LABEL_1")),
}
# A random model's single logit hardly differs between texts. Larger word embeddings make these differences larger than rounding.
WORD_SCALES = {"multiple-choice": 4}


@dataclass(frozen=True)
class Family:
    """Describes how a family's checkpoints are created.

    Attributes:
        config: Class of the configuration.
        tokenizer: Function that creates the tokenizer.
        fields: Configuration fields with an unusual size or name; None removes a usual field that the family does not have.
        offset: Number of rows of the position table that texts do not use.
        word_scale: Factor of the word embeddings, for families whose random vectors would hardly differ between texts.
    """

    config: type
    tokenizer: Callable[[], Any]
    fields: dict[str, Any] = field(default_factory=dict)
    offset: int = 0
    word_scale: float = 1

    def architecture(self, task: str) -> str | None:
        """Returns the name of the transformers class with a task's head, or None."""
        return ALL_HEADS[task][0].get(self.config.model_type)

    def save(self, path: Path, task: str, **fields: Any) -> Path:
        """Writes a random checkpoint with a task's head and returns its path."""
        tokenizer = self.tokenizer()
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "cls", "sep")}
        sizes = {"max_position_embeddings": LENGTH + self.offset, **SIZES, **naming(LABELS[task]), **ids}
        values = {**sizes, "vocab_size": len(tokenizer), **self.fields, **fields}
        config = self.config(**{name: value for name, value in values.items() if value is not None or name in ids})
        word_scale = max(self.word_scale, WORD_SCALES.get(task, 1))
        deviation = 0.2 * (32 / config.hidden_size) ** 0.5
        save_random(path, str(self.architecture(task)), config, initializer_range=deviation, word_scale=word_scale)
        tokenizer.save_pretrained(path)
        return path


@functools.cache
def _texts() -> list[str]:
    return BUILT_IN_TEXTS.read_text(encoding="utf-8").splitlines()


def _parts(words: Iterable[str], *, inner: str = "") -> Counter[str]:
    """Returns the best pieces of the words and their counts: first all characters, then the others by length times count.

    The library's WordPiece and unigram trainers are not used because their vocabularies, and so all measurements, differ between processes.

    Args:
        words: The words.
        inner: Prefix of a piece that does not begin a word.
    """
    counts: Counter[str] = Counter()
    for word, times in Counter(words).items():
        for start, end in itertools.combinations(range(len(word) + 1), 2):
            counts[(inner if start else "") + word[start:end]] += times
    best = sorted(counts, key=lambda piece: (len(piece.removeprefix(inner)) > 1, -counts[piece] * len(piece), piece))
    return Counter({piece: counts[piece] for piece in best[:PIECES]})


@functools.cache
def _word_pieces() -> tuple[str, ...]:
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = [word for text in _texts() for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))]
    return tuple(_parts(words, inner="##"))


@functools.cache
def pairs(*, lower: bool = False) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Returns the pieces and merges of bytes, or of lowercase words, whose last letter then has the suffix `</w>`."""
    options: dict[str, Any] = {"end_of_word_suffix": "</w>"} if lower else {}
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(**options))
    if lower:
        trained.normalizer, trained.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    else:
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(_texts(), trainers.BpeTrainer(vocab_size=PIECES, show_progress=False, **options))
    model = json.loads(trained.to_str())["model"]
    return tuple(sorted(model["vocab"], key=model["vocab"].get)), [(a, b) for a, b in model["merges"]]


@functools.cache
def _unigrams() -> tuple[tuple[str, float], ...]:
    counts = _parts("\N{LOWER ONE EIGHTH BLOCK}" + word for text in _texts() for word in text.split())
    return tuple((piece, math.log(count / counts.total())) for piece, count in counts.items())


def word_piece(tokenizer_class: Any, specials: Sequence[str]) -> Any:
    return tokenizer_class(vocab={piece: i for i, piece in enumerate([*specials, *_word_pieces()])}, model_max_length=512)


def byte_pair(tokenizer_class: Any, specials: Sequence[str], last: Sequence[str] = ()) -> Any:
    """Returns a byte-level BPE tokenizer; `last` are special tokens with the highest ids."""
    pieces, merges = pairs()
    return tokenizer_class(vocab={piece: i for i, piece in enumerate([*specials, *pieces, *last])}, merges=merges, model_max_length=512)


def unigram(tokenizer_class: Any, specials: Sequence[str], last: Sequence[str] = (), **options: Any) -> Any:
    """Returns a SentencePiece unigram tokenizer; `last` are special tokens with the highest ids."""
    vocabulary = [*((token, 0.0) for token in specials), *_unigrams(), *((token, 0.0) for token in last)]
    return tokenizer_class(vocab=vocabulary, **{"model_max_length": 512, **options})


def bert_tokenizer() -> Any:
    return word_piece(transformers.BertTokenizer, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])


def distilbert_tokenizer() -> Any:
    tokenizer = bert_tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def roberta_tokenizer() -> Any:
    return byte_pair(transformers.RobertaTokenizer, ["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"])


def _generic(model: Any, single: str, pair: str, normalizer: Any = None, **options: Any) -> Any:
    """Returns a tokenizer in the library's generic class: BPE of bytes, or of words with a suffix, and templates of a text and a pair."""
    tokenizer = tokenizers.Tokenizer(model)
    suffix = model.end_of_word_suffix
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer() if suffix else pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.BPEDecoder(suffix=suffix) if suffix else tokenizers.decoders.ByteLevel()
    specials = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(single.split()) if token != "$A"]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"model_input_names": ["input_ids", "attention_mask"], "model_max_length": LENGTH, **options}
    )


def _bpe(specials: Sequence[str]) -> Any:
    """Returns a byte-level BPE model; the special tokens have the highest ids."""
    pieces, merges = pairs()
    return tokenizers.models.BPE(vocab={piece: i for i, piece in enumerate([*pieces, *specials])}, merges=merges)


def modernbert_tokenizer() -> Any:
    """Returns a byte-level BPE tokenizer with BERT's special tokens."""
    names = {name: f"[{name[:3].upper()}]" for name in ("unk_token", "cls_token", "sep_token", "pad_token")}
    mask = tokenizers.AddedToken("[MASK]", lstrip=True)
    model = _bpe([*names.values(), "[MASK]"])
    return _generic(model, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", normalizers.NFC(), **names, mask_token=mask)


def gpt_tokenizer() -> Any:
    """Returns GPT's tokenizer, which adds no special tokens to a text."""
    pieces, merges = pairs(lower=True)
    ids = {piece: i for i, piece in enumerate(["<unk>", *pieces])}
    return transformers.OpenAIGPTTokenizer(vocab=ids, merges=merges, pad_token="<unk>", padding_side="right", model_max_length=512)


def gpt2_tokenizer(pad: str | None = "<|endoftext|>") -> Any:
    """Returns GPT-2's tokenizer, which adds no special tokens to a text; the original has no padding token."""
    pieces, merges = pairs()
    ids = {piece: i for i, piece in enumerate([*pieces, "<|endoftext|>"])}
    return transformers.GPT2Tokenizer(vocab=ids, merges=merges, pad_token=pad, padding_side="right", model_max_length=512)


def llama_tokenizer() -> Any:
    """Returns a byte-level BPE tokenizer with Llama 3's special tokens, one before each text."""
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}
    begin = names["bos_token"]
    return _generic(_bpe([*names.values()]), f"{begin} $A", f"{begin} $A {begin} $B", padding_side="left", **names)


def xlm_tokenizer() -> Any:
    """Returns a fast equivalent of XLM's Python tokenizer: BPE, with `</s>` at both ends of a text."""
    specials = ["<s>", "</s>", "<pad>", "<unk>", "<special0>", "<special1>"]
    pieces, merges = pairs(lower=True)
    ids = {piece: i for i, piece in enumerate([*specials, *pieces])}
    model = tokenizers.models.BPE(vocab=ids, merges=merges, end_of_word_suffix="</w>", unk_token="<unk>")
    names = {"bos_token": "<s>", "cls_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    normalizer = normalizers.BertNormalizer(lowercase=True)
    return _generic(model, "</s> $A </s>", "</s> $A </s> $B </s>", normalizer, **names, mask_token="<special1>", model_max_length=512)


DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "max_relative_positions": -1}
DEBERTA_V2 = {**DEBERTA, "position_buckets": 32, "norm_rel_ebd": "layer_norm", "share_att_key": True}
DEBERTA_V2_SPECIALS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
BART_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}

FAMILIES: dict[str, Family] = {
    "BERT": Family(transformers.BertConfig, bert_tokenizer),
    "ERNIE": Family(transformers.ErnieConfig, bert_tokenizer, {"use_task_id": True}),
    "RoBERTa": Family(transformers.RobertaConfig, roberta_tokenizer, {"type_vocab_size": 1}, offset=2),
    "XLM-RoBERTa": Family(
        transformers.XLMRobertaConfig,
        lambda: unigram(transformers.XLMRobertaTokenizer, ["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"]),
        {"type_vocab_size": 1},
        offset=2,
    ),
    "CamemBERT": Family(
        transformers.CamembertConfig,
        lambda: unigram(
            transformers.CamembertTokenizer, ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"], ["<mask>"]
        ),
        {"type_vocab_size": 1},
        offset=2,
    ),
    "DistilBERT": Family(transformers.DistilBertConfig, distilbert_tokenizer, {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "ALBERT": Family(
        transformers.AlbertConfig,
        lambda: unigram(transformers.AlbertTokenizer, ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]),
        {"embedding_size": 16, "num_hidden_layers": 3},
    ),
    "ELECTRA": Family(transformers.ElectraConfig, bert_tokenizer, {"embedding_size": 16}),
    "DeBERTa": Family(
        transformers.DebertaConfig,
        lambda: byte_pair(transformers.DebertaTokenizer, ["[CLS]", "[PAD]", "[SEP]", "[UNK]"], ["[MASK]"]),
        {**DEBERTA, "type_vocab_size": 0},
    ),
    "DeBERTa v2": Family(
        transformers.DebertaV2Config,
        lambda: unigram(transformers.DebertaV2Tokenizer, DEBERTA_V2_SPECIALS, ["[MASK]"]),
        {**DEBERTA_V2, "type_vocab_size": 0, "conv_kernel_size": 3, "conv_act": "gelu"},
    ),
    "DeBERTa v3": Family(
        transformers.DebertaV2Config,
        lambda: unigram(transformers.DebertaV2Tokenizer, DEBERTA_V2_SPECIALS, ["[MASK]"]),
        {**DEBERTA_V2, "type_vocab_size": 0, "legacy": False},
    ),
    "MPNet": Family(
        transformers.MPNetConfig, lambda: word_piece(transformers.MPNetTokenizer, ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]), offset=2
    ),
    "ModernBERT": Family(
        transformers.ModernBertConfig,
        modernbert_tokenizer,
        {"num_hidden_layers": 3, "global_attn_every_n_layers": 3, "local_attention": 16},
    ),
    "XLNet": Family(
        transformers.XLNetConfig,
        lambda: unigram(
            transformers.XLNetTokenizer,
            ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"],
            padding_side="left",
            model_max_length=LENGTH,  # positions are relative, so only this limits the length
        ),
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "max_position_embeddings": None},
    ),
    "XLM": Family(
        transformers.XLMConfig, xlm_tokenizer, {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "pad_index": 2, "mask_index": 5}, word_scale=2
    ),
    "GPT": Family(transformers.OpenAIGPTConfig, gpt_tokenizer, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "GPT-2": Family(transformers.GPT2Config, gpt2_tokenizer, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64}),
    "LLaMA": Family(transformers.LlamaConfig, llama_tokenizer, {"num_key_value_heads": 2}),
    "BART": Family(
        transformers.BartConfig,
        lambda: byte_pair(transformers.BartTokenizer, ["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"]),
        {
            **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in BART_SIDE.items()},
            "d_model": 32,
            "forced_eos_token_id": 2,
            "decoder_start_token_id": 2,
        },
    ),
    "T5": Family(
        transformers.T5Config,
        lambda: unigram(transformers.T5Tokenizer, ["<pad>", "</s>", "<unk>"], extra_ids=0, model_max_length=LENGTH),
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "max_position_embeddings": None,
        },
    ),
}
CASES = [(name, task) for name, family in FAMILIES.items() for task in ALL_HEADS if family.architecture(task)]
# Cases of `make test`, with their tracers: each head once, in families that have little in common. `make test-all` has all cases.
SAMPLE = {
    ("XLNet", "text-classification", "torchscript"),
    ("GPT-2", "token-classification", "torchscript"),
    ("ModernBERT", "question-answering", "default"),
    ("MPNet", "fill-mask", "torchscript"),
    ("DeBERTa v3", "multiple-choice", "default"),
}
