"""Attention at /attention: weights compared with plain formulas, tokens and offsets, pairs, batches, limits, bundles without attention."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from bertserve.service.errors import SettingsError
from bertserve.service.tasks import cost
from support import app_client, tiny
from support.app_client import Send, call, error_of, open_api, post, result, state_of

ATTENTION = "/attention"
HEADS = (2, 3)  # heads of each layer; unequal, as after head pruning
MODELS = {
    "classifier": "text-classification",
    "tagger": "token-classification",
    "reader": "question-answering",
    "filler": "fill-mask",
    "chooser": "multiple-choice",
    "vectors": "feature-extraction",
}
TEXT = "a good film"
PAIR = {"text": "the book was long", "text_pair": "not bad"}


@pytest.fixture(scope="module", name="folder")
def folder_of_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a models folder with a model of each task that outputs attention, and a model that does not."""
    folder = tmp_path_factory.mktemp("attention")
    for name, task in MODELS.items():
        tiny.bundle(folder, name, task=task, attention_heads=HEADS)
    tiny.edit(tiny.bundle(folder, "left", attention_heads=HEADS), lambda fields: fields["tokenizer"].update(padding_side="left"))
    tiny.bundle(folder, "plain")
    return folder


@pytest.fixture(scope="module", name="api")
def started_service(folder: Path) -> Send:
    return open_api(folder)


def attention_of(api: Send, inputs: Any, path: str = ATTENTION, model: str | None = "classifier", **parameters: Any) -> Any:
    return result(api, path, inputs=inputs, parameters=parameters, **({"model": model} if model else {}))


def error_for(api: Send, inputs: Any, **parameters: Any) -> str:
    return app_client.error_of_body(api, ATTENTION, {"inputs": inputs, "parameters": parameters, "model": "classifier"})


def expected(folder: Path, model: str, ids: list[int], types: list[int]) -> list[NDArray[np.float64]]:
    """Returns the weights of each layer, [heads, length, length], computed one by one from the matrices in the model file."""
    proto = onnx.load(str(folder / model / "model.cpu.fp32.onnx"))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    tokens = [constants["words"][id_] + constants["types"][type_] for id_, type_ in zip(ids, types, strict=True)]
    layers = []
    for layer, count in enumerate(HEADS):
        of_layer = np.zeros((count, len(ids), len(ids)))
        for head, i in itertools.product(range(count), range(len(ids))):
            odds = [np.exp(float(tokens[i] @ constants[f"att/{layer}"][head] @ other)) for other in tokens]
            of_layer[head, i] = np.array(odds) / sum(odds)
        layers.append(of_layer)
    return layers


@pytest.mark.parametrize("model", MODELS)
def test_weights_of_any_task_match_the_formula(api: Send, folder: Path, model: str) -> None:
    for inputs, types in ((TEXT, [0] * 5), (PAIR, [0] * 6 + [1] * 3)):
        actual = attention_of(api, inputs, model=model)
        right = expected(folder, model, [tiny.VOCABULARY.index(token) for token in actual["tokens"]], types)

        assert [len(layer) for layer in actual["attentions"]] == list(HEADS)
        for layer, weights in zip(actual["attentions"], right, strict=True):
            np.testing.assert_allclose(weights, layer, rtol=0, atol=1e-5)
            np.testing.assert_allclose(1, np.sum(layer, axis=-1), rtol=0, atol=1e-5)


def test_the_response_has_the_offsets_of_each_token(api: Send) -> None:
    """Tokens have the vocabulary's spelling, and special tokens have no offsets.

    Offsets count from the start of the token's own text. `sentence_b_start` is the index of the second text's first token.
    """
    assert {name: value for name, value in attention_of(api, PAIR).items() if name != "attentions"} == {
        "tokens": ["[CLS]", "the", "book", "was", "long", "[SEP]", "not", "bad", "[SEP]"],
        "offsets": [None, [0, 3], [4, 8], [9, 12], [13, 17], None, [0, 3], [4, 7], None],
        "sentence_b_start": 6,
    }
    assert {name: value for name, value in attention_of(api, "a bx \N{GREEK SMALL LETTER ALPHA}").items() if name != "attentions"} == {
        "tokens": ["[CLS]", "a", "b", "##x", "[UNK]", "[SEP]"],
        "offsets": [None, [0, 1], [2, 3], [3, 4], [5, 6], None],
        "sentence_b_start": None,
    }
    assert attention_of(api, TEXT) == attention_of(api, {"text": TEXT, "text_pair": ""}) == attention_of(api, {"text": TEXT})


def test_layers_and_heads_can_be_selected(api: Send) -> None:
    """They have the requested order. Negative numbers count from the end: for heads, from the end of each layer."""
    every = attention_of(api, TEXT)["attentions"]
    numbers: tuple[list[int] | None, ...] = (None, [0], [1], [-1], [1, 0], [-1, 0])
    for layers, heads in itertools.product(numbers, numbers):
        selection = {name: value for name, value in (("layers", layers), ("heads", heads)) if value is not None}
        weights = [every[layer] for layer in layers or (0, 1)]
        right = [[layer[head] for head in (range(len(layer)) if heads is None else heads)] for layer in weights]

        assert attention_of(api, TEXT, **selection)["attentions"] == right


@pytest.mark.parametrize("model", ["classifier", "left"])
def test_a_list_has_the_same_results_as_its_items(api: Send, model: str) -> None:
    inputs = [TEXT, PAIR, "", "good " * 20, {"text": "bad"}]
    alone = [attention_of(api, item, model=model) for item in inputs]
    together = attention_of(api, inputs, model=model)

    assert together[2]["tokens"] == ["[CLS]", "[SEP]"]
    for one, other in zip(alone, together, strict=True):
        assert other["tokens"] == one["tokens"]
        for left, right in zip(one["attentions"], other["attentions"], strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-6)
    assert attention_of(api, [], model=model) == []
    assert attention_of(api, [TEXT], model=model) == [alone[0]]


def test_a_text_with_too_many_weights_is_refused(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer heads are accepted."""
    monkeypatch.setattr(cost, "MAX_RESPONSE_BYTES", 1500)
    body = {"inputs": TEXT, "model": "classifier"}

    assert "`heads`" in error_of(post(api, body, path=ATTENTION), 413, "too_large")
    assert len(attention_of(api, TEXT, heads=[0])["attentions"]) == 2
    assert "inputs[1]: " in error_of(post(api, body | {"inputs": ["", TEXT]}, path=ATTENTION), 413, "too_large")


def test_a_text_over_the_models_length_is_refused(api: Send) -> None:
    assert re.findall(r"\d+", error_for(api, "good " * 31)) == ["31", "30"]
    assert re.findall(r"\d+", error_for(api, {"text": "good " * 30, "text_pair": "bad"})) == ["31", "29"]
    assert len(attention_of(api, "good " * 30)["tokens"]) == 32


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ({"layers": [2]}, "0 to 1, or -1 to -2"),
        ({"layers": [0, -3]}, "`layers` has -3,"),
        ({"heads": [2]}, "`heads` has 2, but layer 0 "),
        ({"layers": [1], "heads": [3]}, "`heads` has 3, but layer 1 "),
        ({"layers": [1, -1]}, "[1, -1]"),
        ({"heads": [0, 0]}, "[0, 0]"),
    ],
)
def test_an_invalid_parameter_is_explained(api: Send, parameters: dict[str, Any], value: str) -> None:
    assert value in error_for(api, TEXT, **parameters)


def test_the_error_for_a_bundle_without_attention_says_what_to_do(api: Send, folder: Path) -> None:
    for path, body in ((ATTENTION, {"model": "plain"}), ("/models/plain", {"parameters": {"output_attentions": True}})):
        message = error_of(post(api, {"inputs": TEXT, **body}, path=path), 422, "invalid_value")
        assert "`--attentions`" in message
        assert "`chooser`, `classifier`, `filler`" in message


def test_the_path_of_a_model_returns_attention_only_on_request(api: Send) -> None:
    answer = attention_of(api, TEXT, "/models/tagger", None, output_attentions=True)

    assert answer == attention_of(api, TEXT, model="tagger")
    assert attention_of(api, TEXT, "/ner", "tagger") == attention_of(api, TEXT, "/models/tagger", None) != answer
    assert attention_of(api, TEXT, "/classify", "classifier") == attention_of(api, TEXT, "/models/plain", None)
    assert [path for path in api("GET", "/models/tagger").json()["endpoints"] if path == ATTENTION] == [ATTENTION]
    assert ATTENTION not in api("GET", "/models/plain").json()["endpoints"]


def test_several_models_with_attention_need_no_default(folder: Path, tmp_path: Path) -> None:
    for name, task in (("one", "fill-mask"), ("two", "feature-extraction")):
        tiny.bundle(tmp_path, name, task=task, attention_heads=HEADS)
    settings = {"allow_implicit_default": False}
    message = error_of(call(tmp_path, "POST", ATTENTION, settings=settings, json={"inputs": TEXT}), 404, "not_found")

    assert "`one`, `two`" in message
    response = call(tmp_path, "POST", ATTENTION, settings=settings | {"default": {"attention": "two"}}, json={"inputs": TEXT})
    assert response.status_code == 200
    assert response.headers["x-model"] == "two"
    with pytest.raises(SettingsError, match=r"`three`.*`attention`"):
        state_of(tmp_path, default={"attention": "three"})
