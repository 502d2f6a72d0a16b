"""Creates the golden ids of tokenizers in files without `tokenizer.json`, with the classes of transformers 4.

    python tests/golden/make_tokenizers.py

Writes `tokenizers.json`:

- `files`: tiny vocabularies and SentencePiece models by name; a model is Base64. Its normalizer is a small part of NFKC.
- `texts`: `{mask}` is the tokenizer's mask, if any;
- `cases`: the `model_type` in config.json, the other files of the folder (a name of `files`, or JSON), the `mask`, the ids of each
  text, and the ids and types of the pair of the first two texts.

Needs the packages of `tokenizers.requirements.txt`.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import AutoTokenizer

GOLDEN = Path(__file__).with_name("tokenizers.json")
TEXTS = [
    "a dull film and a long plot",
    "A Dull Film...",
    "A\u00a0dull film\u2026",
    "ﬁne Ⅷ ２０ ÀÉ don't well-known  SOME_word\n中文",
    " naïve ÇA  cafe\u0301 ",
    "``one'' 9, \t東京 ABC한국 😀 (x) <extra_id_0>",
    "the {mask} of",
    "of{mask}  and {mask}.",
]
CORPUS = [
    "a dull film and a long plot",
    "the plot was dull, the film was long...",
    "A Dull Film don't well-known SOME_word 20 9,",
    "fine naive ca cafe one ABC of (x) VIII",
    "中文 東京 naïve café ÀÉ",
]
RULES = {"\u00a0": " ", "\t": " ", "\n": " ", "…": "...", "ﬁ": "fi", "Ⅷ": "VIII", "２": "2", "０": "0", "e\u0301": "é"}
LETTERS = "abcdefghijklmnopqrstuvwxyzABDFMEOSWC0123456789.,'`\"-_()<>/àéïç中文東京한국"
WORDS = ["a", "dull", "film", "the", "plot", "was", "long", "of", "and", "Dull", "naive", "ca", "cafe", "café", "one", "Film", "東", "京"]


def word_pieces(specials: list[str]) -> str:
    return "\n".join([*specials, *WORDS, *(c for c in LETTERS if c not in WORDS), *(f"##{c}" for c in LETTERS), "##ong"]) + "\n"


def byte_pairs(specials: list[str], *last: str, space: str = "Ġ", end: str = "") -> dict[str, str]:
    """Returns the vocabulary and the merges of BPE; GPT's and HerBERT's mark the end of a word in place of its start."""
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    letters = list(LETTERS) if end else sorted(bytes_to_unicode().values())
    merges = ["Ġ o", "Ġo f", "Ġ a", "l l", "u ll", "Ġ d", "Ġd ull"] if space else ["l l</w>", "u ll</w>", "o f</w>", "d ull</w>"]
    tokens = [*specials, *letters, *(f"{c}{end}" for c in letters if end), *("".join(merge.split()) for merge in merges), *last]
    return {
        "vocab": json.dumps({token: id_ for id_, token in enumerate(dict.fromkeys(tokens))}),
        "merges": "\n".join(["#version: 0.2", *merges]) + "\n",
    }


def sentence_pieces(kind: str = "unigram", **options: Any) -> str:
    """Trains a SentencePiece model."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # the model contains the path
        Path("rules.tsv").write_text("".join(f"{_hex(a)}\t{_hex(b)}\n" for a, b in RULES.items()))
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 20), model_writer=model, model_type=kind, vocab_size=110, hard_vocab_limit=False,
            normalization_rule_tsv="rules.tsv", character_coverage=1.0, minloglevel=2, **options,
        )  # fmt: skip
    return base64.b64encode(model.getvalue()).decode()


def _hex(text: str) -> str:
    return " ".join(f"{ord(character):04X}" for character in text)


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
FAIRSEQ = {"unk_id": 0, "bos_id": 1, "eos_id": 2}
DEBERTA = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}  # fmt: skip


def make_files() -> dict[str, str]:
    files = {"bert.txt": word_pieces(BERT), "mpnet.txt": word_pieces(["<s>", "<pad>", "</s>", "[UNK]", "<mask>"])}
    for name, pairs in {
        "roberta": byte_pairs(ROBERTA[:4], "<mask>"),
        "deberta": byte_pairs(["[CLS]", "[PAD]", "[SEP]", "[UNK]"], "[MASK]"),
        "gpt2": byte_pairs([], "<|endoftext|>"),
        "openai-gpt": byte_pairs(["<unk>"], space="", end="</w>"),
        "herbert": byte_pairs(ROBERTA, space="", end="</w>"),
    }.items():
        files |= {f"{name}.json": pairs["vocab"], f"{name}.merges": pairs["merges"]}
    albert = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]}
    xlnet = {**FAIRSEQ, "control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]}
    return files | {
        "albert.model": sentence_pieces(**albert),
        "xlnet.model": sentence_pieces(**xlnet),
        "fairseq.model": sentence_pieces(**FAIRSEQ),
        "fairseq.bpe.model": sentence_pieces("bpe", **FAIRSEQ),
        "deberta.model": sentence_pieces(**DEBERTA),
        "rembert.model": sentence_pieces(**DEBERTA | {"unk_piece": "<unk>", "pad_piece": "<pad>"}, user_defined_symbols=["[MASK]"]),
        "bigbird.model": sentence_pieces("bpe", pad_id=0, eos_id=1, bos_id=2, unk_id=3, user_defined_symbols=["[CLS]", "[SEP]", "[MASK]"]),
        "t5.model": sentence_pieces(pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
    }


Case = tuple[str, dict[str, Any]]


def cases(types: str, files: dict[str, str], *configs: dict[str, Any] | None, **more: Any) -> Iterator[Case]:
    """Yields a case for each model type and each `tokenizer_config.json`."""
    for model_type in types.split():
        for config in configs or (None,):
            written = {} if config is None else {"tokenizer_config.json": config}
            yield model_type, files | written | more


def token(content: str, **properties: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False} | properties


def word_piece_cases() -> Iterator[Case]:
    bert, cased = {"vocab.txt": "bert.txt"}, {"do_lower_case": False}
    yield from cases("bert distilbert electra ernie mobilebert convbert megatron-bert squeezebert layoutlm", bert)
    yield from cases("bert", bert, cased, {"do_lower_case": True, "strip_accents": False}, cased | {"strip_accents": True})
    yield from cases("bert", bert, {"tokenize_chinese_chars": False}, {"do_basic_tokenize": False})
    mask = {"__type": "AddedToken"} | token("[MASK]", lstrip=True)
    yield from cases("bert", bert, {"additional_special_tokens": ["<new>"], "mask_token": mask})
    tokens = {"unk_token": "[UNK]", "mask_token": "[MASK]"}
    yield from cases("bert", bert, **{"added_tokens.json": {"of{": 115}, "special_tokens_map.json": tokens})
    for name in ("Bert", "ConvBert", "DistilBert", "Electra", "LayoutLM", "MobileBert", "SqueezeBert"):
        yield from cases("bert", bert, cased | {"tokenizer_class": f"{name}Tokenizer"}, {"tokenizer_class": f"{name}TokenizerFast"})
    yield from cases("roberta", bert, {"tokenizer_class": "BertTokenizer"})
    yield from cases("mpnet", {"vocab.txt": "mpnet.txt"}, None, cased | {"strip_accents": True})


def byte_pair_cases() -> Iterator[Case]:
    roberta, gpt2, deberta, gpt, herbert = (
        {"vocab.json": f"{name}.json", "merges.txt": f"{name}.merges"} for name in ("roberta", "gpt2", "deberta", "openai-gpt", "herbert")
    )
    space = {"add_prefix_space": True}
    types = "roberta bart longformer data2vec-text ibert roberta-prelayernorm led mvp"
    yield from cases(f"{types} blenderbot", roberta)
    yield from cases(f"{types} luke camembert", roberta, {"tokenizer_class": "RobertaTokenizer"})
    mask = {"__type": "AddedToken"} | token("<mask>", rstrip=True)
    yield from cases("roberta", roberta, space, {"trim_offsets": False}, {"mask_token": mask})
    for value in ("<mask>", token("<mask>"), token("<mask>", lstrip=True)):
        yield from cases("roberta", roberta, **{"special_tokens_map.json": {"mask_token": value}})
    for name in ("Bart", "LED", "Longformer", "Mvp", "Roberta"):
        yield from cases("roberta", roberta, {"tokenizer_class": f"{name}Tokenizer"}, {"tokenizer_class": f"{name}TokenizerFast"})
    yield from cases("luke", roberta, **{"entity_vocab.json": {"[MASK]": 0, "[UNK]": 1, "[PAD]": 2, "[MASK2]": 3}})
    yield from cases("deberta", deberta, None, space)
    yield from cases("gpt2 gpt_neo gptj codegen phi opt", gpt2, None, space)
    yield from cases("gpt2 opt", gpt2, {"add_bos_token": True}, {"add_bos_token": True, "bos_token": "a"})
    yield from cases("qwen2 qwen3", gpt2)
    yield from cases("openai-gpt", gpt)
    yield from cases("bert", herbert, {"tokenizer_class": "HerbertTokenizer"}, {"tokenizer_class": "HerbertTokenizerFast"})


def sentence_piece_cases() -> Iterator[Case]:
    albert, xlnet, t5 = ({"spiece.model": f"{name}.model"} for name in ("albert", "xlnet", "t5"))
    accents = [None, {"do_lower_case": False}, {"do_lower_case": True, "keep_accents": True}, {"keep_accents": True}]
    yield from cases("albert", albert, *accents, {"remove_space": False}, {"tokenizer_class": "AlbertTokenizer"})
    yield from cases("yoso nystromformer fnet", albert)
    yield from cases("xlnet", xlnet, *accents, {"do_lower_case": True, "keep_accents": False})
    fairseq = {"sentencepiece.bpe.model": "fairseq.model"}
    yield from cases("camembert xlm-roberta mbart xmod", fairseq)
    yield from cases("xlm-roberta mbart", {"sentencepiece.bpe.model": "fairseq.bpe.model"})
    for model_type, name in [("camembert", "Camembert"), ("xlm-roberta", "XLMRoberta"), ("mbart", "MBart")]:
        yield from cases(model_type, fairseq, {"tokenizer_class": f"{name}TokenizerFast"}, {"add_prefix_space": False})
    tokens = {"cls_token": "<s>", "additional_special_tokens": ["<b>", "film"]}
    more = {"special_tokens_map.json": tokens, "added_tokens.json": {"<x>": 111}}
    yield from cases("xlm-roberta", fairseq, None, {"mask_token": "a", "additional_special_tokens": ["<new>", "of"]}, **more)
    yield from cases("bert xlm-roberta-xl", fairseq, {"tokenizer_class": "XLMRobertaTokenizer"})
    yield from cases(
        "mbart", fairseq, {"src_lang": "fr_XX"}, {"tokenizer_class": "BarthezTokenizer"}, {"tokenizer_class": "MBart50Tokenizer"}
    )
    deberta = {"spm.model": "deberta.model"}
    yield from cases("deberta-v2", deberta, None, {"do_lower_case": True}, {"split_by_punct": True}, {"vocab_type": "spm"})
    yield from cases("deberta-v2", deberta, **{"added_tokens.json": {"[MASK]": 110}})
    yield from cases("rembert", {"sentencepiece.model": "rembert.model"}, *accents)
    yield from cases("big_bird", {"spiece.model": "bigbird.model"})
    yield from cases("t5 mt5 umt5 pegasus reformer", t5)
    yield from cases("llama mistral", {"tokenizer.model": "fairseq.bpe.model"}, {"tokenizer_class": "LlamaTokenizer"})


def write_folder(folder: Path, files: dict[str, str], model_type: str, names: dict[str, Any]) -> None:
    """Writes the tokenizer's files of a case."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in names.items():
        if isinstance(content, dict):
            (folder / name).write_text(json.dumps(content))
        elif content.endswith(".model"):
            (folder / name).write_bytes(base64.b64decode(files[content]))
        else:
            (folder / name).write_text(files[content], encoding="utf-8")


def main() -> None:
    files, lines = make_files(), []
    for model_type, names in (*word_piece_cases(), *byte_pair_cases(), *sentence_piece_cases()):
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), files, model_type, names)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = [text.format(mask=tokenizer.mask_token or "") for text in TEXTS]
        pair = tokenizer(texts[0], texts[1], return_token_type_ids=True)
        lines.append({
            "model_type": model_type, "files": names, "mask": tokenizer.mask_token,
            "ids": tokenizer(texts)["input_ids"], "pair": [pair["input_ids"], pair["token_type_ids"]],
        })  # fmt: skip
    document = {"files": files, "texts": TEXTS}
    cases = ",\n".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines)
    GOLDEN.write_text(json.dumps(document, ensure_ascii=False, indent=0)[:-2] + f',\n"cases": [\n{cases}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
