"""The labels of taggers: which are read as tags, in which spelling, and which get a warning."""

from pathlib import Path
from typing import Any

import pytest

from bertserve.export.tasks import token_classification
from bertserve.export.tasks.tags import read_tags, tag_like_labels
from support.bundles import Service, exported
from support.checkpoints import bert, edit_json
from support.fakes import Head

FULL = pytest.mark.full_grid
BIO, BIOES = ("O", "B-PER", "I-PER"), ("O", "B-PER", "I-PER", "E-PER", "S-PER")


@pytest.mark.parametrize(
    ("labels", "tags"),
    [
        # labels in the usual spelling are their own tags
        *((labels, ()) for labels in ("O B-PER I-PER B-LOC", "O I-PER I-LOC", "O S-PER E-PER", "O B-PER E-PER S-LOC")),
        *((labels, ()) for labels in ("O B-PER I-PER L-PER U-PER", "O PER LOC")),
        ("O B-PER M-PER E-PER S-PER", BIOES),
        ("O B-PER M-PER E-PER W-PER", BIOES),
        ("O B-PER M-PER", BIO),
        *((f"O B{mark}PER I{mark}PER", BIO) for mark in "_/:.|"),
        ("O PER-B PER-I", BIO),
        ("O PER_B PER_M PER_E PER_S", BIOES),
        ("o b-PER i-PER", BIO),
        ("O PER-b PER-m PER-e PER-w", BIOES),
        ("o b-per", ("O", "B-per")),
        ("O B_PER B_LOC", ("O", "B-PER", "B-LOC")),
        ("O B-PER I-PER E-PER S-PER S-RACE", ()),  # a type that is always one word
        ("[PAD] O B_PER I_PER S_PER", ("[PAD]", "O", "B-PER", "I-PER", "S-PER")),
        ("O B-PER I-PER E-MAIL", (*BIO, "I-E-MAIL")),
        ("O E-MAIL S-BAHN", ("O", "I-E-MAIL", "I-S-BAHN")),
    ],
)
def test_tags_are_read_in_other_spellings(labels: str, tags: tuple[str, ...]) -> None:
    names = tuple(labels.split())
    assert (read_tags(names), tag_like_labels(names)) == (tags, [])


@pytest.mark.parametrize(
    ("labels", "unread"),
    [
        ("O B I", "B I"),
        ("O B-PER I-PER X-PER", "X-PER"),
        ("O E-MAIL S-BAHN U-BAHN", "S-BAHN U-BAHN"),
        ("a b c d e i", ""),  # parts of speech
        ("LABEL_0 LABEL_1", ""),
    ],
)
def test_labels_that_look_like_tags_but_are_names_are_reported(labels: str, unread: str) -> None:
    assert tag_like_labels(tuple(labels.split())) == unread.split()


@pytest.fixture(name="usual", scope="module")
def tagger_with_usual_labels(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(exported(bert(tmp_path_factory.mktemp("usual"), labels=BIOES, architecture="BertForTokenClassification")).path)


@pytest.mark.torch
@pytest.mark.parametrize(
    "labels",
    ["O B_PER M_PER E_PER W_PER", *(pytest.param(x, marks=FULL) for x in ("O B-PER M-PER E-PER S-PER", "o per-b per-i per-l per-u"))],
)
def test_entities_do_not_depend_on_the_spelling(usual: Service, tmp_path: Path, labels: str) -> None:
    """Tokens have the checkpoint's own labels."""
    names, texts = tuple(labels.split()), ["a good film was bad and the book was great", "good bad fine dull, great poor very!"]
    source = bert(tmp_path, labels=BIOES, architecture="BertForTokenClassification")
    edit_json(source / "config.json", id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
    other = Service(exported(source).path)

    def entities(service: Service, strategy: str) -> Any:
        return service.answer({"inputs": texts, "parameters": {"aggregation_strategy": strategy}})

    for strategy in ("simple", "first"):
        expected = [[item | {"entity_group": item["entity_group"].lower()} for item in items] for items in entities(usual, strategy)]
        assert [
            [item | {"entity_group": item["entity_group"].lower()} for item in items] for items in entities(other, strategy)
        ] == expected
        assert any(expected)
    tokens = dict(zip(BIOES, names, strict=True))
    assert [[item["entity"] for item in items] for items in entities(other, "none")] == [
        [tokens[item["entity"]] for item in items] for items in entities(usual, "none")
    ]


@pytest.mark.torch
def test_an_export_warns_of_labels_that_look_like_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported(bert(tmp_path, labels=("O", "B", "I"), architecture="BertForTokenClassification"))
    assert capsys.readouterr().err.count("WARNING: the labels `B`, `I` ") == 1


@pytest.mark.parametrize("names", [("o", "b_per", "m_per", "e_per", "s_per"), ("O", "B-per", "I-per")])
def test_the_tags_of_data_can_have_the_spelling_of_the_model_or_another(names: tuple[str, ...]) -> None:
    head = Head(labels=names, tags=read_tags(names))
    document = {"text": "a b c d", "tokens": ["a", "b", "c", "d"], "tags": ["b_per", "e_per", "s_per", "o"]}
    assert token_classification.EXPORT_TASK.read_gold(document, head)[0] == {(0, 3, "per"), (4, 5, "per")}
