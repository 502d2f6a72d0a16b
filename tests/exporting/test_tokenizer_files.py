"""The steps of a checkpoint's `tokenizer.json` are used, although transformers replaces some of them with a class's own."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import normalizers, pre_tokenizers

from bertserve.export.checkpoint.fast_tokenizer import load_tokenizer
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import ExportError
from bertserve.export.validation.reference import run_input, second_text_first
from bertserve.service.tasks import classify, question_answering
from support import raises_exactly
from support.bundles import exported
from support.checkpoints import bert, edit_json, service_tokenizer
from support.families import FAMILIES, roberta_tokenizer
from support.task_runs import answer_input, classify_input, encode

pytestmark = pytest.mark.torch


def test_decoding_can_skip_special_added_tokens(tmp_path: Path) -> None:
    source = bert(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(source)
    reference.add_special_tokens({"additional_special_tokens": ["[E1]", "[/E1]"]})
    reference.add_tokens(["CO2"])
    reference.save_pretrained(source)
    tokenizer = service_tokenizer(load_checkpoint(str(source)), tmp_path)
    ids = reference("the [E1] good [/E1] film CO2")["input_ids"]
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode_all([ids], skip_special=skip) == [expected]


def rewrite(source: Path, **parts: Any) -> tokenizers.Tokenizer:
    """Replaces parts of a checkpoint's `tokenizer.json`; returns the tokenizer as the tokenizers library reads it, without truncation."""
    edit_json(source / "tokenizer.json", truncation=None, padding=None)
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(source / "tokenizer.json"))
    return tokenizer


def test_the_normalizer_and_pre_tokenizer_of_the_file_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, text = bert(tmp_path), "ﬁne GOOD ﬁlm ÀÉ (film)..."
    files = rewrite(
        source, normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), pre_tokenizer=pre_tokenizers.Whitespace()
    )
    checkpoint = load_checkpoint(str(source))
    expected = files.encode(text, add_special_tokens=False).ids

    assert expected != transformers.AutoTokenizer.from_pretrained(source)(text, add_special_tokens=False)["input_ids"]
    assert checkpoint.hf_tokenizer(text, add_special_tokens=False)["input_ids"] == expected
    assert service_tokenizer(checkpoint, tmp_path).tokenize([text])[0].ids == expected
    assert capsys.readouterr().err.count("WARNING") == 1


def test_the_template_of_pairs_is_read_from_the_file(tmp_path: Path) -> None:
    """Transformers 5 adds a second [SEP] between the texts of DeBERTa, although no model was trained with it."""
    FAMILIES["DeBERTa"].tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deberta"}')
    template = json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"]
    first = next(place for place, piece in enumerate(template["pair"]) if "Sequence" in piece)
    del template["pair"][first + 1]
    edit_json(tmp_path / "tokenizer.json", post_processor=template)

    expected = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a", "b").ids
    assert len(expected) < len(transformers.AutoTokenizer.from_pretrained(tmp_path)("a", "b")["input_ids"])
    assert load_tokenizer("x", tmp_path)("a", "b")["input_ids"] == expected

    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer("x", tmp_path)("a", "b")["input_ids"] == expected


@pytest.mark.parametrize("family", ["BERT", *(pytest.param(name, marks=pytest.mark.full_grid) for name in ("LLaMA", "XLNet"))])
def test_the_passage_is_before_the_question_if_the_tokenizer_pads_on_the_left(tmp_path: Path, family: str) -> None:
    """Transformers' scripts and pipeline for question answering use this order."""
    source = FAMILIES[family].save(tmp_path / "source", "question-answering")
    edit_json(source / "tokenizer_config.json", padding_side="left")
    question, passage = "who?", "the good film is bad"
    request = answer_input(question, passage)
    [encoding] = question_answering.cut_passage(request, service_tokenizer(load_checkpoint(str(source)), tmp_path)).encodings

    reference = transformers.AutoTokenizer.from_pretrained(source)(passage, question)
    assert encoding.ids.tolist() == reference["input_ids"]
    assert encoding.start == reference.sequence_ids().index(0)
    assert second_text_first(exported(source).manifest.tokenizer)  # the export compared it with PyTorch


def test_the_reference_has_the_windows_of_the_service(tmp_path: Path) -> None:
    text = "the good film is bad " * 60
    answers = [answer_input("who?", text, doc_stride=5), answer_input("who? " * 40, text)]
    pair = classify_input("the film " * 30, text, window="max")
    for task, requests in ((question_answering, answers), (classify, [pair])):
        checkpoint = load_checkpoint(str(FAMILIES["BERT"].save(tmp_path / task.TASK, task.TASK)))
        for request in requests:
            encodings = encode(task, request, service_tokenizer(checkpoint, tmp_path), checkpoint).encodings
            assert 1 < len(encodings) == len(run_input(checkpoint, request))


def test_the_model_of_the_file_is_used(tmp_path: Path) -> None:
    source = bert(tmp_path)
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    edit_json(source / "tokenizer.json", model=model | {"max_input_chars_per_word": 3})
    assert 1 in load_checkpoint(str(source)).hf_tokenizer("film")["input_ids"]


@pytest.mark.parametrize("name", ["Albert", "Camembert", "DebertaV2", "XLNet"])
def test_a_class_can_have_a_file_with_another_type_of_model(tmp_path: Path, name: str) -> None:
    """Transformers 5 cannot read such a file, but transformers 4 uses it as it is, whatever its class is."""
    source = bert(tmp_path)
    expected = rewrite(source).encode("the good (film)", "ÀÉ")
    edit_json(source / "tokenizer_config.json", tokenizer_class=f"{name}TokenizerFast")
    with pytest.raises(Exception):  # noqa: B017 - of any type, as the conversion does not expect the file
        transformers.AutoTokenizer.from_pretrained(source)

    tokenizer = load_tokenizer("x", source).backend_tokenizer
    assert ((actual := tokenizer.encode("the good (film)", "ÀÉ")).ids, actual.type_ids) == (expected.ids, expected.type_ids)


@pytest.mark.parametrize("installed", [False, True])
def test_a_class_that_splits_texts_with_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """A tokenizer.json cannot have such a step, so no package is asked for."""
    source = bert(tmp_path)
    edit_json(source / "tokenizer_config.json", tokenizer_class="RoFormerTokenizer")
    monkeypatch.setitem(sys.modules, "rjieba", ModuleType("rjieba") if installed else None)
    with raises_exactly(ExportError, match="Python code") as caught:
        load_tokenizer("x", source)
    assert "install" not in str(caught.value)


@pytest.mark.parametrize("name", ["Bert", "MPNet"])
def test_the_case_in_the_configuration_overrides_the_file(tmp_path: Path, name: str) -> None:
    source = bert(tmp_path)
    edit_json(source / "tokenizer_config.json", tokenizer_class=f"{name}Tokenizer", do_lower_case=False)
    lower, upper = load_tokenizer("x", source)(["film", "FILM"], add_special_tokens=False)["input_ids"]
    assert lower != upper


@pytest.mark.parametrize(("name", "setting"), [("Roberta", True), ("PreTrained", True), ("PreTrained", False)])
def test_the_space_before_the_first_word_in_the_configuration_overrides_the_file(tmp_path: Path, name: str, setting: bool) -> None:
    """A generic class has no default, so without a setting the file decides."""
    roberta_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "roberta"}')
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=f"{name}TokenizerFast", add_prefix_space=True)
    if not setting:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        del config["add_prefix_space"]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for in_file in (False, True):
        with_space = rewrite(tmp_path, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=in_file)).encode(" film").ids
        assert (with_space == load_tokenizer("x", tmp_path)("film")["input_ids"]) == (setting or in_file)
