"""Joint mask filling: the search compared with all fillings of a text, its runs compared with the reserved tokens, and the endpoint."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import fill_mask
from bertserve.service.tasks.step import Step, TaskGenerator, drive
from bertserve.service.text.tokenizer import Encoding
from support import tiny
from support.app_client import Send, error_of, error_of_inputs, post, result_of
from support.bundles import Service
from support.task_runs import generator_of

LONG = "good " * 40
Search = Callable[[], TaskGenerator]


class Runs:
    """A tiny fill-mask graph; `stages` has the encodings of each step of the last search."""

    def __init__(self, folder: Path) -> None:
        bundle = Service(tiny.bundle(folder, task="fill-mask"))
        self.tokenizer, self.engine = bundle.tokenizer, bundle.engine
        self.stages: list[int] = []

    def of(self, encoding: Encoding) -> Any:
        return self.engine.run([encoding])[0]

    def drive(self, search: Search) -> list[Any]:
        """Returns the result of a search. Its first step has the cost of all steps."""
        tokens, self.stages = 0, []

        def execute(step: Step) -> list[Any]:
            nonlocal tokens
            tokens += sum(len(encoding) + len(encoding.masks) for encoding in step.encodings)
            self.stages.append(len(step.encodings))
            return [self.of(encoding) for encoding in step.encodings]

        result = drive(search(), execute)
        assert tokens <= next(search()).cost.reserved_tokens
        return list(result)

    def ids(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens."""
        return self.tokenizer.tokenize([text])[0].ids

    def brute_force(self, ids: list[int], choices: Sequence[Sequence[int]]) -> dict[tuple[int, ...], float]:
        """Returns filling -> score: the product of the softmax at each mask, with the masks before it filled."""
        places = [i for i, id_ in enumerate(ids) if id_ == 4]

        @cache
        def probabilities(before: tuple[int, ...]) -> Any:
            token_ids = list(ids)
            for place, token in zip(places, before, strict=False):
                token_ids[place] = token
            row = np.array([2, *token_ids, 3])
            logits = self.of(Encoding(row, np.zeros_like(row), masks=(1 + places[len(before)],)))["logits"][0].astype(np.float64)
            powers = np.exp(logits - logits.max())
            return powers / powers.sum()

        return {tokens: float(np.prod([probabilities(tokens[:i])[id_] for i, id_ in enumerate(tokens)])) for tokens in product(*choices)}


@pytest.fixture(name="runs", scope="module")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("masks"))


def text_of(runs: Runs, text: str, *, beam: int, top_k: int, targets: Sequence[str] | None = None) -> Search:
    """Returns the search for a text, whose first step has no encodings. The beam can have any width."""
    parameters = fill_mask.FillMaskParameters.model_construct(
        joint=True, beam=beam, top_k=top_k, targets=None if targets is None else list(targets)
    )
    shared = None if targets is None else partial(fill_mask.target_slots, targets)
    search = partial(generator_of, fill_mask, fill_mask.FillMaskInput(text, parameters, resolve_targets=shared), runs.tokenizer)
    assert next(search()).encodings == []
    return search


@pytest.mark.parametrize("beam", [2, len(tiny.VOCABULARY)])
def test_a_beam_finds_the_best_fillings_that_begin_with_its_kept_tokens(runs: Runs, beam: int) -> None:
    """Order and scores equal brute force. A beam as wide as the vocabulary keeps all tokens."""
    text = "[MASK] [MASK] film"
    vocabulary = range(len(tiny.VOCABULARY))
    every = runs.brute_force(runs.ids(text), [vocabulary, vocabulary])
    firsts = runs.brute_force(runs.ids(text), [vocabulary])
    best_firsts = {tokens[0] for tokens in sorted(firsts, key=lambda tokens: -firsts[tokens])[:beam]}
    expected = sorted((tokens for tokens in every if tokens[0] in best_firsts), key=lambda tokens: -every[tokens])[:6]
    actual = runs.drive(text_of(runs, text, beam=beam, top_k=6))
    assert [tuple(item["tokens"]) for item in actual] == expected
    assert [item["score"] for item in actual] == pytest.approx([every[tokens] for tokens in expected], rel=1e-6)
    assert runs.stages == [1, beam]


@pytest.mark.parametrize("masks", [1, 2, 3])
def test_targets_of_several_tokens_have_their_joint_score(runs: Runs, masks: int) -> None:
    targets = {"good": ["good"], "gob": ["g", "##o", "##b"], "xyz": ["x", "##y", "##z"], "bad": ["bad"]}
    pieces = {target: [tiny.VOCABULARY.index(piece) for piece in spelling] for target, spelling in targets.items()}
    expected = {}
    for combination in product(targets, repeat=masks):
        tokens = [token for target in combination for token in pieces[target]]
        text = "a " + " and ".join(" ".join(["[MASK]"] * len(pieces[target])) for target in combination)
        expected[combination] = runs.brute_force(runs.ids(text), [[token] for token in tokens])[tuple(tokens)]
    text = "a " + " and ".join(["[MASK]"] * masks)
    actual = runs.drive(text_of(runs, text, beam=64, top_k=1000, targets=list(targets)))

    assert len(actual) == len(expected)
    assert {tuple(item["targets"]): item["score"] for item in actual} == {
        combination: pytest.approx(score, rel=1e-6) for combination, score in expected.items()
    }
    assert [item["score"] for item in actual] == sorted((item["score"] for item in actual), reverse=True)
    assert actual[0]["sequence"] == "a " + " and ".join(actual[0]["targets"])


def test_masks_far_into_a_long_text_are_in_one_window(runs: Runs) -> None:
    """The window has all masks and as much text around them as fits. `sequence` is the whole text."""
    text = f"{LONG} [MASK] bad bad [MASK] {LONG}"
    steps = text_of(runs, text, beam=2, top_k=1)()
    assert next(steps).truncated
    encoding = steps.send([]).encodings[0]
    assert len(encoding) == 32
    assert len(encoding.masks) == 1
    assert int((encoding.ids == 4).sum()) == 2
    assert len(str(runs.drive(text_of(runs, text, beam=2, top_k=1))[0]["sequence"]).split()) == 84
    with pytest.raises(InvalidValueError, match=r"42 .* 30.*`joint`"):
        text_of(runs, f"[MASK] {LONG} [MASK]", beam=2, top_k=1)


@pytest.mark.parametrize("before", range(0, 60, 7))
@pytest.mark.parametrize("between", [0, 11, 28])
def test_a_window_has_every_mask(runs: Runs, before: int, between: int) -> None:
    steps = text_of(runs, "good " * before + "[MASK] " + "bad " * between + "[MASK]" + " good" * (40 - before // 2), beam=2, top_k=1)()
    next(steps)
    encoding = steps.send([]).encodings[0]
    assert (len(encoding), int((encoding.ids == 4).sum())) == (32, 2)
    assert encoding.ids[encoding.masks[0]] == 4


@pytest.mark.parametrize(
    ("text", "targets", "value"),
    [
        ("[MASK]" * 17, None, "17 .* 16"),
        ("[MASK] [MASK] [MASK]", ["good", "xyzxyz"], "18 .*`joint`.* 16"),
        ("[MASK]" * 7, ["good", "xy"], "7 .* 2 .* 128 .* 64 "),
        ("[MASK]", ["", "\u200b"], "`targets`"),
        ("no mask", None, r"`\[MASK\]`"),
        ("a <mask> film", None, r"`\[MASK\]`.*`<mask>`"),
    ],
)
def test_an_impossible_or_too_large_search_is_refused(runs: Runs, text: str, targets: list[str] | None, value: str) -> None:
    with pytest.raises(InvalidValueError, match=value):
        text_of(runs, text, beam=2, top_k=1, targets=targets)


class EqualRuns(Runs):
    """A graph whose logits are all zero."""

    def of(self, encoding: Encoding) -> Any:
        return {"logits": np.zeros((1, self.tokenizer.vocabulary_size), dtype=np.float32)}


def test_fillings_with_equal_scores_are_ordered_by_token_id(tmp_path: Path) -> None:
    runs = EqualRuns(tmp_path)
    actual = runs.drive(text_of(runs, "[MASK] [MASK]", beam=3, top_k=4))
    assert [item["tokens"] for item in actual] == [[0, 0], [0, 1], [0, 2], [0, 3]]


def test_texts_in_a_list_are_filled_like_single_texts(api: Send, runs: Runs) -> None:
    """The results equal a search without the service, also for long texts, which an inference thread tokenizes."""
    texts = ["a [MASK] film was [MASK] !", "[MASK]", "the [MASK] [MASK] [MASK] book", "", f"{'good ' * 150} [MASK] [MASK]"]
    expected = [runs.drive(text_of(runs, text, beam=3, top_k=4)) for text in texts if text]
    actual = result_of(api, "/fill-mask", [text for text in texts if text], joint=True, beam=3, top_k=4)
    for one, other in zip(expected, actual, strict=True):
        assert [item["tokens"] for item in other] == [item["tokens"] for item in one]
        assert [item["score"] for item in other] == pytest.approx([item["score"] for item in one], rel=1e-5)
    alone = result_of(api, "/fill-mask", texts[0], joint=True, beam=3, top_k=4)
    assert [item["sequence"] for item in alone] == [item["sequence"] for item in actual[0]]
    assert result_of(api, "/fill-mask", [], joint=True) == []


def test_one_mask_has_the_same_scores_with_and_without_joint(api: Send) -> None:
    ordinary = result_of(api, "/fill-mask", "a [MASK] film", top_k=9)
    joint = result_of(api, "/fill-mask", "a [MASK] film", joint=True, top_k=9, beam=1)
    assert [item["tokens"] for item in joint] == [[item["token"]] for item in ordinary]
    assert [item["sequence"] for item in joint] == [item["sequence"] for item in ordinary]
    assert [item["score"] for item in joint] == pytest.approx([item["score"] for item in ordinary], rel=1e-5)


def test_an_unknown_target_gives_a_warning(api: Send) -> None:
    response = api("POST", "/fill-mask", json={"inputs": "a [MASK]", "parameters": {"joint": True, "targets": ["good", "看"]}})
    assert "targets; 1 of 2 " in response.headers["x-hf-warning"]


def test_a_beam_without_joint_is_refused(api: Send) -> None:
    assert "`beam`" in error_of_inputs(api, "/fill-mask", "a [MASK]", joint=False, beam=3)


def test_a_search_larger_than_the_queue_is_refused(tmp_path: Path) -> None:
    """All variants count before the first of them runs, even if the texts themselves would fit."""
    tiny.bundle(tmp_path, task="fill-mask")
    settings = {"max_queue_tokens": 600, "max_batch_tokens": 64}
    few, many = (
        post(
            tmp_path,
            {"inputs": "good " * 6 + "[MASK] [MASK] [MASK]", "parameters": {"joint": True, "beam": beam}},
            path="/fill-mask",
            settings=settings,
        )
        for beam in (4, 64)
    )
    assert len(few.json()) == 5
    assert " 525" in error_of(many, 413, "too_large")
