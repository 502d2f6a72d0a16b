"""The Open Inference Protocol over HTTP: texts and token ids in binary and JSON tensors, refused requests, and the other routes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from application import Send, assert_same, call, keys, play, posted, rejected, started
from bertserve.service.api_keys import ApiKeys
from bertserve.service.bundle.files import load_bundle
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import InvalidValueError
from bertserve.service.http.auth import Authenticator
from bertserve.service.serving.build import build
from bertserve.service.settings import Settings
from bertserve.service.tasks import raw_outputs

TEXTS = ["good film", "a very bad book"]
QUESTION, CONTEXT = "good ?", "a good film , not a bad book"
TASKS = {
    "tiny": "text-classification",
    "tags": "token-classification",
    "spans": "question-answering",
    "masks": "fill-mask",
    "choices": "multiple-choice",
    "vectors": "feature-extraction",
}
HEADER = "inference-header-content-length"


@pytest.fixture(name="folder", scope="module")
def folder_of_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a models folder with a bundle for each task, a cross-encoder and a model for natural language inference."""
    folder = tmp_path_factory.mktemp("models")
    for name, task in TASKS.items():
        tiny.bundle(folder, name, task=task)
    tiny.bundle(folder, "cross", labels=["relevance"], activation="sigmoid")
    tiny.bundle(folder, "nli", labels=["contradiction", "neutral", "entailment"])
    return folder


@pytest.fixture(name="masks_manifest", scope="module")
def manifest_of_masks(folder: Path) -> Manifest:
    return load_bundle(folder / "masks").manifest


@pytest.fixture(name="api", scope="module")
def started_application(folder: Path) -> Iterator[Send]:
    with started(folder) as send:
        yield send


def texts(name: str, *values: str) -> dict[str, Any]:
    return {"name": name, "shape": [len(values)], "datatype": "BYTES", "data": list(values)}


def numbers(name: str, values: Any, datatype: str = "INT64") -> dict[str, Any]:
    return {"name": name, "shape": list(np.shape(values)), "datatype": datatype, "data": values}


def infer(api: Send, model: str, *inputs: dict[str, Any], headers: Any = None, **body: Any) -> httpx.Response:
    return api("POST", f"/v2/models/{model}/infer", json={"inputs": list(inputs), **body}, headers=headers)


def outputs(response: httpx.Response) -> dict[str, Any]:
    """Returns the outputs of a response by name, as arrays of their shape."""
    assert response.status_code == 200, response.text
    return {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in response.json()["outputs"]}


def refused(response: httpx.Response) -> str:
    return rejected(response, 422, "invalid_value")


def decoded(values: Any) -> list[Any]:
    return [json.loads(value) for value in values]


def in_order(result: list[dict[str, Any]], labels: Sequence[str]) -> list[float]:
    """Returns the scores of a result in the order of the labels."""
    return [{item["label"]: item["score"] for item in result}[label] for label in labels]


# Texts.


def test_texts_are_classified(api: Send) -> None:
    """The outputs are the best label, its score, all scores in the order of the labels, and the JSON result for each text."""
    response = infer(api, "tiny", texts("inputs", *TEXTS), id="7")
    found, expected = outputs(response), posted(api, "/models/tiny", inputs=TEXTS)

    assert ["label", "score", "scores", "json"] == list(found)
    assert [result[0]["label"] for result in expected] == found["label"].tolist()
    assert expected == decoded(found["json"])
    assert_same([in_order(result, tiny.LABELS) for result in expected], found["scores"].tolist())
    assert_same([result[0]["score"] for result in expected], found["score"].tolist())
    body = response.json()
    assert ("tiny", "7") == (body["model_name"], body["id"])
    assert ["BYTES", "FP32", "FP32", "BYTES"] == [output["datatype"] for output in body["outputs"]]
    assert "tiny" == response.headers["x-model"]


def test_equivalent_shapes_of_texts_give_the_same_scores(api: Send) -> None:
    """A flat list, a flat column and a nested column give the same scores; `text` is an alias of `inputs`."""
    column = {"name": "text", "shape": [2, 1], "datatype": "BYTES"}
    expected = outputs(infer(api, "tiny", texts("inputs", *TEXTS)))["scores"].tolist()

    assert expected == outputs(infer(api, "tiny", {**column, "data": TEXTS}))["scores"].tolist()
    assert expected == outputs(infer(api, "tiny", {**column, "data": [[text] for text in TEXTS]}))["scores"].tolist()


def test_an_empty_tensor_gives_empty_outputs(api: Send) -> None:
    found = outputs(infer(api, "tiny", texts("inputs")))

    assert {"label": (0,), "score": (0,), "scores": (0, 3), "json": (0,)} == {name: value.shape for name, value in found.items()}


def test_pairs_are_classified(api: Send) -> None:
    pairs = [{"text": "good", "text_pair": "film"}, {"text": "bad", "text_pair": "book"}]
    found = outputs(infer(api, "tiny", texts("inputs", "good", "bad"), texts("text_pair", "film", "book")))

    assert posted(api, "/models/tiny", inputs=pairs) == decoded(found["json"])


def test_parameters_of_the_task_are_supported(api: Send) -> None:
    """Parameters work as on other paths, but `scores` has all labels for any `top_k`."""
    parameters = {"top_k": 1, "function_to_apply": "none"}
    found = outputs(infer(api, "tiny", texts("inputs", *TEXTS), parameters=parameters))

    assert posted(api, "/models/tiny", inputs=TEXTS, parameters=parameters) == decoded(found["json"])
    assert (2, 3) == found["scores"].shape
    assert_same([result[0]["score"] for result in decoded(found["json"])], found["scores"].max(axis=1).tolist())


def test_the_classification_parameter_returns_the_best_labels(api: Send) -> None:
    asked = [{"name": "scores", "parameters": {"classification": 2}}]
    found = outputs(infer(api, "tiny", texts("inputs", *TEXTS), outputs=asked))
    (expected, _) = posted(api, "/models/tiny", inputs=TEXTS)

    assert ["scores"] == list(found)
    assert (2, 2) == found["scores"].shape
    assert [f"{i['score']:f}:{tiny.LABELS.index(i['label'])}:{i['label']}" for i in expected[:2]] == found["scores"][0].tolist()


@pytest.mark.parametrize(("model", "text"), [("tags", "good film"), ("masks", "a [MASK] film")])
def test_results_that_fit_no_tensor_are_only_json(api: Send, model: str, text: str) -> None:
    found = outputs(infer(api, model, texts("inputs", text, text)))

    assert ["json"] == list(found)
    assert posted(api, f"/models/{model}", inputs=[text, text]) == decoded(found["json"])


@pytest.mark.parametrize("top_k", [1, 2])
def test_questions_are_answered(api: Send, top_k: int) -> None:
    found = outputs(infer(api, "spans", texts("question", QUESTION), texts("context", CONTEXT), parameters={"top_k": top_k}))
    (expected,) = posted(api, "/models/spans", inputs=[{"question": QUESTION, "context": CONTEXT}], parameters={"top_k": top_k})
    best = expected[0] if top_k > 1 else expected

    assert [expected] == decoded(found["json"])
    assert_same(best, {name: found[name][0].item() for name in ("answer", "score", "start", "end")})


def test_texts_are_embedded(api: Send) -> None:
    found = outputs(infer(api, "vectors", texts("inputs", *TEXTS), parameters={"normalize": True}))
    ragged = outputs(infer(api, "vectors", texts("inputs", *TEXTS), parameters={"pooling": "none"}))

    assert posted(api, "/embed", inputs=TEXTS, normalize=True) == found["embedding"].tolist() == decoded(found["json"])
    assert ["json"] == list(ragged)
    assert posted(api, "/embed", inputs=TEXTS, pooling="none") == decoded(ragged["json"])


def test_derived_tasks_give_the_results_of_the_json_api(api: Send) -> None:
    query, sentences = "good ?", ["a bad book", "a good film"]
    ranked = outputs(infer(api, "cross", texts("query", query), texts("texts", *sentences), parameters={"raw_scores": True}))
    compared = outputs(infer(api, "vectors", texts("source_sentence", query), texts("sentences", *sentences)))
    labels = {"candidate_labels": "dull,great", "multi_label": True}
    scored = outputs(infer(api, "nli", texts("inputs", *TEXTS), parameters=labels))

    expected = posted(api, "/models/cross", query=query, texts=sentences, raw_scores=True)
    assert [expected] == decoded(ranked["json"])
    assert_same([{i["index"]: i["score"] for i in expected}[place] for place in range(2)], ranked["score"].tolist())
    similar = posted(api, "/models/vectors", inputs={"source_sentence": query, "sentences": sentences})
    assert [similar] == decoded(compared["json"])
    assert_same(similar, compared["score"].tolist())
    zero_shot = posted(api, "/models/nli", inputs=TEXTS, parameters=labels)
    assert_same(zero_shot, decoded(scored["json"]))
    assert_same([in_order(result, ["dull", "great"]) for result in zero_shot], scored["scores"].tolist())


# Token ids.

IDS = [[2, 10, 12, 3, 0, 0], [2, 6, 17, 11, 8, 3]]
ATTENTION = [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]


def test_token_ids_give_logits(api: Send) -> None:
    body = {"inputs": TEXTS, "parameters": {"function_to_apply": "none"}}
    expected = [in_order(result, tiny.LABELS) for result in posted(api, "/models/tiny", **body)]
    ids = [[tiny.VOCABULARY.index(token) for token in ("[CLS]", *text.split(), "[SEP]")] for text in TEXTS]
    padded = [row + [0] * (6 - len(row)) for row in ids]
    mask = [[1] * len(row) + [0] * (6 - len(row)) for row in ids]
    found = outputs(infer(api, "tiny", numbers("input_ids", padded), numbers("attention_mask", mask)))

    assert ["logits"] == list(found)
    np.testing.assert_allclose(expected, found["logits"], atol=1e-5)


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        ("tags", {"logits": (2, 6, 4)}),
        ("spans", {"start_logits": (2, 6), "end_logits": (2, 6)}),
        ("vectors", {"last_hidden_state": (2, 6, 8), "last_four_hidden_states": (2, 6, 32)}),
    ],
)
def test_outputs_per_token_are_padded_like_the_ids(api: Send, model: str, shapes: dict[str, Any]) -> None:
    found = outputs(infer(api, model, numbers("input_ids", IDS), numbers("attention_mask", ATTENTION)))
    alone = outputs(infer(api, model, numbers("input_ids", [IDS[0][:4]])))

    assert shapes == {name: value.shape for name, value in found.items()}
    for name, values in found.items():
        assert not values[0, 4:].any()
        assert values[1].any()
        np.testing.assert_allclose(alone[name][0], values[0, :4], atol=1e-5)


def test_a_request_can_select_and_order_outputs(api: Send) -> None:
    found = outputs(infer(api, "spans", numbers("input_ids", IDS), outputs=[{"name": "end_logits"}, {"name": "start_logits"}]))
    one = outputs(infer(api, "spans", numbers("input_ids", IDS), outputs=[{"name": "end_logits"}]))

    assert (["end_logits", "start_logits"], ["end_logits"]) == (list(found), list(one))
    assert found["end_logits"].tolist() == one["end_logits"].tolist()


def test_masks_give_vocabulary_logits(api: Send) -> None:
    """Logits are in the order of the rows, with their positions in `mask_index`. A request can select only `mask_index`."""
    ids = [[2, 4, 4, 3], [2, 6, 4, 3]]
    found = outputs(infer(api, "masks", numbers("input_ids", ids)))
    alone = outputs(infer(api, "masks", numbers("input_ids", ids[1:])))
    places = outputs(infer(api, "masks", numbers("input_ids", ids), outputs=[{"name": "mask_index"}]))

    assert (3, len(tiny.VOCABULARY)) == found["logits"].shape
    assert [[0, 1], [0, 2], [1, 2]] == found["mask_index"].tolist() == places["mask_index"].tolist()
    np.testing.assert_allclose(alone["logits"][0], found["logits"][2], atol=1e-5)


def test_token_type_ids_affect_the_logits(api: Send) -> None:
    plain, typed = (
        outputs(infer(api, "tiny", numbers("input_ids", IDS), numbers("token_type_ids", kinds, "INT32")))["logits"]
        for kinds in ([[0] * 6] * 2, [[0, 0, 0, 1, 1, 1]] * 2)
    )

    assert outputs(infer(api, "tiny", numbers("input_ids", IDS)))["logits"].tolist() == plain.tolist()
    assert not np.allclose(plain, typed)


def test_a_left_padded_model_accepts_only_left_padded_rows(tmp_path: Path) -> None:
    spec = json.loads((tiny.bundle(tmp_path / "a", "left", task="token-classification") / "manifest.json").read_text())["tokenizer"]
    tiny.bundle(tmp_path / "b", "left", task="token-classification", tokenizer=spec | {"padding_side": "left"})
    ids, mask = [row[4:] + row[:4] for row in IDS[:1]], [row[4:] + row[:4] for row in ATTENTION[:1]]
    inputs = [numbers("input_ids", ids), numbers("attention_mask", mask, "BOOL") | {"data": [[bool(i) for i in mask[0]]]}]
    found = call(tmp_path / "b", "POST", "/v2/models/left/infer", json={"inputs": inputs})
    wrong = call(tmp_path / "b", "POST", "/v2/models/left/infer", json={"inputs": [inputs[0], numbers("attention_mask", ATTENTION[:1])]})

    (values,) = outputs(found)["logits"]
    assert ([False, False], [True] * 4) == (values[:2].any(axis=1).tolist(), values[2:].any(axis=1).tolist())
    assert "input_ids[0]: `attention_mask`" in refused(wrong)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([numbers("input_ids", [[2, 10**6, 3]])], "input_ids[0]: the token id 1000000 "),
        ([numbers("input_ids", [[2, 5, 3], [2, -1, 3]])], "input_ids[1]: the token id -1 "),
        ([numbers("input_ids", [[2] * 33])], "rows of 33 tokens"),
        ([numbers("input_ids", [2, 5, 3])], "`input_ids` has the shape [3];"),
        ([numbers("input_ids", [[]])], "`input_ids` has the shape [1, 0]"),
        ([numbers("input_ids", [[2, 3]]), numbers("attention_mask", [[1]])], "`attention_mask` has the shape [1, 1]"),
        ([numbers("input_ids", IDS), numbers("attention_mask", [[1] * 6, [1, 0, 1, 1, 1, 1]])], "input_ids[1]: `attention_mask`"),
        ([numbers("input_ids", IDS), numbers("attention_mask", [[0] * 6] * 2)], "input_ids[0]: `attention_mask`"),
        ([numbers("input_ids", IDS), numbers("attention_mask", [[2] * 6] * 2)], "input_ids[0]: `attention_mask`"),
        ([numbers("input_ids", IDS), numbers("token_type_ids", [[2] * 6] * 2)], "`token_type_ids` has 2,"),
        ([numbers("input_ids", IDS), numbers("attention_masks", ATTENTION)], "did you mean `attention_mask`?"),
        ([numbers("input_ids", IDS), texts("inputs", *TEXTS)], "`input_ids` has no `inputs`"),
        ([numbers("input_ids", [[2.5, 3]])], "`data` is 2.5"),
        ([numbers("input_ids", [[True, 3]])], "`data` is true"),
        ([numbers("input_ids", [[2**70, 3]])], "`data` is too large"),
        ([numbers("input_ids", [[2, 3]], "FP32")], "`input_ids` is FP32;"),
    ],
)
def test_invalid_token_ids_are_refused(api: Send, inputs: list[dict[str, Any]], said: str) -> None:
    assert said in refused(infer(api, "tiny", *inputs))


def test_token_ids_do_not_support_parameters_and_outputs_of_texts(api: Send) -> None:
    assert "has no `top_k`" in refused(infer(api, "tiny", numbers("input_ids", IDS), parameters={"top_k": 1}))
    assert "has no `scores`" in refused(infer(api, "tiny", numbers("input_ids", IDS), outputs=[{"name": "scores"}]))
    asked = [{"name": "logits", "parameters": {"classification": 1}}]
    assert "`logits` does not support `classification`" in refused(infer(api, "tiny", numbers("input_ids", IDS), outputs=asked))


def test_too_many_raw_output_values_are_refused(tmp_path: Path) -> None:
    """Padding counts as values of the response; outputs that the request does not select do not count."""
    tiny.bundle(tmp_path, "vectors", task="feature-extraction", max_length=512)
    with started(tmp_path) as api:
        mask = numbers("attention_mask", [[1] + [0] * 511] * 64)
        inputs = [numbers("input_ids", [[2] * 512] * 64), mask]
        everything = infer(api, "vectors", *inputs)
        one = infer(api, "vectors", *inputs, outputs=[{"name": "last_hidden_state"}])

    assert " 16777216 " in rejected(everything, 413, "too_large")
    assert (64, 512, 8) == outputs(one)["last_hidden_state"].shape


def test_rows_without_a_mask_token_cannot_be_filled(api: Send) -> None:
    assert "0 mask tokens (4)" in refused(infer(api, "masks", numbers("input_ids", IDS)))


def checked_by_row(ids: Any, mask: Any, type_ids: Any, manifest: Manifest, *, fills_masks: bool) -> Any:
    """Returns the ids, type ids and masks of each row, or the first invalid row and a part of its message."""
    rows = []
    for index, (row, ones, types) in enumerate(zip(ids.tolist(), mask.tolist(), type_ids.tolist(), strict=True)):
        count = sum(one != 0 for one in ones)
        padding = [0] * (len(ones) - count)
        left = manifest.tokenizer.padding_side == "left"
        if not count or ones != (padding + [1] * count if left else [1] * count + padding):
            return index, "has gaps"
        own = slice(len(ones) - count, None) if left else slice(count)
        foreign = sorted({*types[own]} - {0, 1})
        if foreign:
            return index, f"has {foreign[0]}, but this model has 0, 1"
        masks = [place for place, id_ in enumerate(row[own]) if id_ == 4]
        if fills_masks and not 1 <= len(masks) <= 64:
            return index, f"the row has {len(masks)} mask tokens"
        rows.append((row[own], types[own], masks if fills_masks else []))
    return rows


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([1, 2, 3, 70]), st.sampled_from(["left", "right"]), st.booleans())
def test_vectorized_checks_equal_row_checks(masks_manifest: Manifest, seed: int, rows: int, length: int, side: Any, fills: bool) -> None:
    """Most values are valid, so that the first row is often valid and a later row is not."""
    random = np.random.default_rng(seed)
    manifest = masks_manifest.model_copy(update={"tokenizer": masks_manifest.tokenizer.model_copy(update={"padding_side": side})})
    counts = random.integers(random.integers(0, 2), length + 1, rows)[:, None]
    mask = np.where(np.arange(length) < counts, 1, 0)
    mask = mask[:, :: -1 if side == "left" else 1] + random.choice([0, 1, 2, -1], (rows, length), p=[0.98, 0.01, 0.005, 0.005])
    type_ids = random.choice([0, 1, 2, -1], (rows, length), p=[0.5, 0.48, 0.01, 0.01])
    ids = random.choice([4, 5], (rows, length), p=random.permutation([0.04, 0.96]))
    expected = checked_by_row(ids, mask, type_ids, manifest, fills_masks=fills)
    try:
        found = raw_outputs.rows(ids, mask, type_ids, outputs=(), manifest=manifest, fills_masks=fills)
    except InvalidValueError as error:
        assert expected[0] == error.input_index
        assert expected[1] in error.message
    else:
        assert expected == [(row.encoding.ids.tolist(), row.encoding.type_ids.tolist(), list(row.encoding.masks)) for row in found]


def test_many_rows_are_checked_with_as_many_calls_as_one(masks_manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 rows take as many numpy calls as one row."""
    called: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            called.append(name)
            return getattr(np, name)

    monkeypatch.setattr(raw_outputs, "np", Counted())
    calls = []
    for rows in (1, 512):
        called.clear()
        ids = np.full((rows, 1), 5)
        raw_outputs.rows(ids, np.ones_like(ids), np.zeros_like(ids), outputs=(), manifest=masks_manifest, fills_masks=False)
        calls.append(len(called))
    assert calls[0] == calls[1]


# Binary tensors.


def packed(*values: str | bytes) -> bytes:
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    return b"".join(struct.pack("<I", len(value)) + value for value in encoded)


def binary(
    api: Send, model: str, parts: dict[str, tuple[str, list[int], bytes]], *, header: str | None = None, **body: Any
) -> httpx.Response:
    """Returns the response to a request of binary tensors: name -> datatype, shape, bytes."""
    inputs = [
        {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, (kind, shape, data) in parts.items()
    ]
    head = json.dumps({"inputs": inputs, **body}).encode()
    content = head + b"".join(data for _, _, data in parts.values())
    return api("POST", f"/v2/models/{model}/infer", content=content, headers={HEADER: header or str(len(head))})


def unpacked(response: httpx.Response) -> dict[str, bytes]:
    """Returns the binary outputs of a response by name."""
    assert response.status_code == 200, response.text
    at = int(response.headers[HEADER])
    found = {}
    for output in json.loads(response.content[:at])["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None:
            found[output["name"]], at = response.content[at : at + size], at + size
    assert at == len(response.content)
    return found


def test_texts_and_outputs_can_be_binary(api: Send) -> None:
    parts = {"inputs": ("BYTES", [2, 1], packed(*TEXTS))}
    expected = outputs(infer(api, "tiny", texts("inputs", *TEXTS)))
    response = binary(api, "tiny", parts, parameters={"binary_data_output": True})
    found = unpacked(response)
    mixed = binary(api, "tiny", parts, outputs=[{"name": "label"}, {"name": "score", "parameters": {"binary_data": True}}])

    assert "application/octet-stream" == response.headers["content-type"]
    assert packed(*expected["label"]) == found["label"]
    assert packed(*expected["json"]) == found["json"]
    assert expected["scores"].astype("<f4").tobytes() == found["scores"]
    assert {"score": found["score"]} == unpacked(mixed)


def test_token_ids_can_be_binary(api: Send) -> None:
    parts = {
        "input_ids": ("INT32", [2, 6], np.array(IDS, "<i4").tobytes()),
        "attention_mask": ("BOOL", [2, 6], np.array(ATTENTION, "?").tobytes()),
        "token_type_ids": ("INT64", [2, 6], bytes(96)),
    }
    expected = outputs(infer(api, "tiny", numbers("input_ids", IDS), numbers("attention_mask", ATTENTION)))

    assert expected["logits"].tolist() == outputs(binary(api, "tiny", parts))["logits"].tolist()


@pytest.mark.parametrize(
    ("data", "shape", "said"),
    [
        (packed("good") + b"\0", [1], "1 texts"),
        (packed("good")[:-1], [1], "1 texts"),
        (packed("good")[:2], [1], "1 texts"),
        (b"\xff\xff\xff\xffgood", [1], "1 texts"),
        (packed("good"), [2], "2 texts"),
        (packed(b"\xff"), [1], "UTF-8"),
    ],
)
def test_broken_binary_texts_are_refused(api: Send, data: bytes, shape: list[int], said: str) -> None:
    assert said in refused(binary(api, "tiny", {"inputs": ("BYTES", shape, data)}))


@pytest.mark.parametrize("header", ["0", "-1", "x", "1000000", "٣", "1" * 40])
def test_an_invalid_length_of_the_json_part_is_refused(api: Send, header: str) -> None:
    response = api("POST", "/v2/models/tiny/infer", content=b"{}", headers=[(HEADER.encode(), header.encode())])

    assert "`Inference-Header-Content-Length` is" in rejected(response, 400, "malformed")


def test_binary_tensors_with_wrong_sizes_are_refused(api: Send) -> None:
    """Missing bytes, extra bytes, a missing header, and both or neither of `data` and a binary size have different errors."""
    head = json.dumps({"inputs": [{"name": "inputs", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 9}}]}).encode()
    both = texts("inputs", "good") | {"parameters": {"binary_data_size": 0}}
    neither = {"name": "inputs", "datatype": "BYTES", "shape": [1]}
    short = api("POST", "/v2/models/tiny/infer", content=head + b"1234", headers={HEADER: str(len(head))})
    long = api("POST", "/v2/models/tiny/infer", content=head + b"0123456789", headers={HEADER: str(len(head))})
    without = api("POST", "/v2/models/tiny/infer", content=head)

    assert " 4 bytes " in rejected(short, 400, "malformed")
    assert " 1 bytes " in rejected(long, 400, "malformed")
    assert "`Inference-Header-Content-Length` is missing" in rejected(without, 400, "malformed")
    assert "`data` and `parameters.binary_data_size`" in refused(infer(api, "tiny", both))
    assert "`data` and `parameters.binary_data_size`" in refused(infer(api, "tiny", neither))
    assert "`input_ids` has 23 bytes" in refused(binary(api, "tiny", {"input_ids": ("INT64", [1, 3], bytes(23))}))


# Refused requests.

GOOD = texts("inputs", "good")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "`the body` is wrong"),
        ({}, "`inputs` is missing"),
        ({"inputs": []}, "`inputs` is wrong"),
        ({"inputs": [GOOD], "output": []}, "did you mean `outputs`?"),
        ({"inputs": [GOOD | {"shpe": 1}]}, "`inputs[0]` has no `shpe`; did you mean `shape`?"),
        ({"inputs": [GOOD | {"parameters": {"shared_memory_region": "a"}}]}, "`inputs[0].parameters` has no `shared_memory_region`"),
        ({"inputs": [GOOD | {"shape": [-1]}]}, "`inputs[0].shape[0]`"),
        ({"inputs": [GOOD | {"shape": []}]}, "`inputs[0].shape`"),
        ({"inputs": [GOOD | {"shape": [1] * 9}]}, "`inputs[0].shape`"),
        ({"inputs": [GOOD | {"shape": [1, 2]}]}, "`inputs` has the shape [1, 2]"),
        ({"inputs": [GOOD | {"shape": [2]}]}, "`data` of `inputs` has 1 values"),
        ({"inputs": [GOOD | {"shape": [2, 1], "data": [["a"], ["b", "c"]]}]}, "nesting of `data` of `inputs`"),
        ({"inputs": [GOOD | {"shape": [1], "data": [["a"]]}]}, "a list of 1"),
        ({"inputs": [GOOD | {"data": [None]}]}, "is null"),
        ({"inputs": [GOOD | {"datatype": "bytes"}]}, "`inputs[0].datatype`"),
        ({"inputs": [GOOD | {"datatype": "INT64", "data": [1]}]}, "`inputs` is INT64"),
        ({"inputs": [GOOD, GOOD]}, "`inputs` twice"),
        ({"inputs": [GOOD, texts("text", "bad")]}, "`text` is another name"),
        ({"inputs": [texts("input", "good")]}, "did you mean `inputs`?"),
        ({"inputs": [texts("text_pair", "good")]}, "needs the input `inputs`"),
        ({"inputs": [GOOD, texts("text_pair", "a", "b")]}, "1 `inputs` and 2 `text_pair`"),
        ({"inputs": [GOOD], "outputs": [{"name": "logit"}]}, "has no `logit`"),
        ({"inputs": [GOOD], "outputs": [{"name": "json"}, {"name": "json"}]}, "`outputs` has a duplicate"),
        ({"inputs": [GOOD], "outputs": [{"name": "json", "parameters": {"classification": 1}}]}, "`scores`"),
        ({"inputs": [GOOD], "outputs": [{"name": "json", "parameters": {"binary": True}}]}, "did you mean `binary_data`?"),
        ({"inputs": [GOOD], "parameters": {"topk": 1}}, "did you mean `top_k`?"),
        ({"inputs": [GOOD], "parameters": {"top_k": "1"}}, "`parameters.top_k`"),
        ({"inputs": [GOOD], "parameters": {"sequence_id": 5}}, "`parameters.sequence_id` is 5"),
        ({"inputs": [GOOD], "parameters": {"priority": 1}}, "`parameters.priority` is 1"),
        ({"inputs": [GOOD], "parameters": {"binary_data_output": 1}}, "`parameters.binary_data_output` is 1"),
        ({"inputs": [GOOD], "parameters": {"timeout": -1}}, "`parameters.timeout` is -1"),
        ({"inputs": [GOOD], "parameters": {"timeout": 10**13}}, "120000 ms"),
        ({"inputs": [GOOD], "parameters": {"timeout": 10**4299}}, "`parameters.timeout` is 1000"),
        ({"inputs": [GOOD], "parameters": {"priority": [1]}}, "`parameters.priority` is a list of 1"),
        ({"inputs": [GOOD], "parameters": []}, "`parameters` is wrong"),
        ({"inputs": [GOOD], "id": 5}, "`id` is wrong"),
    ],
)
def test_the_error_names_the_invalid_field(api: Send, body: Any, said: str) -> None:
    assert said in refused(api("POST", "/v2/models/tiny/infer", json=body))


@pytest.mark.parametrize("shape", [[10**12], [10**12, 1], [2**62], [2**62] * 8, [10**400, 1], [10**4299]])
def test_a_huge_shape_is_refused(api: Send, shape: list[int]) -> None:
    ids = numbers("input_ids", [[2, 3]]) | {"shape": [*shape[:1], 2]}
    content = json.dumps({"inputs": [GOOD | {"shape": shape}]}).encode()

    response = api("POST", "/v2/models/tiny/infer", content=content)
    assert 413 == response.status_code or "shape" in refused(response)
    assert infer(api, "tiny", ids).status_code in (413, 422)
    assert infer(api, "tiny", numbers("input_ids", [[2, 3]]) | {"shape": [1, 10**12]}).status_code == 422


def test_too_many_tensors_or_rows_are_refused(api: Send) -> None:
    many = [texts(f"a{i}", "good") for i in range(17)]
    assert "`inputs` is wrong" in refused(infer(api, "tiny", *many))
    assert "`inputs` has 5000 rows" in rejected(infer(api, "tiny", texts("inputs", *["a"] * 5000)), 413, "too_large")
    assert "`input_ids` has 5000 rows" in rejected(infer(api, "tiny", numbers("input_ids", [[2, 3]] * 5000)), 413, "too_large")


def test_the_timeout_parameter_is_a_deadline(api: Send) -> None:
    """`timeout` is in microseconds, and 0 sets no deadline. A missed deadline is 429 or 504."""
    assert 200 == infer(api, "tiny", GOOD, parameters={"timeout": 0}).status_code
    assert 200 == infer(api, "tiny", GOOD, parameters={"timeout": 5_000_000}).status_code
    assert infer(api, "tiny", GOOD, parameters={"timeout": 1}).status_code in (429, 504)


def test_the_deadline_header_is_validated_too(api: Send) -> None:
    response = infer(api, "tiny", GOOD, parameters={"timeout": 5_000_000}, headers={"x-request-timeout-ms": "soon"})

    assert "`x-request-timeout-ms` is `soon`" in refused(response)


def test_compressed_and_empty_bodies_are_refused(api: Send) -> None:
    rejected(infer(api, "tiny", GOOD, headers={"content-encoding": "gzip"}), 415, "content_encoding")
    rejected(api("POST", "/v2/models/tiny/infer", content=b""), 400, "malformed")


def test_only_the_version_of_the_bundle_is_found(api: Send) -> None:
    """Another version is 404, as is an unknown model."""
    version = api("GET", "/v2/models/tiny").json()["versions"][0]
    found = api("POST", f"/v2/models/tiny/versions/{version}/infer", json={"inputs": [GOOD]})

    assert version == found.json()["model_version"]
    wrong = api("POST", "/v2/models/tiny/versions/1/infer", json={"inputs": [GOOD]})
    assert f"`{version}`" in rejected(wrong, 404, "not_found")
    assert "did you mean `tiny`?" in rejected(infer(api, "tinny", GOOD), 404, "not_found")
    rejected(infer(api, "tiny", GOOD, texts("query", "a")), 422, "invalid_value")


def test_an_unknown_version_is_not_logged(api: Send, caplog: pytest.LogCaptureFixture) -> None:
    api("POST", "/v2/models/tiny/versions/my-secret/infer", json={"inputs": [GOOD]})
    api("GET", "/v2/models/tiny/versions/my-secret")

    messages = [record.getMessage() for record in caplog.records if record.name.startswith("bertserve")]
    lines = [message for message in messages if " 404 " in f" {message}"]  # a summary of errors from earlier tests can be logged in between
    assert [True, True] == ["/v2/models/{name}/versions/{version}" in line for line in lines]
    assert [] == [line for line in lines if "my-secret" in line]


# Routes other than `infer`.


def test_server_metadata_and_health_are_served(api: Send) -> None:
    server = api("GET", "/v2").json()

    assert ("bertserve", True) == (server["name"], {"binary_tensor_data", "model_repository", "statistics"} <= set(server["extensions"]))
    assert server == api("GET", "/v2/").json()
    assert {"live": True} == api("GET", "/v2/health/live").json()
    assert {"ready": True, "live": True} == api("GET", "/v2/health/ready").json()


@pytest.mark.parametrize("model", [*TASKS, "cross", "nli"])
def test_model_metadata_match_the_requests_and_responses(api: Send, model: str) -> None:
    """A request with all inputs of the metadata returns all its outputs with the same ranks, for texts and for token ids."""
    described = api("GET", f"/v2/models/{model}").json()
    text = "a [MASK] film" if model == "masks" else "good film"
    found = infer(
        api, model, *(texts(field["name"], *[text] * (1 + (field["name"] == "choices"))) for field in described["inputs"])
    ).json()["outputs"]
    ids = [numbers(field["name"], [[2, 4, 3]] if field["name"] == "input_ids" else [[1, 1, 1]]) for field in described["tensors"]["inputs"]]
    raw = infer(api, model, *ids).json()["outputs"]

    def shown(fields: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
        return [(field["name"], field["datatype"], len(field["shape"])) for field in fields]

    assert (model, "onnx_onnxv1") == (described["name"], described["platform"])
    assert shown(described["outputs"]) == shown(found)
    assert shown(described["tensors"]["outputs"]) == shown(raw)


def test_routes_of_a_model_accept_its_version_in_the_path(api: Send) -> None:
    version = api("GET", "/v2/models/nli").json()["versions"][0]
    infer(api, "nli", GOOD)
    for suffix in ("", "/ready", "/config", "/stats"):
        assert api("GET", f"/v2/models/nli{suffix}").json() == api("GET", f"/v2/models/nli/versions/{version}{suffix}").json()
        rejected(api("GET", f"/v2/models/nli/versions/1{suffix}"), 404, "not_found")
        rejected(api("GET", f"/v2/models/none{suffix}"), 404, "not_found")

    assert {"name": "nli", "ready": True} == api("GET", "/v2/models/nli/ready").json()
    config = api("GET", "/v2/models/nli/config").json()
    assert [("inputs", "TYPE_STRING", [1], False), ("text_pair", "TYPE_STRING", [1], True)] == [tuple(i.values()) for i in config["input"]]


def test_statistics_count_requests(tmp_path: Path) -> None:
    tiny.bundle(tmp_path)
    with started(tmp_path) as api:
        before = api("GET", "/v2/models/tiny/stats").json()["model_stats"][0]
        infer(api, "tiny", texts("inputs", *TEXTS))
        infer(api, "tiny", numbers("input_ids", [[2, 3]]))
        infer(api, "tiny", texts("wrong", "a"))
        (after,) = api("GET", "/v2/models/stats").json()["model_stats"]

    counts = {name: part["count"] for name, part in after["inference_stats"].items()}
    assert 0 == before["inference_count"] == before["inference_stats"]["success"]["count"]
    assert (3, "tiny") == (after["inference_count"], after["name"])
    assert {2} == {counts[name] for name in ("success", "queue", "compute_input", "compute_infer", "compute_output")}
    assert 1 == counts["fail"]
    assert after["inference_stats"]["compute_infer"]["ns"] > 0


def test_the_repository_lists_loads_and_unloads_models(models: Path) -> None:
    async def check(client: httpx.AsyncClient) -> list[httpx.Response]:
        admin = {"authorization": "Bearer trident"}
        path = "/v2/repository/models/tiny"
        return [
            await client.post("/v2/repository/index", headers=admin),
            await client.post(f"{path}/unload", headers={"authorization": "Bearer swordfish"}),
            await client.post(f"{path}/unload", json={"parameters": {"unload_dependents": False}}, headers=admin),
            await client.post("/v2/repository/index", json={"ready": True}, headers=admin),
            await client.post(f"{path}/load", json={"parameters": {"config": "{}"}}, headers=admin),
            await client.post(f"{path}/load", content=b"", headers=admin),
            await client.get("/v2/models/tiny/ready"),
            await client.get("/v2/models/tiny", headers={}),
        ]

    (models.parent / "admin").write_text("trident")
    auth = Authenticator(keys(models.parent, "swordfish"), admin_keys=ApiKeys(models.parent / "admin"))
    index, forbidden, unloaded, empty, changed, loaded, ready, closed = play(build(Settings(models=models)), check, auth=auth)

    ((model,),) = (index.json(),)
    assert ("tiny", "READY", "") == (model["name"], model["state"], model["reason"])
    rejected(forbidden, 403, "forbidden")
    assert [200, 200, 200] == [unloaded.status_code, loaded.status_code, ready.status_code]
    assert [] == empty.json()
    assert "`config`" in rejected(changed, 422, "invalid_value")
    rejected(closed, 401, "unauthorized")


@pytest.mark.parametrize(
    ("body", "status"), [(b"[]", 400), (b"{", 400), (b'{"redy": true}', 422), (b'{"ready": 1}', 422), (b" " * 65537, 413)]
)
def test_invalid_bodies_of_the_repository_index_are_refused(api: Send, body: bytes, status: int) -> None:
    assert status == api("POST", "/v2/repository/index", content=body).status_code


# KServe's V1 protocol.


def test_instances_give_predictions(api: Send) -> None:
    """Each prediction equals the result of `/models/NAME` with the same parameters; `candidate_labels` selects zero-shot classification."""
    question = {"question": QUESTION, "context": CONTEXT}
    labels = {"candidate_labels": ["dull", "great"]}

    def predictions(model: str, instances: Any, **parameters: Any) -> Any:
        return posted(api, f"/v1/models/{model}:predict", instances=instances, parameters=parameters)["predictions"]

    assert posted(api, "/models/tiny", inputs=TEXTS, parameters={"top_k": 1}) == predictions("tiny", TEXTS, top_k=1)
    assert [posted(api, "/models/spans", inputs=question)] == predictions("spans", [question])
    assert posted(api, "/models/nli", inputs=TEXTS, parameters=labels) == predictions("nli", TEXTS, **labels)
    assert [] == predictions("tiny", [])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"instances": "good"}, "`instances`"),
        ([], "`instances`"),
        ({"inputs": ["good"]}, "`instances`"),
        ({"instances": ["good"], "parameter": {}}, "did you mean `parameters`?"),
        ({"instances": ["good"], "parameters": {"topk": 1}}, "did you mean `top_k`?"),
        ({"instances": [5]}, "is wrong"),
    ],
)
def test_invalid_instances_are_refused(api: Send, body: Any, said: str) -> None:
    assert said in refused(api("POST", "/v1/models/tiny:predict", json=body))
