"""Creates the golden answers for fill-mask with PyTorch and the Hugging Face pipeline.

    python tests/golden/make_fill_mask.py CHECKPOINT_DIR

The script reads the cases of `fill_mask.jsonl` and replaces the file. Each line has `id` and `request`, and

- `masks`: for each input and each of its masks, values from the logits of its window, which runs alone and without padding:
  the `best` 100 ids with their logits, descending, equal logits by id; the same for the `targets`, if there are any, in order of
  first mention; `logsumexp` of all logits; `vocabulary`, the number of logits; and `window`, if the text does not fit into one:
  its first text token and its number of tokens;
- `answer`: for each input, or for a single text, the result of the pipeline for this text alone. The pipeline does not support
  texts of more than one window; for these, `fill()` below computes the answer from the stored logits;
- `scores`: for each input and each mask, the scores of the answer with a softmax in float64. PyTorch sums the 30,522
  exponentials in float32 per thread, so the pipeline's own scores are wrong from the fifth digit (their sum is 1.00001 with
  AVX-512 and 1.00003 with AVX2).

Needs torch and transformers.
"""

from pathlib import Path
from typing import Any

import cases
import numpy as np
import transformers
from numpy.typing import NDArray

from reference import Model

Floats = NDArray[np.float32]
Mask = dict[str, Any]
Fill = dict[str, Any]

ROOM = 510  # text tokens, without [CLS] and [SEP]
BEST = 100
DEFAULT_TOP_K = 5


class Reference(Model):
    """A checkpoint in PyTorch, and the pipeline around it."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, transformers.AutoModelForMaskedLM, "fill-mask")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of all tokens of a text, without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def enclose(self, ids: list[int]) -> list[int]:
        return [self.tokenizer.cls_token_id, *ids, self.tokenizer.sep_token_id]

    def target_ids(self, targets: list[str]) -> list[int]:
        """Returns the ids of targets: the target's own id if it is in the vocabulary, otherwise the id of its first piece, if any."""
        vocabulary = self.tokenizer.get_vocab()
        pieces = [[vocabulary[target]] if target in vocabulary else self.encode(target)[:1] for target in targets]
        return list(dict.fromkeys(token_id for ids in pieces for token_id in ids))


def window(mask: int, count: int) -> range:
    """Returns the tokens in the window around a mask in a text of `count` tokens."""
    start = max(0, min(mask - ROOM // 2, count - ROOM))
    return range(start, min(start + ROOM, count))


def facts(logits: Floats, targets: list[int] | None, span: range, count: int) -> Mask:
    """Returns the stored values of one mask from its logits, float32 [vocabulary]."""
    wide = logits.astype(np.float64)
    best = np.argsort(-wide, kind="stable")[:BEST].tolist()
    mask: Mask = {"best": [[token_id, _short(logits[token_id])] for token_id in best]}
    if targets is not None:
        mask["targets"] = [[token_id, _short(logits[token_id])] for token_id in targets]
    mask["logsumexp"] = float(wide.max() + np.log(np.exp(wide - wide.max()).sum()))
    mask["vocabulary"] = len(logits)
    if count > ROOM:
        mask["window"] = {"first": span.start, "count": len(span)}
    return mask


def fill(ids: list[int], places: list[int], masks: list[Mask], top_k: int, reference: Reference) -> list[Any]:
    """Returns the answer to a text: the best candidates for each mask, whose index in `ids` is in `places`, with the filled text."""
    tokenizer = reference.tokenizer
    lists = []
    for place, mask in zip(places, masks, strict=True):
        candidates = sorted(mask.get("targets", mask["best"]), key=lambda entry: (-entry[1], entry[0]))
        fills: list[Fill] = []
        for token_id, logit in candidates[:top_k]:
            filling = reference.enclose([*ids[:place], token_id, *ids[place + 1 :]])
            # The text for one mask has no special tokens, so also no [UNK]. The text for several masks has all of them.
            sequence = tokenizer.decode([i for i in filling if i != tokenizer.pad_token_id], skip_special_tokens=len(masks) == 1)
            score = float(np.exp(logit - mask["logsumexp"]))
            fills.append({"score": score, "token": token_id, "token_str": tokenizer.decode([token_id]), "sequence": sequence})
        lists.append(fills)
    return lists[0] if len(lists) == 1 else lists


def golden(request: dict[str, Any], reference: Reference) -> dict[str, Any]:
    inputs, parameters = request["inputs"], request.get("parameters", {})
    top_k = parameters.get("top_k", DEFAULT_TOP_K)
    targets = reference.target_ids(parameters["targets"]) if "targets" in parameters else None
    all_masks, answers, scores = [], [], []
    for text in inputs if isinstance(inputs, list) else [inputs]:
        ids = reference.encode(text)
        places = [place for place, token_id in enumerate(ids) if token_id == reference.tokenizer.mask_token_id]
        masks = []
        for place in places:
            span = window(place, len(ids))
            logits = reference.token_logits(ids[span.start : span.stop])
            masks.append(facts(logits[place - span.start], targets, span, len(ids)))
        ours = fill(ids, places, masks, top_k, reference)
        answer = ours if len(ids) > ROOM else reference.pipeline(text, **parameters)
        exact = {(number, entry["token"]): entry["score"] for number, fills in enumerate(per_mask(ours)) for entry in fills}
        all_masks.append(masks)
        answers.append(answer)
        scores.append([[exact[number, entry["token"]] for entry in fills] for number, fills in enumerate(per_mask(answer))])
    return {"masks": all_masks, "answer": answers if isinstance(inputs, list) else answers[0], "scores": scores}


def per_mask(answer: list[Any]) -> list[list[Fill]]:
    """Returns the answer to a text as one list per mask, even for a single mask."""
    return [answer] if isinstance(answer[0], dict) else answer


def _short(logit: np.float32) -> float:
    """Returns a logit with the fewest digits that identify it in float32, so that the order is kept."""
    return float(str(logit))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()  # the pipeline warns about each target that is not in the vocabulary
    cases.remake("fill_mask", __doc__, Reference, golden)
