"""A random checkpoint is exported and answers like PyTorch, or it is refused with a reason that names the cause."""

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bertserve.export.errors import ExportError
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks import embed, fill_mask, multiple_choice, question_answering
from bertserve.service.text.windows import default_stride
from support.bundles import Service, exported
from support.random_checkpoints import AUTO, EMBED, Case, cases, write
from support.task_runs import answer_input, classify_input, ner_input

pytestmark = pytest.mark.torch
EXAMPLES, SEEDS = 5, 64
DYNAMO = 5  # one of this many seeds uses the slower tracer
ABSOLUTE, RELATIVE = 1e-4, 2e-5
TEXT_PIECES = ("good", " ", " film", "the", "CO2", "[E1]", "<url>", "ing", "new york", "é", "e\u0301", "🤖", "看", "שלום", "مرحبا", "\u202e", "\x00", "\x07",
         "\t\n", "\u00a0", "\u200b", "\ufeff", "ﬁ", "İ", "ß", "x" * 120, "!?", "\U0010ffff", "Film", "FILM", "##ing", "\u2581")  # fmt: skip
FIXED = ("", "   ", "A warm, funny and engaging film.", "the film was not very good, but the book is great! " * 12)


class User:
    """The checkpoint in transformers, in float32 with eager attention."""

    def __init__(self, case: Case, path: Path) -> None:
        self.case = case
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        base = path.parent / "checkpoint"
        self.model = AUTO[case.task].from_pretrained(base, dtype=torch.float32, attn_implementation="eager", return_dict=True).eval()
        if case.adapter:
            from peft import PeftModel

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.model = PeftModel.from_pretrained(self.model, path).eval()

    def windows(self, *texts: Any, **options: Any) -> list[dict[str, list[int]]]:
        """Returns the inputs of a text or a pair: truncated, or as windows in text order if `options` have a stride."""
        backwards = "stride" in options and self.tokenizer.truncation_side == "left"
        encoding = self.tokenizer(
            *texts, truncation=options.pop("truncation", True), max_length=options.pop("max_length", self.case.limit), **options
        )
        encoding.pop("overflow_to_sample_mapping", None)
        nested = any(isinstance(values, list) for values in encoding["input_ids"])
        if self.case.template == "one type" and nested and "token_type_ids" in encoding:
            # the library gives other types than the template's from the second window on
            encoding["token_type_ids"] = [[0] * len(ids) for ids in encoding["input_ids"]]
        windows = (
            [{name: values[i] for name, values in encoding.items()} for i in range(len(encoding["input_ids"]))]
            if nested
            else [dict(encoding)]
        )
        return windows[::-1] if backwards else windows

    def spelled(self) -> tuple[str, list[int]]:
        """Returns a text that spells the reserved special tokens, and its ids without a template: they are read as text, or as unknown."""
        tokenizer = self.tokenizer
        reserved = {*tokenizer("")["input_ids"], *tokenizer("", "")["input_ids"], tokenizer.pad_token_id, tokenizer.unk_token_id}
        reserved |= set() if self.case.task == "fill-mask" else {tokenizer.mask_token_id}
        text = " good ".join(tokenizer.convert_ids_to_tokens(sorted(reserved - {None})))
        ids = tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        return text, [tokenizer.unk_token_id if id_ in reserved else id_ for id_ in ids]

    def run(self, window: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
        """Returns the outputs of one window by name, float32, without the batch axis."""
        inputs = {name: torch.tensor([values]) for name, values in window.items()}
        with torch.no_grad():
            if self.case.task == "multiple-choice":
                inputs = {name: value[None] for name, value in inputs.items()}
            outputs = self.model(**inputs)
        row = {name: value[0].numpy() for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        if self.case.task == "fill-mask":
            row["logits"] = row["logits"][np.array(window["input_ids"]) == self.tokenizer.mask_token_id]
        return row

    def decoded(self, row: dict[str, NDArray[np.float32]]) -> NDArray[np.float32] | dict[str, float] | None:
        """Returns the scores by label or the vector of a text; None for other tasks."""
        if self.case.task == "text-classification":
            pipeline = transformers.TextClassificationPipeline(model=self.model, tokenizer=self.tokenizer)
            actual = pipeline.postprocess({"logits": torch.tensor(row["logits"])[None]}, top_k=None, _legacy=False)
            return {item["label"]: item["score"] for item in actual}
        if self.case.task == EMBED:
            hidden = row["last_hidden_state"]
            pools = {"mean": hidden.mean(axis=0), "max": hidden.max(axis=0)}
            vector = pools.get(self.case.pooling or "", hidden[0])
            return vector / np.linalg.norm(vector) if self.case.normalize else vector
        return None


@pytest.mark.parametrize("number", [pytest.param(i, marks=pytest.mark.full_grid if i else ()) for i in range(SEEDS)])
def test_a_random_checkpoint_answers_like_pytorch_or_is_refused(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` tries 5 checkpoints, and `make grid` 315 more; one seed in five uses the default order of tracers."""
    if number % DYNAMO == DYNAMO - 1:
        monkeypatch.setattr("bertserve.export.onnx_trace.TRACERS", ("dynamo", "torchscript"))

    @seed(number)
    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
    @given(cases(), st.lists(st.lists(st.sampled_from(TEXT_PIECES), max_size=12).map("".join), min_size=2, max_size=2))
    def check(case: Case, texts: list[str]) -> None:
        folder = Path(tempfile.mkdtemp())
        try:
            _check(case, texts, folder)
        finally:
            shutil.rmtree(folder)

    check()


def _check(case: Case, texts: list[str], folder: Path) -> None:
    source = write(case, folder)
    try:
        bundle = exported(source, folder / "models", name="bundle")
    except ExportError as error:
        note(f"refused: {error}")
        assert any(reason in str(error) for reason in case.reasons), f"it names none of {case.reasons}: {error}"
        return
    _compare(case, User(case, source), bundle, texts)


def _compare(case: Case, user: User, bundle: Bundle, texts: Sequence[str]) -> None:
    service = Service(bundle.path)
    tokenizer, engine = service.tokenizer, service.engine
    assert tokenizer.spec.max_length == case.limit
    if case.task == "token-classification":
        assert list(bundle.manifest.labels) == [user.model.config.id2label[i] for i in range(case.labels)]
    text, ids = user.spelled()
    assert tokenizer.tokenize([text])[0].ids == ids
    batch, expected = [], []
    for text in (*texts, *FIXED):
        for request, windows in _requests(case, user, bundle.manifest, text, texts[-1]):
            try:
                encodings = service.encodings(request)
            except InvalidValueError as error:
                assert "empty" in str(error) or "room for" in str(error), request
                continue
            if not encodings:
                continue
            assert [encoding.ids.tolist() for encoding in encodings] == [window["input_ids"] for window in windows], request
            right = [user.run(window) for window in windows]
            alone = [engine.run([encoding])[0] for encoding in encodings]
            _assert_close(right, alone)
            _assert_decoded(user.decoded(right[0]), service.decode(request, alone))
            batch += encodings
            expected += right
    if batch and bundle.graph("cpu").batch_invariant:
        _assert_close(expected, engine.run(batch))


def _assert_close(expected: Sequence[Any], actual: Sequence[Any]) -> None:
    for right, row in zip(expected, actual, strict=True):
        for name, value in row.items():
            bound = max(ABSOLUTE, RELATIVE * float(np.abs(right[name]).max(initial=0)))
            np.testing.assert_allclose(value, right[name], rtol=0, atol=bound)


def _assert_decoded(expected: Any, actual: Any) -> None:
    if isinstance(expected, dict):
        assert {item["label"]: item["score"] for item in actual} == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE)
    elif expected is not None:
        np.testing.assert_allclose(actual, expected, rtol=RELATIVE, atol=ABSOLUTE)


def _requests(case: Case, user: User, manifest: Manifest, text: str, other: str) -> list[tuple[Any, list[dict[str, list[int]]]]]:
    """Returns requests with a text, each with the windows that the reference runs."""
    if case.task == "text-classification":
        pair = [(classify_input(text, other), user.windows(text, other))] if other else []
        return [(classify_input(text), user.windows(text)), *pair]
    if case.task == EMBED:
        return [(embed.embed_inputs([text], embed.EmbedParameters(), manifest)[0], user.windows(text))]
    if case.task == "fill-mask":
        mask = user.tokenizer.mask_token
        masked = f"{mask} {text[:20]} {mask}"
        return [(fill_mask.FillMaskInput(masked, fill_mask.FillMaskParameters()), user.windows(masked))]
    if case.task == "multiple-choice":
        return [(multiple_choice.MultipleChoiceInput(text, (other, text)), user.windows([text, text], [other, text]))]
    if case.task == "token-classification":
        room = case.limit - user.tokenizer.num_special_tokens_to_add()
        return [(ner_input(text), user.windows(text, stride=default_stride(room), return_overflowing_tokens=True))]
    length = min(question_answering.DEFAULT_SEQ_LEN, case.limit)
    options = {"max_length": length, "stride": default_stride(length), "return_overflowing_tokens": True}
    # the order of transformers' scripts and pipeline for question answering
    if user.tokenizer.padding_side == "left":
        windows = user.windows(text, "who?", truncation="only_first", **options)
    else:
        windows = user.windows("who?", text, truncation="only_second", **options)
    return [(answer_input("who?", text), windows)]
