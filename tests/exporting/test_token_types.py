"""Token types (segment ids) are as in a model's training: the template's, or none, by class and version of its tokenizer.

PyTorch gets the types explicitly, because transformers 5 drops them for most tokenizer classes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.service.bundle.files import CARD_FILE, Bundle, load_bundle
from bertserve.service.tasks import multiple_choice
from support import families, json_lines
from support.app_client import call, error_of
from support.bundles import FAST, Run, Service, Verify, exported, refused
from support.checkpoints import edit_json, edit_weights
from support.families import ALL_HEADS, FAMILIES, Family
from support.task_runs import answer_input, classify_input

pytestmark = pytest.mark.torch

OLD, NEW = "4.57.3", "5.2.0"
BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
FUNNEL_SPECIALS = ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<s>", "</s>"]
BIG_BIRD_SPECIALS = ["<pad>", "</s>", "<s>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
FIRST, SECOND = "A man is eating food.", "Someone eats."


def herbert_tokenizer() -> Any:
    pieces, merges = families.pairs(lower=True)
    ids = {piece: i for i, piece in enumerate(["<s>", "</s>", "<pad>", "<mask>", "<unk>", *pieces])}
    return transformers.HerbertTokenizer(vocab=ids, merges=merges, model_max_length=512)


TOKENIZERS: dict[str, Any] = {
    "BERT": families.bert_tokenizer,
    "DistilBERT": lambda: families.word_piece(transformers.DistilBertTokenizer, BERT_SPECIALS),
    "BigBird": lambda: families.unigram(transformers.BigBirdTokenizer, BIG_BIRD_SPECIALS),
    "RoBERTa": families.roberta_tokenizer,
    "ALBERT": FAMILIES["ALBERT"].tokenizer,
    "Funnel": lambda: families.word_piece(transformers.FunnelTokenizer, FUNNEL_SPECIALS),
    "HerBERT": herbert_tokenizer,
    "RemBERT": lambda: families.unigram(transformers.RemBertTokenizer, BERT_SPECIALS),
    "Splinter": lambda: families.word_piece(transformers.SplinterTokenizer, [*BERT_SPECIALS, "[QUESTION]"]),
    "XLNet": FAMILIES["XLNet"].tokenizer,
}
ALWAYS, NEVER = {"BERT"}, {"DistilBERT", "BigBird", "RoBERTa"}  # the types that their classes give in both versions
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}


def checkpoint(path: Path, tokenizer: str, version: str | None, task: str = "text-classification", **settings: Any) -> Path:
    """Writes a BERT checkpoint with a class of tokenizers, as saved by a version of transformers."""
    Family(transformers.BertConfig, TOKENIZERS[tokenizer], {"type_vocab_size": 3}).save(path, task)
    return saved_by(version, path, **settings)


def saved_by(version: str | None, path: Path, **settings: Any) -> Path:
    edit_json(path / "config.json", transformers_version=version)
    edit_json(path / "tokenizer_config.json", **settings)
    return path


def types_of(source: Path, **options: Any) -> list[int] | None:
    """Returns the token types of a pair that the graph gets, or None if it gets none."""
    checkpoint = load_checkpoint(str(source), LoadOptions(**options))
    spec = checkpoint.tokenizer
    return [piece.type_id for piece in spec.pair or ()] if any(item.fill == "type_ids" for item in checkpoint.inputs) else None


def template_of(source: Path) -> list[int]:
    """Returns the token types of a pair by tokenizer.json."""
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    return list(tokenizer.encode("a", "a").type_ids)


@pytest.mark.parametrize("generic", [False, True], ids=["own class", "generic class"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_class_and_the_version_decide(tokenizer: str, generic: bool, tmp_path: Path) -> None:
    """Transformers 4 gave the types of the template, except for some classes; transformers 5 gives them for few classes."""
    source = checkpoint(tmp_path / "checkpoint", tokenizer, OLD, **(GENERIC if generic else {}))
    old, own = types_of(source), not generic
    new = types_of(saved_by(NEW, source))

    assert (old and max(old)) == (None if own and tokenizer in NEVER else max(template_of(source)))
    assert new == (None if generic or tokenizer not in ALWAYS else template_of(source))


@pytest.mark.parametrize(
    ("tokenizer", "version"),
    [
        *((name, None) for name in TOKENIZERS if name not in ALWAYS | NEVER),
        *(("ALBERT", version) for version in ("", "unknown", "5.0.0rc1", "5.0.0.dev0")),
    ],
)
def test_an_unknown_version_is_refused_where_it_matters(tokenizer: str, version: str | None, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint", tokenizer, version)

    assert "--token-types" in refused(source)
    assert max(types_of(source, token_types="template") or ()) == max(template_of(source))
    assert types_of(source, token_types="zero") is None


@pytest.mark.parametrize("tokenizer", ["ALBERT", "XLNet"])
@pytest.mark.parametrize("task", ["token-classification", "feature-extraction", "question-answering", "multiple-choice"])
def test_a_version_matters_for_heads_whose_template_has_other_types(tokenizer: str, task: str, tmp_path: Path) -> None:
    """Single texts of ALBERT have one type. Those of XLNet have two, and attention maps are also for pairs."""
    head = "token-classification" if task == "feature-extraction" else task
    source = checkpoint(tmp_path / "checkpoint", tokenizer, None, head)
    matters = tokenizer == "XLNet" or task in ("question-answering", "multiple-choice")

    if matters:
        assert "--token-types" in refused(source, task=task)
    else:
        assert types_of(source, task=task) is None
        assert "--token-types" in refused(source, task=task, attentions=True)


@pytest.mark.parametrize("names", [["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]])
@pytest.mark.parametrize("version", [OLD, NEW, None])
def test_the_inputs_in_the_settings_of_the_tokenizer_have_priority(names: list[str], version: str | None, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint", "BERT", version, **GENERIC, model_input_names=names)

    assert types_of(source) == (template_of(source) if "token_type_ids" in names else None)


def test_zeros_matter_for_a_model_without_a_table_of_types(tmp_path: Path) -> None:
    """XLM adds the vector of a word for each type, and nothing if it gets no types."""
    source = FAMILIES["XLM"].save(tmp_path / "checkpoint", "text-classification")
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["model_input_names"]
    (source / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    saved_by(OLD, source)
    assert set(types_of(source) or ()) == {0}
    assert types_of(saved_by(NEW, source)) is None
    assert "--token-types" in refused(saved_by(None, source))


def requests_of(task: str) -> list[tuple[Any, tuple[str, ...]]]:
    """Returns requests of one window, each with the texts in the order of the template."""
    if task == "question-answering":
        return [(answer_input(FIRST, SECOND), (FIRST, SECOND))]
    if task == "multiple-choice":
        return [(multiple_choice.MultipleChoiceInput(FIRST, (SECOND,)), (FIRST, SECOND))]
    pair = (classify_input(FIRST, SECOND), (FIRST, SECOND))
    return [pair] if task in families.PRETRAINING else [pair, (classify_input(FIRST), (FIRST,))]


def in_pytorch(source: Path, task: str, texts: tuple[str, ...], *, with_types: bool) -> dict[str, Any]:
    """Returns the outputs of transformers by name, with the types of tokenizer.json or without types."""
    encoding = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json")).encode(*texts)
    inputs = {"input_ids": encoding.ids} | ({"token_type_ids": encoding.type_ids} if with_types else {})
    model = ALL_HEADS[task][1].from_pretrained(source, dtype=torch.float32).eval()
    rows = {name: torch.tensor([values]) for name, values in inputs.items()}
    with torch.no_grad():
        outputs: dict[str, Any] = model(**{name: value[None] if task == "multiple-choice" else value for name, value in rows.items()})
    return outputs


def differences(source: Path, bundle: Bundle, task: str, *, with_types: bool) -> list[float]:
    """Returns the largest difference of an output from PyTorch for each request."""
    service = Service(bundle.path)
    worst = []
    for request, texts in requests_of(task):
        [row], expected = service.alone(request), in_pytorch(source, task, texts, with_types=with_types)
        worst.append(max(float(np.abs(values - expected[name][0].numpy()).max()) for name, values in row.items()))
    return worst


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("ALBERT", "text-classification"),
        pytest.param("ALBERT", "question-answering", marks=pytest.mark.full_grid),
        pytest.param("ALBERT", "multiple-choice", marks=pytest.mark.full_grid),
        pytest.param("XLNet", "text-classification", marks=pytest.mark.full_grid),
    ],
)
def test_answers_are_those_of_pytorch_with_the_types_of_training(family: str, task: str, version: str, tmp_path: Path) -> None:
    """Without types, XLNet does not read types of 0, but none: also single texts differ."""
    source = saved_by(version, FAMILIES[family].save(tmp_path / "checkpoint", task))
    # a random first type differs little from the second one
    edit_weights(source, lambda tensors: [tensors[name].mul_(5) for name in tensors if "token_type" in name or "seg_embed" in name])
    bundle, with_types = exported(source), version == OLD

    assert max(differences(source, bundle, task, with_types=with_types)) <= 1e-4
    assert max(differences(source, bundle, task, with_types=not with_types)) > 1e-2
    assert bundle.manifest.source.token_types == ("template" if with_types else "zero")


@pytest.mark.parametrize("flag", ["template", pytest.param("zero", marks=pytest.mark.full_grid)])
def test_a_flag_decides_and_manifest_and_card_record_it(flag: str, tmp_path: Path, run: Run, verify: Verify, output: Path) -> None:
    """`verify` loads the checkpoint with the recorded choice, and compares it again."""
    source = checkpoint(tmp_path / "checkpoint", "BERT", None, **GENERIC)
    assert run(source, *FAST, "--token-types", flag) == (0, "")
    bundle = load_bundle(output / "checkpoint")

    assert max(differences(source, bundle, "text-classification", with_types=flag == "template")) <= 1e-4
    assert bundle.manifest.source.token_types == flag
    assert "token types" in (bundle.path / CARD_FILE).read_text(encoding="utf-8")
    assert verify(bundle.path, "--checkpoint", source)[0] == 0


def test_a_flag_without_effect_is_refused(tmp_path: Path) -> None:
    source = FAMILIES["DistilBERT"].save(tmp_path / "checkpoint", "text-classification")

    assert "--token-types" in refused(source, token_types="zero")


def one_type(path: Path, task: str = "text-classification", **settings: Any) -> Path:
    """Writes a model that lacks the type of the second text: a RoBERTa with BERT's tokenizer, like guwenbert."""
    Family(transformers.RobertaConfig, families.bert_tokenizer, {"type_vocab_size": 1}, offset=2).save(path, task)
    edit_json(path / "tokenizer_config.json", **settings)
    return path


@pytest.fixture(name="of_singles", scope="module")
def models_of_single_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the bundle of a model with one type."""
    source = one_type(tmp_path_factory.mktemp("one") / "checkpoint")
    edit_json(source / "config.json", id2label={"0": "entailment", "1": "neutral", "2": "contradiction"})
    bundle = exported(source, attentions=True)
    [row] = Service(bundle.path).alone(classify_input(FIRST))
    expected = in_pytorch(source, "text-classification", (FIRST,), with_types=True)["logits"][0].numpy()
    assert float(np.abs(row["logits"] - expected).max()) <= 1e-4
    return bundle.path.parent


PAIR = {"text": FIRST, "text_pair": SECOND}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"inputs": PAIR}),
        ("/classify", {"inputs": [FIRST, PAIR], "parameters": {"window": "mean"}}),
        ("/zero-shot", {"inputs": FIRST, "parameters": {"candidate_labels": ["food", "rain"]}}),
        ("/attention", {"inputs": PAIR}),
    ],
)
def test_a_model_with_one_type_refuses_pairs(of_singles: Path, path: str, body: Any) -> None:
    response = call(of_singles, "POST", path, json=body)

    assert "pairs" in error_of(response, 422, "invalid_value")


@pytest.mark.parametrize("task", ["question-answering", "multiple-choice"])
def test_a_model_with_one_type_is_refused_for_a_task_of_pairs(tmp_path: Path, task: str) -> None:
    assert "token types" in refused(one_type(tmp_path / "checkpoint", task))


def test_a_model_with_one_type_reads_pairs_without_types(tmp_path: Path) -> None:
    """Pairs work if the tokenizer gives no types, or if the user says so."""
    source = one_type(tmp_path / "checkpoint", model_input_names=["input_ids", "attention_mask"])
    assert max(differences(source, exported(source), "text-classification", with_types=False)) <= 1e-4

    other = one_type(tmp_path / "other")
    assert max(differences(other, exported(other, token_types="zero"), "text-classification", with_types=False)) <= 1e-4


def test_pairs_to_calibrate_a_model_of_single_texts_are_refused(tmp_path: Path) -> None:
    lines = [{"text": f"{FIRST} {i}", "text_pair": SECOND} for i in range(20)]

    assert "20 pairs" in refused(one_type(tmp_path / "checkpoint"), int8_texts=json_lines(tmp_path / "pairs.jsonl", *lines))
