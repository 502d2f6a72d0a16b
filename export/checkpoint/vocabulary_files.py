"""Builds the tokenizer of a checkpoint that has vocabulary files in place of `tokenizer.json`, as transformers 4 does.

Only versions before 5 save a checkpoint without that file. The classes of transformers 5 build other ones from these files: RoBERTa's
keeps the space before a mask, DeBERTa v2's loses the model's normalizer, and RemBERT's shifts all ids. The conversions of transformers 4
are still part of transformers 5, but the slow tokenizers that they read are not, so `_SlowTokenizer` takes their place.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS, RobertaConverter, SpmConverter, generate_merges

from bertserve.export.errors import ExportError
from bertserve.service.bundle.files import TOKENIZER_FILE

_CONVERTERS = SLOW_TO_FAST_CONVERTERS | {"LukeTokenizer": RobertaConverter}
# the supported classes; the golden ids cover each. Masks of the first ones include the space before them, as transformers 5 sets for few.
_MASK_WITH_SPACE = {"Albert", "Barthez", "BigBird", "Camembert", "Deberta", "Luke", "MBart50", "MBart", "MPNet", "RemBert", "Roberta"}
_MASK_WITH_SPACE |= {"XLMRoberta", "XLNet"}
_SUPPORTED = _MASK_WITH_SPACE | {"Bert", "ConvBert", "DebertaV2", "DistilBert", "GPT2", "Herbert", "OpenAIGPT", "Qwen2"}


def use_vocabulary_files(source: str, tokenizer: Any, folder: Path) -> None:
    """Gives a tokenizer the parts that transformers 4 builds from the vocabulary files in its folder."""
    if type(tokenizer).__name__.removesuffix("Tokenizer") not in _SUPPORTED:
        raise ExportError(describe_missing_vocabulary(source, f"{type(tokenizer).__name__} cannot be built from vocabulary files"))
    try:
        extra_tokens = (*_read_extra_tokens(folder), *tokenizer.extra_special_tokens)
        special_ids = None
        while special_ids != tokenizer.all_special_ids:  # a conversion can change the ids that its template needs
            special_ids = tokenizer.all_special_ids
            replace_backend(tokenizer, _convert(tokenizer, folder, extra_tokens))
    except Exception as error:  # conversions raise any error for files that they do not expect
        raise ExportError(describe_missing_vocabulary(source, f"its other files cannot be converted ({error})")) from error
    if hasattr(tokenizer, "set_src_lang_special_tokens"):
        tokenizer.set_src_lang_special_tokens(tokenizer.src_lang)


def replace_backend(tokenizer: Any, backend: Tokenizer) -> None:
    """Gives a tokenizer of transformers another normalizer, pre-tokenizer, vocabulary and post-processor, in place."""
    tokenizer.backend_tokenizer.__setstate__(backend.__getstate__())


def describe_missing_vocabulary(source: str, reason: str) -> str:
    """Returns the message for a checkpoint that needs a `tokenizer.json`."""
    return (
        f"`{source}` has no `{TOKENIZER_FILE}`, and {reason}; save one with the version of transformers that trained the model, by "
        "`AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`, and export again."
    )


def _convert(tokenizer: Any, folder: Path, extra_tokens: Iterable[str | AddedToken]) -> Tokenizer:
    converter = _CONVERTERS[type(tokenizer).__name__](_SlowTokenizer(tokenizer, folder))
    if isinstance(converter, SpmConverter):
        # transformers 5 changed the extraction of a model of type BPE
        ids = {piece.piece: id_ for id_, piece in enumerate(converter.proto.pieces)}
        converter.SpmExtractor = lambda _: SimpleNamespace(extract=lambda scores: (None, generate_merges(ids, scores)))
    backend: Tokenizer = converter.converted()
    for token in _tokens_to_add(tokenizer, backend, extra_tokens):
        backend.add_tokens([token])
    return backend


class _SlowTokenizer:
    """The attributes of a slow tokenizer of transformers 4 that conversions read.

    Its settings and special tokens come from a tokenizer of transformers 5.
    """

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self.vocab_file = str(folder / tokenizer.vocab_files_names["vocab_file"])
        self.basic_tokenizer = SimpleNamespace(**{"tokenize_chinese_chars": True, "strip_accents": None} | tokenizer.init_kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the tokenizer of transformers 5."""
        return getattr(self._tokenizer, name)

    @property
    def add_prefix_space(self) -> bool:
        """Whether the first word begins with a space, which SentencePiece's tokenizers do not let a configuration change."""
        return self.vocab_file.endswith(".model") or bool(self._tokenizer.add_prefix_space)

    @property
    def vocab(self) -> dict[str, int]:
        """The ids of the tokens in `vocab.txt`."""
        with open(self.vocab_file, encoding="utf-8") as lines:
            return {line.rstrip("\n"): number for number, line in enumerate(lines)}

    @property
    def encoder(self) -> dict[str, int]:
        """The ids of the tokens in `vocab.json`."""
        return json.loads(Path(self.vocab_file).read_text(encoding="utf-8"))

    @property
    def bpe_ranks(self) -> dict[tuple[str, ...], int]:
        """The ranks of the pairs in `merges.txt`, whose first line is its version."""
        lines = (self._folder / self._tokenizer.vocab_files_names["merges_file"]).read_text(encoding="utf-8").split("\n")
        return {tuple(line.split()): rank for rank, line in enumerate(lines[1:]) if line}


def _read_extra_tokens(folder: Path) -> Iterator[str | AddedToken]:
    """Yields the additional special tokens, which transformers 5 replaces by a SentencePiece model's."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = json.loads((folder / name).read_text(encoding="utf-8")) if (folder / name).is_file() else {}
        for token in settings.get("additional_special_tokens") or ():
            yield token if isinstance(token, str) else AddedToken(**{key: value for key, value in token.items() if key != "__type"})
        if "added_tokens_decoder" in settings:
            return


def _tokens_to_add(tokenizer: Any, backend: Tokenizer, extra_tokens: Iterable[str | AddedToken]) -> Iterator[AddedToken]:
    """Yields the tokens that transformers 4 adds to a converted tokenizer, in its order, which decides the ids of new ones."""
    yield from (token for _, token in sorted(tokenizer.init_kwargs["added_tokens_decoder"].items()))
    named = [(role, tokenizer.init_kwargs.get(role, token)) for role, token in tokenizer.special_tokens_map.items()]
    for role, token in (*named, *(("", token) for token in extra_tokens)):
        lstrip = role == "mask_token" and type(tokenizer).__name__.removesuffix("Tokenizer") in _MASK_WITH_SPACE
        is_known = str(token) in {added.content for added in backend.get_added_tokens_decoder().values()}
        # the properties of a named token have priority over a SentencePiece model's
        if not is_known or lstrip or (role and isinstance(token, AddedToken)):
            added = AddedToken(token, lstrip=lstrip) if isinstance(token, str) else token
            added.special = True
            yield added
