"""Masks that are filled together: the search against all fillings of a text, its runs against what was counted, and the endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from application import Send, assert_same, call, started
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.bundle.files import load_bundle
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import fill_mask, joint_masks
from bertserve.service.tasks.batch import Batch, TaskRun
from bertserve.service.tasks.batch import begin as start
from bertserve.service.tasks.cost import Cost
from bertserve.service.tasks.joint_masks import prepare, search, slots_of
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from fakes import Head
from task_runs import Begun, begin, send

LONG = "good " * 40
WORDS = ["good", "bad", "fine", "dull", "great"]


class Runs:
    """A tiny graph of masks that counts the tokens which it runs."""

    def __init__(self, folder: Path) -> None:
        made = load_bundle(tiny.bundle(folder, task="fill-mask"))
        self.manifest = made.manifest
        self.tokenizer = Tokenizer(made.tokenizer_path, made.manifest.tokenizer)
        self.engine = OnnxEngine(made.path / made.manifest.graphs[0].file, made.manifest.graphs[0], pad_id=0, padding_side="right")
        self.tokens = 0
        self.stages: list[int] = []

    def of(self, encoding: Encoding) -> Any:
        return self.engine.run([encoding])[0]

    def drive(self, begun: Begun) -> list[Any]:
        """Returns the result of a search, batch by batch. The first one has no encodings, and the cost of all."""
        self.tokens, self.stages = 0, []
        reserved_tokens = begun.batch.cost.reserved_tokens
        result = begun.advance([])
        while isinstance(result, Batch):
            self.tokens += result.tokens
            self.stages.append(len(result.encodings))
            assert self.tokens + result.cost.reserved_tokens <= reserved_tokens
            result = send(begun.run, result, [self.of(encoding) for encoding in result.encodings])
        return list(result)

    def ids(self, text: str) -> list[int]:
        """Returns the token ids of a text, and those of special tokens around them not."""
        return self.tokenizer.tokenize([text])[0].ids

    def brute_force(self, ids: list[int], choices: Sequence[Sequence[int]]) -> dict[tuple[int, ...], float]:
        """Returns the score of each filling of the masks: product of the softmax at each mask, those before it filled."""
        places = [i for i, id_ in enumerate(ids) if id_ == 4]

        @cache
        def probabilities(before: tuple[int, ...]) -> Any:
            filled = list(ids)
            for place, token in zip(places, before, strict=False):
                filled[place] = token
            row = np.array([2, *filled, 3])
            logits = self.of(Encoding(row, np.zeros_like(row), masks=(1 + places[len(before)],)))["logits"][0].astype(np.float64)
            powers = np.exp(logits - logits.max())
            return powers / powers.sum()

        return {
            tokens: float(np.prod([probabilities(tokens[:i])[token] for i, token in enumerate(tokens)])) for tokens in product(*choices)
        }


@pytest.fixture(name="runs", scope="module")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("masks"))


def text_of(runs: Runs, text: str, *, beam: int, top_k: int, targets: Sequence[str] | None = None) -> Begun:
    """Returns the search of a text, with a beam of any width, before it runs anything."""
    parameters = fill_mask.FillMaskParameters.model_construct(
        joint=True, beam=beam, top_k=top_k, targets=None if targets is None else list(targets)
    )
    begun = begin(fill_mask, fill_mask.FillMaskRequest(text, parameters), runs.tokenizer)
    assert [] == begun.batch.encodings
    return begun


def test_a_beam_wide_enough_finds_the_best_of_all_fillings(runs: Runs) -> None:
    """Of two masks and the whole vocabulary, in the order and with the scores of brute force, which add up to 1."""
    text = "a [MASK] film was [MASK] !"
    vocabulary = range(runs.tokenizer.vocabulary_size)
    every = runs.brute_force(runs.ids(text), [vocabulary, vocabulary])
    assert pytest.approx(1, abs=1e-9) == sum(every.values())

    found = runs.drive(text_of(runs, text, beam=len(vocabulary), top_k=50))
    best = sorted(every.items(), key=lambda item: -item[1])[:50]
    assert pytest.approx([score for _, score in best], rel=1e-6) == [item["score"] for item in found]
    assert {tokens for tokens, _ in best[:40]} <= {tuple(item["tokens"]) for item in found}
    assert [1, len(vocabulary)] == runs.stages
    assert all(pytest.approx(item["score"], rel=1e-6) == every[tuple(item["tokens"])] for item in found)


def test_a_narrow_beam_finds_fillings_of_their_true_scores(runs: Runs) -> None:
    """What it keeps has the score that brute force gives it, and no better one is lost that begins with what it kept."""
    text = "[MASK] [MASK] film"
    vocabulary = range(runs.tokenizer.vocabulary_size)
    every = runs.brute_force(runs.ids(text), [vocabulary, vocabulary])
    found = runs.drive(text_of(runs, text, beam=2, top_k=6))
    firsts = runs.brute_force(runs.ids(text), [vocabulary])
    kept = {tokens[0] for tokens in sorted(firsts, key=lambda tokens: -firsts[tokens])[:2]}
    expected = sorted((tokens for tokens in every if tokens[0] in kept), key=lambda tokens: -every[tokens])[:6]
    assert expected == [tuple(item["tokens"]) for item in found]
    assert [1, 2] == runs.stages


def test_a_filling_is_given_as_tokens_and_as_text(runs: Runs) -> None:
    """Tokens from left to right, each as the vocabulary spells it, and the whole text without special tokens."""
    (best, *_) = runs.drive(text_of(runs, "a [MASK] and [MASK] film", beam=4, top_k=3, targets=["good", "bad"]))
    names = [tiny.VOCABULARY[token] for token in best["tokens"]]
    assert names == best["token_strs"] == best["targets"]
    assert f"a {names[0]} and {names[1]} film" == best["sequence"]
    assert {"score", "tokens", "token_strs", "targets", "sequence"} == best.keys()


def test_only_a_part_of_a_long_text_is_filled(runs: Runs) -> None:
    """The rest of the text is not copied for each filling."""
    ids = [5] * 10_000 + [4, 6, 4] + [5] * 10_000
    (pattern,), _, _ = prepare(ids, [10_000, 10_002], [joint_masks.slot_of_any_token(9)], beam=8, tokenizer=runs.tokenizer)
    assert [5, 7, 6, 4] == pattern.filled((7,), 9_999, 10_003)
    assert [7, 6, 8] == pattern.filled((7, 8), 10_000, 10_003)


def test_ways_to_fill_a_mask_are_counted_by_prefix() -> None:
    slots = slots_of({(1,): "a", (1, 2): "ab", (1, 3): "ac", (2, 2): "bb"})
    assert [[1, 1], [1, 2, 3]] == [list(slot.ways) for slot in slots]


def test_targets_are_counted_once_for_all_patterns(runs: Runs) -> None:
    """The 64 texts of six masks look at no target."""

    class Unread(dict[tuple[int, ...], str]):
        def __iter__(self) -> Any:
            raise AssertionError("the targets were read")

    slots = [replace(slot, targets=Unread(slot.targets or {})) for slot in slots_of({(1,): "a", (1, 2): "ab"})]
    patterns, _, _ = prepare([4] * 6, range(6), slots, beam=8, tokenizer=runs.tokenizer)
    assert 64 == len(patterns)
    assert [1] * 6 == patterns[0].runs


@pytest.mark.parametrize("masks", [1, 2, 3])
def test_targets_of_several_pieces_have_their_joint_score(runs: Runs, masks: int) -> None:
    targets = {"good": ["good"], "gob": ["g", "##o", "##b"], "xyz": ["x", "##y", "##z"], "bad": ["bad"]}
    pieces = {target: [tiny.VOCABULARY.index(piece) for piece in each] for target, each in targets.items()}
    expected = {}
    for chosen in product(targets, repeat=masks):
        tokens = [token for target in chosen for token in pieces[target]]
        text = "a " + " and ".join(" ".join(["[MASK]"] * len(pieces[target])) for target in chosen)
        expected[chosen] = runs.brute_force(runs.ids(text), [[token] for token in tokens])[tuple(tokens)]
    text = "a " + " and ".join(["[MASK]"] * masks)
    found = runs.drive(text_of(runs, text, beam=64, top_k=1000, targets=list(targets)))

    assert len(expected) == len(found)
    assert {chosen: pytest.approx(score, rel=1e-6) for chosen, score in expected.items()} == {
        tuple(item["targets"]): item["score"] for item in found
    }
    assert sorted((item["score"] for item in found), reverse=True) == [item["score"] for item in found]
    assert "a " + " and ".join(found[0]["targets"]) == found[0]["sequence"]


def test_masks_far_into_a_long_text_are_in_one_window(runs: Runs) -> None:
    """All masks are read together, with as much of the text around them as there is room for; `sequence` is the whole text."""
    text = f"{LONG} [MASK] bad bad [MASK] {LONG}"
    begun = text_of(runs, text, beam=2, top_k=1)
    encoding = begun.advance([]).encodings[0]
    assert (32, 1, 2) == (len(encoding), len(encoding.masks), int((encoding.ids == 4).sum()))
    assert begun.batch.truncated
    assert 84 == len(runs.drive(text_of(runs, text, beam=2, top_k=1))[0]["sequence"].split())
    with pytest.raises(InvalidValueError, match=r"42 tokens .* 30; .*`joint`"):
        text_of(runs, f"[MASK] {LONG} [MASK]", beam=2, top_k=1)


@pytest.mark.parametrize("before", range(0, 60, 7))
@pytest.mark.parametrize("between", [0, 11, 28])
def test_a_window_has_every_mask(runs: Runs, before: int, between: int) -> None:
    begun = text_of(runs, "good " * before + "[MASK] " + "bad " * between + "[MASK]" + " good" * (40 - before // 2), beam=2, top_k=1)
    encoding = begun.advance([]).encodings[0]
    assert (32, 2) == (len(encoding), int((encoding.ids == 4).sum()))
    assert 4 == encoding.ids[encoding.masks[0]]


@pytest.mark.parametrize(
    ("text", "targets", "value"),
    [
        ("[MASK]" * 17, None, "17 masks .* 16;"),
        ("[MASK] [MASK] [MASK]", ["good", "xyzxyz"], "18 masks .*`joint` .* 16;"),
        ("[MASK]" * 7, ["good", "xy"], "7 masks .* 2 .* 128 texts .* 64 "),
        ("[MASK]", ["", "\u200b"], "`targets`"),
        ("no mask", None, r"`\[MASK\]`"),
    ],
)
def test_what_cannot_be_searched_is_refused(runs: Runs, text: str, targets: list[str] | None, value: str) -> None:
    with pytest.raises(InvalidValueError, match=value):
        text_of(runs, text, beam=2, top_k=1, targets=targets)


def test_equal_scores_come_by_token(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    """Of fillings that are equally good the first by id are kept, whatever the beam."""
    flat = {"logits": np.zeros((1, runs.tokenizer.vocabulary_size), dtype=np.float32)}
    monkeypatch.setattr(runs, "of", lambda encoding: flat)
    found = runs.drive(text_of(runs, "[MASK] [MASK]", beam=3, top_k=4))
    assert [[0, 0], [0, 1], [0, 2], [0, 3]] == [item["tokens"] for item in found]


def test_probabilities_that_underflow_keep_their_order(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    logits = np.full((1, runs.tokenizer.vocabulary_size), 3e4, dtype=np.float32)
    logits[0, :2] = [-1, 0]
    monkeypatch.setattr(runs, "of", lambda encoding: {"logits": logits})
    slots = slots_of({(0,): "worse", (1,): "better"})
    patterns, tokens, _ = prepare([4, 4, 4], [0, 1, 2], slots, beam=8, tokenizer=runs.tokenizer)

    def searched() -> TaskRun:
        yield Batch([], Cost(answer_bytes=0, reserved_tokens=tokens))
        return (yield from search(patterns, beam=8, top_k=8, tokenizer=runs.tokenizer))

    run = searched()
    found = runs.drive(Begun(run, start(run)))
    assert [0.0] * 8 == [item["score"] for item in found]
    assert (["better"] * 3, ["worse"] * 3) == (found[0]["targets"], found[-1]["targets"])


# ---- the endpoint


@pytest.fixture(name="api", scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Send]:
    folder = tmp_path_factory.mktemp("served")
    tiny.bundle(folder, task="fill-mask")
    with started(folder) as send:
        yield send


def ask(api: Send, inputs: Any, **parameters: Any) -> Any:
    response = api("POST", "/fill-mask", json={"inputs": inputs, "parameters": {"joint": True, **parameters}})
    body = response.json()
    return body if response.status_code == 200 else (response.status_code, body["error"])


def test_texts_are_filled_as_if_alone(api: Send, runs: Runs) -> None:
    """One text, several of different numbers of masks, and long ones that are tokenized on an inference thread: as the search run by hand has it."""
    texts = ["a [MASK] film was [MASK] !", "[MASK]", "the [MASK] [MASK] [MASK] book", "", f"{'good ' * 150} [MASK] [MASK]"]
    expected = [runs.drive(text_of(runs, text, beam=3, top_k=4)) for text in texts if text]
    found = ask(api, [text for text in texts if text], beam=3, top_k=4)
    for one, other in zip(expected, found, strict=True):
        assert [item["tokens"] for item in one] == [item["tokens"] for item in other]
        assert pytest.approx([item["score"] for item in one], rel=1e-5) == [item["score"] for item in other]
    alone = ask(api, texts[0], beam=3, top_k=4)
    assert [item["sequence"] for item in found[0]] == [item["sequence"] for item in alone]
    assert [] == ask(api, [])


def test_one_mask_has_the_scores_of_the_ordinary_answer(api: Send) -> None:
    ordinary = api("POST", "/fill-mask", json={"inputs": "a [MASK] film", "parameters": {"top_k": 9}}).json()
    joint = ask(api, "a [MASK] film", top_k=9, beam=1)
    assert [[item["token"]] for item in ordinary] == [item["tokens"] for item in joint]
    assert [item["sequence"] for item in ordinary] == [item["sequence"] for item in joint]
    assert pytest.approx([item["score"] for item in ordinary], rel=1e-5) == [item["score"] for item in joint]


@pytest.mark.parametrize("joint", [False, True])
def test_fillings_are_decoded_a_few_at_a_time(api: Send, monkeypatch: pytest.MonkeyPatch, joint: bool) -> None:
    """So that other requests get a turn: 30,000 fillings of a short text take a second to decode."""
    body = {"inputs": f"{LONG} [MASK] or [MASK] film", "parameters": {"joint": joint, "top_k": 60}}
    whole = api("POST", "/fill-mask", json=body).json()
    sizes: list[int] = []
    decode_all = Tokenizer.decode_all

    def counted(self: Tokenizer, texts: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        sizes.append(len(texts))
        return decode_all(self, texts, skip_special=skip_special)

    monkeypatch.setattr(Tokenizer, "decode_all", counted)
    for module in (fill_mask, joint_masks):
        monkeypatch.setattr(module, "FILLINGS_PER_STEP", 7)
    assert_same(whole, api("POST", "/fill-mask", json=body).json())  # batches may differ, and with them the last digits
    assert max(sizes) <= 1 + 7


def test_targets_are_searched_together(api: Send, runs: Runs) -> None:
    """A wide beam gives all combinations, unknown pieces give a warning, and the answers equal those by hand."""
    expected = runs.drive(text_of(runs, "a [MASK] or [MASK] film", beam=64, top_k=100, targets=WORDS))
    found = ask(api, "a [MASK] or [MASK] film", beam=64, top_k=100, targets=WORDS)
    assert 25 == len(found)
    assert [item["targets"] for item in expected] == [item["targets"] for item in found]
    warned = api("POST", "/fill-mask", json={"inputs": "a [MASK]", "parameters": {"joint": True, "targets": ["good", "看"]}})
    assert "targets; 1 of 2 " in warned.headers["x-hf-warning"]


@pytest.mark.parametrize(
    ("parameters", "value"), [({"joint": False, "beam": 3}, "`beam` needs `joint`"), ({"beams": 3}, "did you mean `beam`?")]
)
def test_wrong_parameters_are_named(api: Send, parameters: dict[str, Any], value: str) -> None:
    status, error = ask(api, "a [MASK]", **parameters)
    assert (422, True) == (status, value in error), error


def test_the_client_that_reads_one_token_is_told(api: Send) -> None:
    response = api(
        "POST",
        "/fill-mask",
        json={"inputs": "a [MASK]", "parameters": {"joint": True}},
        headers={"user-agent": "@huggingface/inference/4.13"},
    )
    assert (422, True) == (response.status_code, "@huggingface/inference" in response.json()["error"])


def test_a_search_that_would_hold_too_much_is_refused(api: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variant keeps its best tokens until the others have run: of a wide beam and a great `top_k` more than the answer has."""
    monkeypatch.setattr("bertserve.service.tasks.cost.MAX_HELD", 12_000)
    assert 50 == len(ask(api, "[MASK] [MASK]", top_k=50, beam=2))
    status, error = ask(api, "[MASK] [MASK]", top_k=50, beam=64)
    assert (413, True) == (status, "12000" in error), error


def test_what_is_estimated_is_about_what_runs(runs: Runs) -> None:
    """Admission counts all variants: each mask but the first is as many texts as the beam is wide."""
    text = "the very good [MASK] film and the [MASK] [MASK] book"
    body = fill_mask.FillMaskBody(inputs=text, parameters=fill_mask.FillMaskParameters(joint=True, beam=4))
    (request,) = body.requests(Head(mask=runs.manifest.mask))
    runs.drive(begin(fill_mask, request, runs.tokenizer))
    estimated = fill_mask.estimate(request, 32)
    assert [1, 4, 4] == runs.stages
    assert estimated / 2 < runs.tokens < 2 * estimated
    plain = fill_mask.FillMaskRequest(text, fill_mask.FillMaskParameters(top_k=1))
    assert 9 == estimated / fill_mask.estimate(plain, 32)


def test_a_search_larger_than_the_queue_is_refused(tmp_path: Path) -> None:
    """Also where its texts would fit: all variants count, before any of them runs."""
    tiny.bundle(tmp_path, task="fill-mask")
    settings = {"max_queue_tokens": 600, "max_batch_tokens": 64}
    few, many = (ask(partial(call, tmp_path, settings=settings), "good " * 6 + "[MASK] [MASK] [MASK]", beam=beam) for beam in (4, 64))
    assert 5 == len(few)
    assert (413, True) == (many[0], "holds 600" in many[1]), many


def test_a_search_ends_with_its_request(tmp_path: Path) -> None:
    tiny.bundle(tmp_path, task="fill-mask")
    with started(tmp_path) as send:
        ask(send, ["[MASK] [MASK]"] * 5)
        ask(send, ["[MASK]" * 20])
        page = send("GET", "/metrics").text
    assert "bertserve_queue_tokens 0.0" in page or "queue_tokens 0.0" in page


def test_limits_are_what_the_docs_say() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/http-api.md").read_text(encoding="utf-8")
    for number in (joint_masks.MAX_JOINT_MASKS, joint_masks.MAX_PATTERNS, joint_masks.MAX_BEAM, joint_masks.DEFAULT_BEAM):
        assert f" {number}" in page[page.index("#### Masks filled together") :]
