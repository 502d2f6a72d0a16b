"""The requests on which a graph is compared with its checkpoint.

A few fixed ones, of every kind, on which it must answer alike: short and long texts, Unicode, pairs, windows. And some hundred of
ordinary texts, on which the share of answers is measured that a graph of coarser numbers gives alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from bertserve.export import pairing
from bertserve.export.choices import CHOICES, asked
from bertserve.service.bundle.manifest import SpecialPiece, Task, TokenizerSpec
from bertserve.service.tasks import answer, choose, classify, embed, fill_mask, ner

if TYPE_CHECKING:
    from bertserve.export.calibration import Texts

_LONG = (
    "The first half hour promises a great deal, and the cast is more than willing to deliver it. "
    "Then the script begins to repeat itself, the jokes wear thin, and nobody seems to know how to stop. "
)
_NAMES = "Ada Lovelace met Charles Babbage in London, and the Royal Society of Sweden invited Maria Agnesi from Milan to Uppsala. "
_TEXTS = [
    "good",
    "A warm, funny and thoroughly engaging film.",
    "It isn't that the acting is bad; it's that there is none.",
    "¡Qué película más aburrida! 😴 看了两遍，还是觉得很好。",
    "naïve café — “quotes”, tabs\tand\r\nlines\u200b with zero width",
    "3.5/10, would not watch again @ £12.50!!!",
    _NAMES,
    _LONG,
    _LONG * 2,
    _LONG * 4,
]

_SENTENCE = _TEXTS[1]
MAX_ADDED_TOKENS = 512  # that are sampled, of the thousands that some tokenizers have
_TOKENS_PER_TEXT = 16

_ATTENTION_TEXTS = 7  # of those above; each is run with the weights of all layers and heads

MAX_FULL_LENGTH = 4096  # tokens; PyTorch holds attention of length x length for each head, 1 GiB for 16 heads, and twice for a moment

_QUESTION_CHARS = 200  # of a passage, whose beginning is asked for


def text_requests(task: Task, texts: Texts, max_length: int, mask: str | None, *, pairs_only: bool = False) -> list[Any]:
    """Returns a request for each text, each passage and each pair.

    Args:
        task: Hugging Face name of the task; for embeddings, which decide nothing, there are none.
        texts: Ordinary texts, none of which the graph under test was made with.
        max_length: The model's usable length in tokens.
        mask: The mask token, for fill-mask.
        pairs_only: Whether the model takes only pairs.
    """
    if task == "feature-extraction":
        return []
    lines, passages = texts.lines, [passage for passage in texts.passages if passage not in texts.lines]
    if task == "text-classification":
        singles, pairs = pairing.arrange(task, lines, passages, texts.pairs, pairs_only=pairs_only)
        return [*map(classify.Request, singles), *(classify.Request(*pair) for pair in pairs)]
    if task == "token-classification":
        return [ner.Request(text) for text in (*lines, *passages)]
    if task == "multiple-choice":
        # each is a choice once, in pairs such as those that int8 was calibrated on; one alone would be no choice
        groups = [(i, side[i : i + CHOICES]) for side in (lines, passages) for i in range(0, len(side) - 1, CHOICES)]
        return [choose.Request(lines[asked(i, len(lines))], tuple(group)) for i, group in groups]
    halves = [_halves(line[: max_length - 16]) for line in lines]
    if task == "question-answering":
        # what a text ends with is asked for, and it begins with the answer; another text behind it makes that less easy
        contexts = [f"{start} {end} {lines[(i + 1) % len(lines)]}" for i, (start, end) in enumerate(halves)]
        halves += [_halves(passage[: min(_QUESTION_CHARS, max_length - 16)]) for passage in passages]
        # a window must have room for its stride beside the question, of which each character may be a token
        questions = [f"Who or what {(end or start)[: max(1, max_length // 2 - 16)]}?" for start, end in halves]
        return [answer.Request(*pair) for pair in (*zip(questions, [*contexts, *passages], strict=True), *texts.pairs)]
    halves += [_halves(passage) for passage in passages]
    return [fill_mask.Request(f"{start} {mask} {end.partition(' ')[2]}") for start, end in halves]


def attention_texts() -> list[tuple[str, ...]]:
    """Returns texts and pairs, short and long, whose attention is compared."""
    pair = ("A man is eating food.", "Someone eats.")
    return [*((text,) for text in _TEXTS[:_ATTENTION_TEXTS]), pair, (_LONG,), (_LONG * 2, _NAMES), (_LONG * 9,)]


def _halves(text: str) -> tuple[str, str]:
    """Returns the first and the second half of a text's words."""
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def sample_requests(task: Task, spec: TokenizerSpec, prompts: Iterable[str] = ()) -> list[Any]:
    """Returns the requests of a task.

    Args:
        task: Hugging Face name of the task.
        spec: What the manifest says of the tokenizer. Without special tokens in its template an empty text has no tokens, and there is
            no answer to it.
        prompts: What may be put before a text to embed.
    """
    requests = [*_sample_requests(task, spec), *_added_token_requests(task, spec), *_prompt_requests(task, prompts)]
    bare = not any(isinstance(piece, SpecialPiece) for piece in spec.single)
    return [request for request in requests if request.chars] if bare else requests


def full_length_request(task: Task, spec: TokenizerSpec, count: Callable[[str], int]) -> Any:
    """Returns a request that fills the model's length, or about `MAX_FULL_LENGTH` tokens of a longer one.

    Args:
        task: Hugging Face name of the task.
        spec: The manifest's entry of the tokenizer.
        count: Returns the number of tokens of a text.
    """
    length = min(spec.max_length, MAX_FULL_LENGTH)
    # enough for the model to cut the text to its length; of a longer model nothing does, and special tokens and a second text need room
    wanted = length + length // 4 if length == spec.max_length else length - 32
    words = list(itertools.islice(itertools.cycle((_NAMES + _LONG).split()), length))
    text = " ".join(words[: length * wanted // count(" ".join(words))])
    if task == "question-answering":
        return answer.Request("Who met whom?", text, answer.AnswerParameters(max_seq_len=length))
    return _text_request(task, text, spec)


def _added_token_requests(task: Task, spec: TokenizerSpec) -> list[Any]:
    """Returns requests whose texts spell every added token, a few in each text."""
    tokens = [token.token for token in spec.added_tokens][:MAX_ADDED_TOKENS]
    few = max(1, min(_TOKENS_PER_TEXT, spec.max_length // 8))
    texts = [" met ".join(f"{token} Ada {token}" for token in tokens[i : i + few]) for i in range(0, len(tokens), few)]
    return [_text_request(task, text, spec) for text in texts]


def _text_request(task: Task, text: str, spec: TokenizerSpec) -> Any:
    """Returns a request of a task around one text."""
    if task == "text-classification":
        return classify.Request(text, _SENTENCE) if spec.pairs_only else classify.Request(text)
    if task == "token-classification":
        return ner.Request(text)
    if task == "question-answering":
        return answer.Request("Who met whom?", text)
    if task == "feature-extraction":
        return embed.Request(text)
    if task == "multiple-choice":
        return choose.Request(text, (_SENTENCE, text))
    assert spec.mask is not None, "a model that fills masks has one"
    return fill_mask.Request(f"{spec.mask.token} {text}")


def _prompt_requests(task: Task, prompts: Iterable[str]) -> list[Any]:
    """Returns texts to embed with each prompt."""
    return [embed.Request(_SENTENCE, prompt=prompt) for prompt in prompts] if task == "feature-extraction" else []


def _sample_requests(task: Task, spec: TokenizerSpec) -> list[Any]:
    max_length, pairs_only = spec.max_length, spec.pairs_only
    stride = min(64, max_length // 8)
    if task == "text-classification":
        pairs = [
            classify.Request("A man is eating food.", "Someone eats."),
            classify.Request("", "only the second text"),
            classify.Request(_LONG * 8, _LONG * 20),
            classify.Request("short question?", _LONG * 30),
        ]
        singles = [
            *(classify.Request(text) for text in ["", *_TEXTS, _LONG * 30]),
            classify.Request(_LONG * 30, parameters=classify.ClassifyParameters(window="mean")),
            classify.Request(_LONG * 40, parameters=classify.ClassifyParameters(window="max", stride=stride)),
        ]
        return [*(classify.Request(a, b) for a, b in itertools.pairwise(_TEXTS)), *pairs] if pairs_only else [*singles, *pairs]
    if task == "token-classification":
        texts = [
            *(ner.Request(text) for text in [*_TEXTS, _NAMES * 5]),
            *(ner.Request(_NAMES, ner.NerParameters(aggregation_strategy=s)) for s in ("none", "first", "max", "average")),
        ]
        return [*texts, ner.Request(_NAMES * 40), ner.Request(_NAMES * 40, ner.NerParameters(aggregation_strategy="first", stride=stride))]
    if task == "question-answering":
        questions = [answer.Request("What was said?", text) for text in [*_TEXTS, _LONG * 30]]
        names = ("Who met Charles Babbage?", "Where is the Royal Society?", "Who was invited, and from where?")
        return [
            *questions,
            *(answer.Request(question, _NAMES) for question in names),
            answer.Request(names[0], _NAMES * 20, answer.AnswerParameters(top_k=3)),
        ]
    if task == "feature-extraction":
        return [embed.Request(text) for text in ["", *_TEXTS, _NAMES * 5, _LONG * 30]]
    if task == "multiple-choice":
        few = tuple(_TEXTS[:4])
        return [
            *(choose.Request(text, few) for text in ["", *_TEXTS, _LONG * 30]),
            choose.Request("A man is eating food.", ("Someone eats.", "")),
            choose.Request("Who met Charles Babbage?", ("Ada Lovelace", "Maria Agnesi", "the Royal Society"), _NAMES),
            choose.Request("What was said?", (_LONG * 20, "nothing"), _LONG * 8),
        ]
    # a token has at least one character, so these fit; of a text whose mask is cut off there would be nothing to compare
    mask = spec.mask.token if spec.mask else None
    short = [text[: max_length - 16] for text in _TEXTS]
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in short]
    return [*(fill_mask.Request(f"{a} {mask} {b}") for a, b in halves), fill_mask.Request(f"A {mask} film with a {mask} cast.")]
