"""Checkpoints without `tokenizer.json`: texts get the ids of transformers 4, which wrote such checkpoints, or the export is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from bertserve.export.checkpoint.fast_tokenizer import load_tokenizer, tokenizer_json
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import ExportError
from golden.make_tokenizers import GOLDEN, write_folder
from support import raises_exactly

pytestmark = pytest.mark.torch

# model types whose classes transformers 5 lacks or changed in other ways; T5's classes of transformers 4 disagree on the first word
REFUSED = {"blenderbot", "fnet", "llama", "mistral", "mt5", "nystromformer", "pegasus", "reformer", "t5", "umt5", "xlm-roberta-xl"}


def refusal(folder: Path) -> str:
    with raises_exactly(ExportError, match=r"no `tokenizer\.json`.*save_pretrained") as caught:
        load_tokenizer("x", folder)
    return str(caught.value)


def name_of(case: dict[str, Any]) -> str:
    settings = [f"{key}={value}" for file in case["files"].values() if isinstance(file, dict) for key, value in file.items()]
    return "-".join([case["model_type"], next(iter(case["files"].values())), *settings])[:100]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=name_of)
def test_texts_and_pairs_get_the_ids_of_transformers_4(case: dict[str, Any], tmp_path: Path) -> None:
    """Also if the tokenizer is saved as a `tokenizer.json`."""
    write_folder(tmp_path, case["model_type"], case["files"])
    if case["model_type"] in REFUSED:
        refusal(tmp_path)
        return
    saved = load_tokenizer("x", tmp_path).backend_tokenizer
    assert_ids(case, saved)
    # classes of transformers 5 read some files with other steps or ids, or not at all
    for name in (path.name for path in tmp_path.iterdir() if path.suffix in (".txt", ".model") or path.name == "vocab.json"):
        (tmp_path / name).unlink()
    saved.save(str(tmp_path / "tokenizer.json"))
    assert_ids(case, load_tokenizer("x", tmp_path).backend_tokenizer)


def assert_ids(case: dict[str, Any], tokenizer: Any) -> None:
    texts = [text.format(mask=case["mask"] or "") for text in GOLDEN["texts"]]
    assert [encoding.ids for encoding in tokenizer.encode_batch(texts)] == case["ids"]
    pair = tokenizer.encode(*texts[:2])
    assert [pair.ids, pair.type_ids] == case["pair"]


def test_a_bundle_has_no_token_for_the_space_before_a_mask(tmp_path: Path) -> None:
    size = len(json.loads(GOLDEN["files"]["roberta.json"]))
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "max_position_embeddings": 40}
    transformers.RobertaForMaskedLM(transformers.RobertaConfig(vocab_size=size, pad_token_id=1, **tiny)).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(GOLDEN["files"]["roberta.json"], encoding="utf-8")
    (tmp_path / "merges.txt").write_text(GOLDEN["files"]["roberta.merges"], encoding="utf-8")

    checkpoint = load_checkpoint(str(tmp_path))
    steps = tokenizers.Tokenizer.from_str(tokenizer_json(checkpoint.hf_tokenizer, checkpoint.tokenizer))
    [case] = [case for case in GOLDEN["cases"] if case["model_type"] == "roberta" and list(case["files"]) == ["vocab.json", "merges.txt"]]
    assert steps.encode(GOLDEN["texts"][6].format(mask="<mask>")).ids == case["ids"][6]


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"])
def test_a_damaged_sentencepiece_model_is_not_called_a_tiktoken_file(content: bytes, tmp_path: Path) -> None:
    write_folder(tmp_path, "deberta-v2", {"spm.model": "deberta.model"})
    (tmp_path / "spm.model").write_bytes(content)
    assert "install" not in refusal(tmp_path)


@pytest.mark.parametrize("model_type", ["flaubert", "roformer", "xlm", "modernbert", "nezha"])
def test_files_that_a_class_does_not_read_are_refused(model_type: str, tmp_path: Path) -> None:
    """No package of a slow class is asked for: with it, the tokenizer would be refused as slow."""
    files = {"vocab.txt": "bert.txt", "vocab.json": "herbert.json", "merges.txt": "herbert.merges"}
    assert "install" not in refusal(write_folder(tmp_path, model_type, files))
