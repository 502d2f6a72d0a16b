"""Loads a checkpoint's fast tokenizer, and reads the facts that `tokenizer.json` lacks."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
import transformers
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer, Lowercase, Sequence
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from bertserve.export.checkpoint.padding import Padding
from bertserve.export.checkpoint.source import read_with_transformers
from bertserve.export.checkpoint.token_types import Template
from bertserve.export.checkpoint.vocabulary_files import describe_missing_vocabulary, replace_backend, use_vocabulary_files
from bertserve.export.errors import ExportError, warn
from bertserve.export.tasks.sample_texts import NAMES_TEXT, SAMPLE_TEXTS
from bertserve.service.bundle.files import TOKENIZER_FILE
from bertserve.service.bundle.manifest import AddedToken, SpecialPart, TemplatePart, TextPart, TokenizerSpec

# the last text shows the most common differences between normalizers and between pre-tokenizers
_COMPARED_TEXTS = [*SAMPLE_TEXTS, ("a", "b"), NAMES_TEXT, "ﬁne Ⅷ ２０ ÀÉ don't well-known  SOME_word\n中文 😴"]

_TEMPLATE_SETTINGS = {"add_bos_token", "add_eos_token", "src_lang"}  # in tokenizer_config.json


def load_tokenizer(source: str, folder: Path, *, lowercase: bool = False) -> Any:
    """Returns the fast tokenizer, which makes texts lowercase first on request; refuses one that is not supported."""
    has_file = (folder / TOKENIZER_FILE).is_file()
    try:
        tokenizer = _read(source, folder)
    except ExportError as error:
        if has_file and isinstance(error.__cause__, ImportError):
            raise ExportError(_needs_code(source)) from error
        if has_file:
            # classes convert the vocabulary of a file before they read it, and fail if its model is of another type than theirs
            with mock.patch.object(transformers.TokenizersBackend, "convert_to_native_format", lambda **settings: settings):
                tokenizer = _read(source, folder)
        elif isinstance(error.__cause__, json.JSONDecodeError) or "auto_map" in str(error):
            raise
        else:
            # the reasons of transformers mislead: a SentencePiece model that it cannot read is a file of tiktoken for it, for example
            raise ExportError(
                describe_missing_vocabulary(source, "its other files are missing, damaged, or not supported for its class")
            ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ExportError(f"`{source}` has no fast tokenizer (`tokenizer.json`); save one with `save_pretrained` and export again.")
    if tokenizer.split_special_tokens:
        raise ExportError(f"the tokenizer of `{source}` sets `split_special_tokens`; remove it from tokenizer_config.json.")
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        # without a file, transformers 5 creates a tokenizer with only special tokens
        raise ExportError(f"`{source}` has no tokenizer: neither `tokenizer.json` nor a vocabulary; save one with `save_pretrained`.")
    if has_file:
        _use_file(source, tokenizer, folder)
    else:
        use_vocabulary_files(source, tokenizer, folder)
    if lowercase:
        backend = tokenizer.backend_tokenizer
        backend.normalizer = Sequence([Lowercase(), *([] if backend.normalizer is None else [backend.normalizer])])
    return tokenizer


def _read(source: str, folder: Path) -> Any:
    return read_with_transformers(f"the tokenizer of `{source}`", AutoTokenizer.from_pretrained, folder)


def _needs_code(source: str) -> str:
    return (
        f"the class of the tokenizer of `{source}` splits texts with Python code, as RoFormer's does; if the model was trained without it, "
        "set `tokenizer_class` in tokenizer_config.json to `PreTrainedTokenizerFast`."
    )


def _use_file(source: str, tokenizer: Any, folder: Path) -> None:
    """Gives a tokenizer the parts and the vocabulary in its `tokenizer.json`, with which the model was trained.

    Most tokenizer classes of transformers 5 replace some by their own. DeBERTa v2's, for example, drops SentencePiece's normalization,
    RemBERT's shifts all ids, and DeBERTa's has a second [SEP] between the texts of a pair. As in transformers 4, `do_lower_case`,
    `add_prefix_space`, `add_bos_token` and similar settings in `tokenizer_config.json` have priority.
    """
    file_backend = read_with_transformers(
        f"the tokenizer of `{source}`", lambda path, **_: tokenizers.Tokenizer.from_file(str(path / TOKENIZER_FILE)), folder
    )
    class_backend, normalizer = tokenizer.backend_tokenizer, file_backend.normalizer
    try:
        class_backend.to_str()
    except Exception as error:  # `tokenizers` raises this if a step is Python code
        raise ExportError(_needs_code(source)) from error
    for backend in (class_backend, file_backend):
        backend.no_truncation()
        backend.no_padding()
    if isinstance(normalizer, BertNormalizer) and tokenizer.model is WordPiece:  # other classes ignore these settings
        normalizer.lowercase, normalizer.strip_accents = tokenizer.do_lower_case, tokenizer.init_kwargs.get("strip_accents")
        normalizer.handle_chinese_chars = tokenizer.init_kwargs.get("tokenize_chinese_chars", True)
    if isinstance(file_backend.pre_tokenizer, ByteLevel) and "add_prefix_space" in tokenizer.init_kwargs:
        file_backend.pre_tokenizer.add_prefix_space = bool(tokenizer.add_prefix_space)
    if _TEMPLATE_SETTINGS & tokenizer.init_kwargs.keys():
        file_backend.post_processor = class_backend.post_processor
    configured_tokens = [token for _, token in sorted(tokenizer.init_kwargs["added_tokens_decoder"].items())]
    known_contents = {token.content for token in (*file_backend.get_added_tokens_decoder().values(), *configured_tokens)}
    named_tokens = [token for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.content not in known_contents]
    file_backend.add_tokens([*configured_tokens, *named_tokens])
    by_class, by_file = (
        [(encoding.ids, encoding.type_ids) for encoding in _encode(source, backend.encode_batch, _COMPARED_TEXTS)]
        for backend in (class_backend, file_backend)
    )
    if by_class != by_file:
        warn(
            f"{type(tokenizer).__name__} of transformers {transformers.__version__} tokenizes some texts differently from the "
            f"`{TOKENIZER_FILE}` of `{source}`; the bundle uses the file."
        )
    replace_backend(tokenizer, file_backend)


def make_tokenizer_spec(tokenizer: Any, single: Template, pair: Template | None, padding: Padding, **fields: Any) -> TokenizerSpec:
    """Returns the manifest's entry for a tokenizer, without the digest of its file; `fields` are further fields of the entry."""
    (pad_id, padding_side), templates = padding, (single, pair or single)
    return TokenizerSpec(
        sha256="",
        pad_id=pad_id,
        padding_side=padding_side,
        single=single,
        pair=pair,
        cls_index=next((i for i in (0, -1) if all(getattr(parts[i], "id", None) == tokenizer.cls_token_id for parts in templates)), None),
        # the prefix of a token that continues a word; None if words begin after white space instead
        subword_prefix=json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("continuing_subword_prefix") or None,
        added_tokens=_read_added_tokens(tokenizer, (*single, *(pair or ())), pad_id),
        truncation_side=tokenizer.truncation_side,
        **fields,
    )


def _read_added_tokens(tokenizer: Any, parts: Iterable[TemplatePart], pad_id: int) -> tuple[AddedToken, ...]:
    """Returns the added tokens that a text can contain: all except template tokens, padding, the unknown token and the mask."""
    inert_ids = {part.id for part in parts if isinstance(part, SpecialPart)}
    inert_ids |= {pad_id, tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id}
    return tuple(
        AddedToken(token=token.content, id=id_, special=token.special)
        for id_, token in sorted(tokenizer.added_tokens_decoder.items())
        if id_ not in inert_ids
    )


def tokenizer_json(tokenizer: Any, spec: TokenizerSpec) -> str:
    """Returns `tokenizer.json` without the truncation and padding settings of its training.

    The service reads special tokens in a text as ordinary text. Therefore the tokens that a text can contain are marked as not special:
    the added ones, and for fill-mask the mask.
    """
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    added_ids = {token.id for token in spec.added_tokens}
    for token in document["added_tokens"]:
        if token["id"] in added_ids:
            token["special"] = False
        if spec.mask is not None and token["id"] == spec.mask.id:
            token["special"] = token["normalized"] = False
    return json.dumps(document | {"truncation": None, "padding": None}, ensure_ascii=False)


def vocabulary_size(tokenizer: Any) -> int:
    """Returns the number of embedding rows that its ids need."""
    ids: dict[str, int] = tokenizer.get_vocab()
    return max(len(tokenizer), *(id_ + 1 for id_ in ids.values()))


def read_templates(source: str, tokenizer: Any, *, second_text_first: bool = False) -> tuple[Template, Template]:
    """Reads the special-token templates of one text and of a pair from encodings of short texts, for any post-processor."""
    single, pair = (_encode(source, tokenizer, *texts, return_special_tokens_mask=True)[0] for texts in ("a", "ab"))
    _encode(source, tokenizer, _COMPARED_TEXTS[-1])  # without a token for unknown words, a vocabulary fails on it
    return _read_template(single, "a"), _read_template(pair, "ba" if second_text_first else "ab")


def _encode(source: str, encode: Callable[..., Any], *texts: Any, **options: Any) -> Any:
    """Calls a function that encodes texts, and translates its errors."""
    try:
        return encode(*texts, **options)
    except Exception as error:  # `tokenizers` raises a plain Exception for every failure
        raise ExportError(f"the tokenizer of `{source}` cannot encode texts: {error}; save a complete one and export again.") from error


def _read_template(encoding: Any, texts: str) -> Template:
    """Returns the template of an encoding; `texts` lists the names of its texts."""
    parts: list[TemplatePart] = []
    for token, id_, type_id, sequence, special in zip(
        encoding.tokens, encoding.ids, encoding.type_ids, encoding.sequence_ids, encoding.special_tokens_mask, strict=True
    ):
        if special:
            parts.append(SpecialPart(special=token, id=id_, type_id=type_id))
            continue
        part = TextPart(text="a" if texts[sequence] == "a" else "b", type_id=type_id)
        if not parts or parts[-1] != part:
            parts.append(part)
    return tuple(parts)
