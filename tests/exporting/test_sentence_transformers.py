"""Checkpoints of sentence-transformers answer as in sentence-transformers, or are refused. `make_sentence_transformers.py` wrote the answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import T5Config

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.tasks import feature_extraction
from bertserve.export.validation.reference import run_input
from bertserve.service.body.json_text import to_plain
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import classify, embed, similarity
from bertserve.service.tasks.catalog import TASKS
from golden import cases
from golden.make_sentence_transformers import FILE, SECOND_TEXTS, TEXTS, write_base, write_files
from support.bundles import Service, exported, refused
from support.checkpoints import ROWS, edit_json, save, service_tokenizer, write_modules
from support.task_runs import decode

pytestmark = pytest.mark.torch

GOLDEN = {line["id"]: line for line in cases.load_cases(FILE)}
FULL = pytest.mark.full_grid
EXPORTED = (
    "mean",
    "lasttoken",
    "dense",
    "truncate-normalized",
    "dot",
    *(
        pytest.param(name, marks=FULL)
        for name in ("cls", "max", "normalize", "prompts", "several", "dense-last", "residual", "euclidean", "manhattan")
    ),
)
PAIRS = [{"text": TEXTS[0], "text_pair": text} for text in SECOND_TEXTS]
SETTINGS, TRANSFORMER = "config_sentence_transformers.json", "sentence_bert_config.json"
ACTIVATION = "torch.nn.modules.activation."


def checkpoint_of(folder: Path, name: str, **changes: dict[str, Any]) -> Path:
    """Writes the checkpoint of a golden line, with changed fields of some files, and returns its folder."""
    line = GOLDEN[name]
    path = write_base(folder / "model", line["labels"])
    write_files(path, line["files"])
    for file, fields in changes.items():
        edit_json(path / file, **fields)
    return path


def in_pytorch(checkpoint: Checkpoint, folder: Path, body: dict[str, Any], task: str) -> Any:
    """Returns the response to a request body, with the outputs of the checkpoint in PyTorch."""
    tokenizer = service_tokenizer(checkpoint, folder)
    requests = TASKS[task].body(**body).task_inputs(checkpoint)
    return [to_plain(decode(TASKS[task], request, run_input(checkpoint, request), checkpoint, tokenizer)) for request in requests]


def lines_with(field: str) -> list[Any]:
    """Returns the names of the golden lines with a field. Lines of versions 5.7 and 6.2 differ only if their modules do."""
    modules = {name: line["files"].get("modules.json") for name, line in GOLDEN.items()}
    repeated = {name for name in GOLDEN if name.startswith("5.7.0/") and modules[name] == modules[name.replace("5.7.0", "6.2.0")]}
    return [pytest.param(name, marks=FULL if name in repeated else ()) for name, line in GOLDEN.items() if field in line]


def close(expected: Any) -> Any:
    return pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("name", lines_with("vectors"))
def test_vectors_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    """Each version's files give its vectors: pooling, layers after it, prompts, length, lowercase, normalization and truncation."""
    checkpoint = load_checkpoint(str(checkpoint_of(tmp_path, name)))
    vectors = in_pytorch(checkpoint, tmp_path, {"inputs": TEXTS}, embed.TASK)
    assert vectors == [close(vector) for vector in GOLDEN[name]["vectors"]]


@pytest.mark.parametrize("name", lines_with("scores"))
def test_scores_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    """Each version writes the function of a cross-encoder to another place."""
    checkpoint = load_checkpoint(str(checkpoint_of(tmp_path, name)))
    answers = in_pytorch(checkpoint, tmp_path, {"inputs": PAIRS}, classify.TASK)
    scores = [[score for _, score in sorted((item["label"], item["score"]) for item in result)] for result in answers]
    assert scores == [close(expected) for expected in GOLDEN[name]["scores"]]


@pytest.mark.parametrize("name", EXPORTED)
def test_the_graph_makes_the_vectors_and_compares_them(name: str, tmp_path: Path) -> None:
    """A pooling or layer that the service lacks is in the graph; the answers for a padded batch equal sentence-transformers'."""
    line = GOLDEN[f"6.2.0/{name}"]
    service = Service(exported(checkpoint_of(tmp_path, f"6.2.0/{name}")).path)
    assert service.answer({"inputs": TEXTS}) == [close(vector) for vector in line["vectors"]]
    sentences = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    assert service.answer({"inputs": sentences}, similarity.TASK) == close(line["similarity"])


def test_t5_encoders_with_a_dense_layer_are_exported(tmp_path: Path) -> None:
    """sentence-t5 and GTR are such checkpoints; newer versions of transformers save them as encoders without a decoder."""
    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 3}
    source = save(tmp_path / "t5", "T5EncoderModel", T5Config(vocab_size=ROWS, **sizes))
    files = GOLDEN["6.2.0/dense"]["files"]
    write_files(source, {name: content for name, content in files.items() if name != "tokenizer_config.json"})
    [vector] = Service(exported(source).path).answer({"inputs": "good"})
    checkpoint = load_checkpoint(str(source))
    [[expected]] = [in_pytorch(checkpoint, tmp_path, {"inputs": ["good"]}, embed.TASK)]
    assert (len(vector), vector) == (8, close(expected))


def test_requests_choose_other_vectors_of_a_model_with_its_own_pooling(tmp_path: Path) -> None:
    """`pooling` and `layers` read the vectors of tokens; `dimensions` replaces the model's truncation, and `none` has none."""
    service = Service(exported(checkpoint_of(tmp_path, "6.2.0/truncate-normalized"), layers=(1, 2)).path)
    lengths = {
        len(service.answer({"inputs": "porto", **options})[0])
        for options in ({}, {"pooling": "mean"}, {"pooling": "max", "layers": [1, 2]}, {"normalize": True})
    }
    assert lengths == {5}
    assert len(service.answer({"inputs": "porto", "dimensions": 9})[0]) == 9
    assert len(service.answer({"inputs": "porto", "pooling": "none"})[0][0]) == 12
    [unit] = service.answer({"inputs": "porto", "normalize": True})
    assert sum(value * value for value in unit) == pytest.approx(1, abs=1e-6)
    with pytest.raises(InvalidValueError):
        service.answer({"inputs": "porto", "layers": [1]})


@pytest.mark.parametrize(
    ("name", "file", "changes", "word"),
    [
        # unknown settings, and unsupported values of known ones
        ("mean", SETTINGS, {"new_setting": 1}, "`new_setting`"),
        ("mean", SETTINGS, {"model_type": "SparseEncoder"}, "SparseEncoder"),
        ("mean", SETTINGS, {"similarity_fn_name": "maxsim"}, "maxsim"),
        ("mean", SETTINGS, {"truncate_dim": 0}, "`truncate_dim`"),
        ("mean", TRANSFORMER, {"processing_kwargs": {"text": {"add_special_tokens": False}}}, "processing_kwargs"),
        ("mean", TRANSFORMER, {"model_args": {"torch_dtype": "float16", "hidden_act": "relu"}}, "hidden_act"),
        ("mean", TRANSFORMER, {"transformer_task": "fill-mask"}, "fill-mask"),
        ("mean", TRANSFORMER, {"module_output_name": "sentence_embedding"}, "`module_output_name`"),
        ("mean", TRANSFORMER, {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}}, "pooler_output"),
        ("mean", TRANSFORMER, {"modality_config": {"message": {"method": "forward", "method_output_name": None}}}, "`modality_config`"),
        ("mean", "1_Pooling/config.json", {"pooling_mode": ["mean", "attention"]}, "attention"),
        ("prompts", "1_Pooling/config.json", {"include_prompt": False}, "prompt"),
        ("dense", "2_Dense/config.json", {"activation_function": "own.Tanh"}, "own.Tanh"),
        ("dense", "2_Dense/config.json", {"module_input_name": "token_embeddings"}, "token_embeddings"),
        ("dense", "2_Dense/config.json", {"in_features": 13}, "`in_features`"),
        ("dense", "2_Dense/config.json", {"out_features": 9}, "2_Dense/model.safetensors"),
        ("normalize", "2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "token_embeddings"),
        ("three-default", SETTINGS, {"activation_fn": ACTIVATION + "Tanh"}, "Tanh"),
        ("identity", SETTINGS, {"activation_fn": "own.Identity"}, "own.Identity"),
        ("identity", SETTINGS, {"prompts": {"query": "find "}, "default_prompt_name": "query"}, "`default_prompt_name`"),
        ("identity", "config.json", {"problem_type": "multi_label_classification"}, "`problem_type`"),
    ],
)
def test_settings_that_are_not_supported_are_refused(tmp_path: Path, name: str, file: str, changes: dict[str, Any], word: str) -> None:
    assert word in refused(checkpoint_of(tmp_path, f"6.2.0/{name}", **{file: changes}))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *(("dense", kinds) for kinds in (("Pooling", "LayerNorm"), ("Dense", "Pooling"), ("Pooling", "Pooling"), ("Normalize",))),
        ("identity", ("Dense",)),
    ],
)
def test_steps_that_are_not_supported_are_refused(tmp_path: Path, name: str, kinds: tuple[str, ...]) -> None:
    """`identity` is a cross-encoder, which has no further steps."""
    path = checkpoint_of(tmp_path, f"6.2.0/{name}")
    write_modules(path, *kinds)
    assert kinds[-1] in refused(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"unpad_inputs": False, "processing_kwargs": {}, "query_length": None},
        {"model_args": {"attn_implementation": "sdpa", "torch_dtype": "float16"}, "tokenizer_args": {}, "config_args": None},
        {"model_kwargs": {"dtype": "float16"}},
    ],
)
def test_settings_that_change_nothing_are_allowed(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = checkpoint_of(tmp_path, "6.2.0/mean", **{TRANSFORMER: changes, SETTINGS: {"requirements": {"transformers": ">=5"}}})
    vectors = in_pytorch(load_checkpoint(str(path)), tmp_path, {"inputs": TEXTS}, embed.TASK)
    assert vectors == [close(vector) for vector in GOLDEN["6.2.0/mean"]["vectors"]]


def test_dense_weights_can_be_pickled(tmp_path: Path) -> None:
    """LaBSE and distiluse have such files. Other objects than tensors are refused."""
    path = checkpoint_of(tmp_path, "6.2.0/dense")
    safetensors, pickled = path / "2_Dense/model.safetensors", path / "2_Dense/pytorch_model.bin"
    torch.save(load_file(safetensors), pickled)
    safetensors.unlink()
    checkpoint = load_checkpoint(str(path))
    vectors = in_pytorch(checkpoint, tmp_path, {"inputs": TEXTS}, embed.TASK)
    assert vectors == [close(vector) for vector in GOLDEN["6.2.0/dense"]["vectors"]]
    assert checkpoint.origin.weights_format == "pickle"

    torch.save({"linear.weight": tmp_path}, pickled)
    assert "PosixPath" in refused(path)


def test_the_weights_of_dense_modules_are_part_of_the_digest(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, "6.2.0/dense")
    digest = load_checkpoint(str(path)).origin.weights_sha256
    write_files(path, {"2_Dense/config.json": {"in_features": 12, "out_features": 6, "bias": True}})
    assert digest != load_checkpoint(str(path)).origin.weights_sha256


def test_vectors_can_have_few_values(tmp_path: Path) -> None:
    """The example of a bundle asks for fewer values."""
    path = checkpoint_of(tmp_path, "6.2.0/dense")
    write_files(path, {"2_Dense/config.json": {"in_features": 12, "out_features": 2, "bias": True}})
    checkpoint = load_checkpoint(str(path))
    [vector] = in_pytorch(checkpoint, tmp_path, feature_extraction.EXPORT_TASK.example(checkpoint.tokenizer), embed.TASK)
    assert len(vector) == 2
