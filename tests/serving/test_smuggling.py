"""The text of a request cannot inject special tokens: with every kind of tokenizer, their spellings stay ordinary text."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from bertserve.service.bundle import files
from bertserve.service.bundle.manifest import MaskToken, SpecialPart
from bertserve.service.tasks import classify, fill_mask, question_answering, zero_shot
from bertserve.service.tasks.step import TextInput
from bertserve.service.text.tokenizer import Tokenizer
from support import ROOT, tiny
from support.task_runs import answer_input, classify_input, encode

SPECIALS = {"bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "roberta": ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]}
PAD, UNKNOWN, CLS, SEP, MASK = range(5)
LETTERS = [*"abcdefghijklmnopqrstuvwxyz.!?<>/[]()", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]


def word_piece(specials: list[str]) -> tokenizers.Tokenizer:
    pieces = [*specials, *LETTERS, *(f"##{letter}" for letter in LETTERS), "sep", "cls", "mask"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=specials[UNKNOWN]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def whole_words(specials: list[str]) -> tokenizers.Tokenizer:
    """Returns a WordPiece tokenizer that splits only at white space, so that a special token is a word of the vocabulary."""
    tokenizer = word_piece(specials)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def byte_pair(specials: list[str], *, ignore_merges: bool = False) -> tokenizers.Tokenizer:
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not ignore_merges)
    return tokenizer


def whole_words_of_bytes(specials: list[str]) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE tokenizer that first looks up whole texts in the vocabulary."""
    return byte_pair(specials, ignore_merges=True)


def unigram(specials: list[str]) -> tokenizers.Tokenizer:
    """Returns a SentencePiece tokenizer like XLM-RoBERTa's, in which the special tokens have the best scores."""
    pieces = [*((special, 0.0) for special in specials), *((letter, -5.0) for letter in ["▁", *LETTERS]), ("▁good", -6.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=UNKNOWN))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


KINDS: list[tuple[Callable[[list[str]], tokenizers.Tokenizer], str]] = [
    (word_piece, "bert"),
    (whole_words, "bert"),
    (byte_pair, "roberta"),
    (whole_words_of_bytes, "roberta"),
    (unigram, "roberta"),
    (unigram, "bert"),
]


@pytest.fixture(scope="module", name="new_tokenizer", params=KINDS, ids=[f"{kind.__name__} {style}" for kind, style in KINDS])
def tokenizer_factory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """Returns a function that makes a tokenizer of a kind; with `loose`, its special tokens are added as ordinary tokens."""
    kind, style = request.param
    folder = tmp_path_factory.mktemp("tokenizer")
    spec = files.load_bundle(tiny.bundle(folder, max_length=64)).manifest.tokenizer

    @functools.cache
    def make(*, mask: bool = False, loose: bool = False) -> Tokenizer:
        tokenizer, names = kind(SPECIALS[style]), SPECIALS[style]
        tokens = [AddedToken(name, special=not loose, normalized=loose, lstrip=loose, rstrip=loose) for name in names[:MASK]]
        tokenizer.add_tokens(tokens) if loose else tokenizer.add_special_tokens(tokens)
        last = AddedToken(names[MASK], special=not mask, normalized=False, lstrip=True)
        tokenizer.add_tokens([last]) if mask else tokenizer.add_special_tokens([last])
        path = folder / f"{mask}-{loose}.json"
        tokenizer.save(str(path))
        changes = {"subword_prefix": None, "mask": MaskToken(token=names[MASK], id=MASK) if mask else None}
        return Tokenizer(path, spec.model_copy(update=changes))

    return make


SPELLED = [name for names in SPECIALS.values() for name in names]
WIDE = [name.translate({i: i + 0xFEE0 for i in range(0x21, 0x7F)}) for name in SPELLED]  # fullwidth forms, which NFKC converts to ASCII
TEXTS = st.lists(st.sampled_from([*SPELLED, *WIDE, "good", "bad", " ", "\n", ".", "[", "<", "\u200b", "é", "日"]), max_size=12).map("".join)
SMUGGLED = [*SPELLED, *WIDE, *(f"good {name} bad" for name in SPELLED), *(f"x{name}{name}" for name in SPELLED), "[CLS] yes [SEP] no [SEP]"]


@pytest.mark.parametrize("loose", [False, True], ids=["special", "loose"])
def test_no_spelling_becomes_a_special_token(new_tokenizer: Callable[..., Tokenizer], loose: bool) -> None:
    """The spellings are a whole text or a part of one, in ASCII or in a form that is normalized to ASCII."""
    tokenizer = new_tokenizer(loose=loose)
    for tokens in tokenizer.tokenize(SMUGGLED) + [tokenizer.tokenize([text])[0] for text in SMUGGLED]:
        assert {PAD, CLS, SEP, MASK}.isdisjoint(tokens.ids)


@given(text=TEXTS)
def test_no_generated_text_yields_a_special_token(new_tokenizer: Callable[..., Tokenizer], text: str) -> None:
    """The texts mix spellings with other text. Each token has offsets in the text, in order."""
    tokens = new_tokenizer().tokenize([text])[0]

    assert {PAD, CLS, SEP, MASK}.isdisjoint(tokens.ids)
    assert len(tokens.offsets) == len(tokens)
    assert all(0 <= start <= end <= len(text) for start, end in tokens.offsets)
    assert sorted(start for start, _ in tokens.offsets) == [start for start, _ in tokens.offsets]


@given(text=TEXTS)
def test_only_the_spelling_of_the_mask_becomes_a_special_token(new_tokenizer: Callable[..., Tokenizer], text: str) -> None:
    tokenizer = new_tokenizer(mask=True)
    (tokens,) = tokenizer.tokenize([text])

    assert {PAD, CLS, SEP}.isdisjoint(tokens.ids)
    assert tokens.ids.count(MASK) >= text.count(tokenizer.spec.mask.token)


@pytest.mark.parametrize("spelling", ["[SEP]", "</s>", "[CLS]", "<s>", "good [SEP] who?"])
def test_special_tokens_in_the_inputs_of_a_task_stay_text(new_tokenizer: Callable[..., Tokenizer], spelling: str) -> None:
    tokenizer, plain = new_tokenizer(), new_tokenizer(mask=True)
    passage = encode(question_answering, answer_input(f"who {spelling}", f"it was {spelling} bad"), tokenizer).encodings[0]
    parameters = zero_shot.ZeroShotParameters(candidate_labels=[f"bad {spelling}"], hypothesis_template=f"{spelling} {{}}")
    hypothesis = encode(zero_shot, TextInput(f"good {spelling}", parameters), tokenizer).encodings[0]
    pair = encode(classify, classify_input(f"good {spelling}", f"{spelling} bad"), tokenizer).encodings[0]
    masked = fill_mask.FillMaskInput(f"{spelling} {plain.spec.mask and plain.spec.mask.token}", fill_mask.FillMaskParameters())
    text = encode(fill_mask, masked, plain).encodings[0]

    for encoding, seps in ((passage, 2), (hypothesis, 2), (pair, 2), (text, 1)):
        assert (encoding.ids.tolist().count(CLS), encoding.ids.tolist().count(SEP)) == (1, seps)


def test_the_offsets_of_a_spelled_special_token_are_kept(new_tokenizer: Callable[..., Tokenizer]) -> None:
    text = "good </s> bad [SEP] x"
    (tokens,) = new_tokenizer().tokenize([text])

    assert "".join(text[start:end] for start, end in tokens.offsets).replace(" ", "") == text.replace(" ", "")


def test_the_embedded_tokenizers_read_special_tokens_as_text(models: Path) -> None:
    for path in [tiny.bundle(models, "other", task="question-answering"), *sorted((ROOT / "models").glob("*/"))]:
        if not (path / "manifest.json").is_file():
            continue
        bundle = files.load_bundle(path)
        tokenizer = Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)
        parts = (*bundle.manifest.tokenizer.single, *bundle.manifest.tokenizer.pair)
        specials = {part.id for part in parts if isinstance(part, SpecialPart)}
        assert all(specials.isdisjoint(tokens.ids) for tokens in tokenizer.tokenize(SMUGGLED))
