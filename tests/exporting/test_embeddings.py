"""Embedding and zero-shot models, from checkpoint to response, match PyTorch and the pipelines of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from numpy.typing import NDArray
from safetensors.torch import load_file

import bertserve.service.cli
from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.manifest import Layers
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import zero_shot
from support.bundles import Service, exported, refused
from support.checkpoints import POSITIONS, PROMPTS, bert, edit_json, encoder, sentence_transformers, write_json, write_modules

pytestmark = pytest.mark.torch

LONG = "the film was not very good , but the book is great ! " * 20
TEXTS = ["good", "the film was not very good", "", "Ünïcödé 看 😴 films, e\u0301x", LONG]
NLI_LABELS = ("entailment", "neutral", "contradiction")


def test_the_bundle_passes_the_check_and_its_card_describes_the_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = sentence_transformers(encoder(tmp_path), "Normalize")
    bundle = exported(source, precisions=("fp32", "int8"), layers="last_four")
    assert bertserve.service.cli.main(["check", "--models", str(bundle.path.parent)]) == 0
    assert "vectors: feature-extraction, cpu/int8: ok" in capsys.readouterr().out
    card = (bundle.path / "README.md").read_text(encoding="utf-8")
    settings = ('`pooling`: "mean"', "`normalize`: true", '`layers`: "last_four"', '`prompts`: {"query": "the book was ')
    assert all(setting in card for setting in settings)


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("1_Pooling/config.json", None, "1_Pooling/config.json`, which modules.json"),
        ("modules.json", "{", "modules.json` cannot"),
        ("sentence_bert_config.json", '{"max_seq_length": 0}', "`max_seq_length`"),
        ("config_sentence_transformers.json", "[]", "config_sentence_transformers.json` is not"),
        ("config_sentence_transformers.json", '{"prompts": ["query: "]}', "prompts"),
        ("config_sentence_transformers.json", '{"prompts": {"query": ""}, "default_prompt_name": ["query"]}', "`default_prompt_name`"),
        ("1_Pooling/config.json", "{}", "nothing"),
        ("1_Pooling/config.json", '{"pooling_mode": [{}]}', "pooling_mode"),
        # invalid modules: a missing, outside or second folder, and a file that is not a list of objects
        ("modules.json", '[{"path": "0_Transformer", "type": "Transformer"}]', "0_Transformer`, which modules.json"),
        ("modules.json", '[{"path": "../other", "type": "Transformer"}]', "`../other`"),
        ("modules.json", '[{"path": "a", "type": "Transformer"}, {"path": "b", "type": "Transformer"}]', "`a`, `b`"),
        ("modules.json", '["Transformer"]', "modules.json` is not"),
        # a class with the same name in another package
        ("modules.json", '[{"path": "", "type": "custom_st.Transformer"}]', "`custom_st.Transformer`"),
    ],
)
def test_a_broken_file_or_field_is_named(tmp_path: Path, file: str, content: str | None, word: str) -> None:
    source = sentence_transformers(encoder(tmp_path, layers=1))
    (source / file).unlink() if content is None else (source / file).write_text(content)
    assert word in refused(source)


def test_modules_json_makes_a_checkpoint_an_embedding_model(tmp_path: Path) -> None:
    """The configuration of all-mpnet-base-v2 names the class in which its base was trained, but its weights lack that head."""
    source = sentence_transformers(encoder(tmp_path), "Normalize")
    edit_json(source / "config.json", architectures=["BertForMaskedLM"])
    checkpoint = load_checkpoint(str(source))
    assert checkpoint.task == "feature-extraction"
    assert (checkpoint.embedding.pooling, checkpoint.embedding.normalize) == ("mean", True)


def test_modules_without_pooling_do_not_change_the_task(tmp_path: Path) -> None:
    """A cross-encoder that lists its only module is still a classifier, and `--task` overrides `modules.json`."""
    source = bert(tmp_path)
    write_modules(source)
    assert load_checkpoint(str(source)).task == "text-classification"
    masked = sentence_transformers(bert(tmp_path, "masked", architecture="BertForMaskedLM"))
    assert load_checkpoint(str(masked), LoadOptions(task="fill-mask")).task == "fill-mask"


def test_the_maximum_length_of_sentence_transformers_replaces_the_tokenizers(tmp_path: Path) -> None:
    """It does not replace the number of positions, which no text can exceed."""
    source = sentence_transformers(encoder(tmp_path), max_length=120)
    edit_json(source / "tokenizer_config.json", model_max_length=48)
    assert load_checkpoint(str(source)).tokenizer.max_length == 120

    edit_json(source / "sentence_bert_config.json", max_seq_length=POSITIONS + 1)
    assert load_checkpoint(str(source)).tokenizer.max_length == POSITIONS

    edit_json(source / "sentence_bert_config.json", max_seq_length=None)
    assert load_checkpoint(str(source)).tokenizer.max_length == 48


def move(source: Path, folder: str = "0_Transformer", length_file: str = "sentence_bert_config.json") -> Path:
    """Moves a checkpoint's model, tokenizer and length into a subfolder, and returns the checkpoint's path."""
    root_files = ("modules.json", "1_Pooling", "config_sentence_transformers.json")
    others = [path for path in source.iterdir() if path.name not in root_files]
    (source / folder).mkdir()
    for path in others:
        path.rename(source / folder / path.name)
    (source / folder / "sentence_bert_config.json").rename(source / folder / length_file)
    steps = json.loads((source / "modules.json").read_text(encoding="utf-8"))
    steps[0]["path"] = folder
    write_json(source / "modules.json", steps)
    write_json(source / "config.json", {"__version__": "0.2.5"})  # a file of sentence-transformers, without model settings
    (source / "README.md").write_text("What it was trained on.", encoding="utf-8")
    return source


@pytest.mark.parametrize(
    "length_file", ["sentence_bert_config.json", pytest.param("sentence_distilbert_config.json", marks=pytest.mark.full_grid)]
)
def test_a_model_in_a_subfolder_is_found(tmp_path: Path, length_file: str) -> None:
    flat = sentence_transformers(encoder(tmp_path, layers=1), "Normalize", max_length=48)
    digest = load_checkpoint(str(flat)).origin.weights_sha256
    source = move(flat, length_file=length_file)
    checkpoint = load_checkpoint(str(source))

    assert (checkpoint.origin.weights_sha256, checkpoint.tokenizer.max_length) == (digest, 48)
    assert (checkpoint.embedding.pooling, checkpoint.embedding.normalize, checkpoint.embedding.prompts) == ("mean", True, PROMPTS)
    assert "What it was trained on." in checkpoint.card


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_only_the_needed_files_are_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool) -> None:
    """The hub's filter fetches the top folder and the module folders at one commit, which are enough for the export.

    It fetches a pickle only if there are no safetensors, and no other folders, such as training checkpoints.
    """
    source = move(sentence_transformers(encoder(tmp_path, layers=1)))
    weights = source / "0_Transformer" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    torch.save({}, weights.with_name("optimizer.bin"))
    if not safe:  # a variant in half precision is not read
        weights.rename(weights.with_name("model.fp16.safetensors"))
    for step in ("checkpoint-500", "0_Transformer/checkpoint-500", "checkpoint-500/0_Transformer", "onnx"):
        shutil.copytree(source / "0_Transformer", source / step, ignore=shutil.ignore_patterns("checkpoint-*"))
    commit = "0123456789abcdef0123456789abcdef01234567"
    fetched = tmp_path / commit
    revisions = []

    def download(name: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        revisions.append(revision)
        names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (fetched / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, fetched / name)
        return str(fetched)

    monkeypatch.setattr("bertserve.export.checkpoint.source.snapshot_download", download)
    manifest = exported("org/vectors", tmp_path / "models", revision="main").manifest

    assert {str(path.parent.relative_to(fetched)) for path in fetched.rglob("*") if path.is_file()} == {".", "0_Transformer", "1_Pooling"}
    assert [str(path.relative_to(fetched)) for path in fetched.rglob("*.bin")] == ([] if safe else ["0_Transformer/pytorch_model.bin"])
    assert revisions[0] == "main"
    assert set(revisions[1:]) == {commit}
    origin = manifest.source
    assert (manifest.tokenizer.max_length, manifest.embedding.pooling) == (64, "mean")
    assert (origin.checkpoint, origin.revision, origin.commit) == ("org/vectors", "main", commit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "last_four"}, "3 layers"),
        ({"layers": (-6, -1)}, "--layers has -6"),
        ({"layers": (1, 5)}, "layers 1 to 3, and 0"),
        ({"combine": "sum"}, "--combine sum"),
    ],
)
def test_layers_that_a_model_does_not_have_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    assert message in refused(encoder(tmp_path, layers=3), **options)


def test_layers_of_a_classifier_are_refused(tmp_path: Path) -> None:
    assert "is for text-classification" in refused(bert(tmp_path), layers="last_four")


@pytest.fixture(name="inference", scope="module")
def exported_inference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Service]:
    source = bert(tmp_path_factory.mktemp("nli"), "nli", labels=NLI_LABELS, model_max_length=POSITIONS)
    return transformers.pipeline("zero-shot-classification", model=str(source), dtype=torch.float32), Service(exported(source).path)


@pytest.mark.parametrize(
    ("multi_label", "labels", "template"),
    [
        (False, ["good", "bad", "a dull book"], "This example is {}."),
        (True, ["good", "bad", "a dull book"], "the {} film !"),
        (False, ["good"], "the {} film !"),
        (True, "film, book , great", "This example is {}."),
    ],
)
def test_zero_shot_labels_match_the_pipeline(inference: tuple[Any, Service], multi_label: bool, labels: Any, template: str) -> None:
    pipeline, service = inference
    parameters = {"candidate_labels": labels, "hypothesis_template": template, "multi_label": multi_label}
    for text in filter(None, TEXTS):  # the pipeline refuses an empty text
        expected = pipeline(text, labels, hypothesis_template=template, multi_label=multi_label)
        answer = service.answer({"inputs": text, "parameters": parameters}, zero_shot.TASK)
        assert [item["label"] for item in answer] == expected["labels"]
        assert [item["score"] for item in answer] == pytest.approx(expected["scores"], abs=1e-5)


SHORT_TEXTS = ["good", "the film was not very good", "", "the book is great ! " * 12]


def pooled(bundle: Bundle, **body: Any) -> NDArray[np.float32]:
    """Returns the vectors of all short texts, which run as one padded batch."""
    return np.array(Service(bundle.path).answer({"inputs": SHORT_TEXTS, **body}))


def combined(source: Path, layers: list[int], combine: str) -> NDArray[np.float32]:
    """Returns PyTorch's combined hidden states, averaged over the tokens."""
    model, tokenizer = transformers.AutoModel.from_pretrained(source).eval(), transformers.AutoTokenizer.from_pretrained(source)
    means = []
    for text in SHORT_TEXTS:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        selection = [states[layer][0] for layer in layers]
        one = torch.cat(selection, dim=-1) if combine == "concat" else sum(selection) / (len(selection) if combine == "mean" else 1)
        means.append(one.mean(0).numpy())
    return np.array(means)


@pytest.mark.parametrize("architecture", ["BertModel", pytest.param("RobertaPreLayerNormModel", marks=pytest.mark.full_grid)])
def test_layers_match_pytorchs_hidden_states(tmp_path: Path, architecture: str) -> None:
    source = encoder(tmp_path, architecture=architecture)
    bundle = exported(source, layers=(0, -4, -2))

    assert bundle.manifest.embedding.layers == (0, 1, 3, 4)
    assert [spec.name for spec in bundle.manifest.graphs[0].outputs] == ["last_hidden_state", "hidden_states_0_1_3_4"]
    assert bundle.manifest.graphs[0].validation.worst_abs_error < 1e-4
    for layers in ([-2, 1], [4, -2, 0, -4]):
        for combine in ("concat", "sum", "mean"):
            vectors = pooled(bundle, layers=layers, combine=combine, pooling="mean")
            np.testing.assert_allclose(combined(source, layers, combine), vectors, rtol=0, atol=1e-4)
    np.testing.assert_allclose(combined(source, [0], "concat"), pooled(bundle, pooling="mean", layers=[0]), rtol=0, atol=1e-4)
    np.testing.assert_allclose(combined(source, [-1], "concat"), pooled(bundle, pooling="mean"), rtol=0, atol=1e-4)
    with pytest.raises(InvalidValueError, match="combine"):
        pooled(bundle, pooling="mean", layers=[0], combine="sum")
    for numbers in ([2], [4, -1]):  # the last layer twice
        with pytest.raises(InvalidValueError, match="layers"):
            pooled(bundle, layers=numbers)


@pytest.mark.parametrize(
    ("layers", "numbers"), [pytest.param((-3, -2), [-3, -2], marks=pytest.mark.full_grid), ("last_four", [-4, -3, -2, -1])]
)
def test_a_bundle_has_default_layers_that_requests_can_override(tmp_path: Path, layers: Layers, numbers: list[int]) -> None:
    source = encoder(tmp_path)
    bundle = exported(source, layers=layers, combine="mean")
    np.testing.assert_allclose(combined(source, numbers, "mean"), pooled(bundle, pooling="mean"), rtol=0, atol=1e-4)
    np.testing.assert_allclose(combined(source, [-1], "mean"), pooled(bundle, pooling="mean", layers="last"), rtol=0, atol=1e-4)
    np.testing.assert_allclose(combined(source, numbers, "sum"), pooled(bundle, pooling="mean", combine="sum"), rtol=0, atol=1e-4)
    card = (bundle.path / "README.md").read_text(encoding="utf-8")
    assert f'`default_layers`: {list(bundle.manifest.embedding.default_layers or ())}\n- `combine`: "mean"' in card
