"""Creates the golden answers for question answering with PyTorch and the pipeline of transformers 5.2.0, the last version that has it.

    python3 -m venv ENV
    ENV/bin/pip install torch==2.13.0
    ENV/bin/pip install transformers==5.2.0
    ENV/bin/python tests/golden/make_question_answering.py CHECKPOINT_DIR

The script reads the cases of `question_answering.jsonl` and replaces the file. Each line has `id` and `request`, and

- `windows`: for each input, its windows in order. Each window runs alone, without padding, in float32:
  `start` and `end`, the logits of every token, special tokens included ([CLS] question [SEP] passage part [SEP]), with 8
  significant digits; `first`, the index of the window's first passage token among all tokens of the passage; `count`, the
  number of passage tokens in the window; `question`, the number of tokens of the question. Passage token `first + i`
  is at `question + 2 + i` in the window;
- `answer`: the result of the pipeline for the input, or for a list, the list of the results for each input alone.

If a window has fewer spans than the candidate limit, the pipeline adds invalid spans with score 0 ([CLS] to a token, end before
start, too long). Which of these it adds depends on the sorting routine. Their text is often empty.
"""

from pathlib import Path
from typing import Any

import cases
import torch
import transformers

from reference import Model

Answer = dict[str, Any]
Window = dict[str, Any]
Parameters = dict[str, Any]

VERSION = "5.2.0"
DIGITS = 8


class Reference(Model):
    """A checkpoint in PyTorch, and the pipeline around it."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, transformers.AutoModelForQuestionAnswering, "question-answering")
        if self.tokenizer.padding_side != "right":
            raise SystemExit("The checkpoint's tokenizer puts the passage before the question, which these files do not know.")

    def windows(self, item: dict[str, str], parameters: Parameters) -> list[Window]:
        """Returns the windows of a question and passage, cut as the pipeline does, with their logits."""
        length = parameters.get("max_seq_len", min(self.tokenizer.model_max_length, 384))
        stride = parameters.get("doc_stride", min(length // 2, 128))
        encoding = self.tokenizer(
            item["question"],
            item["context"],
            truncation="only_second",
            max_length=length,
            stride=stride,
            return_token_type_ids=True,
            return_overflowing_tokens=True,
        )
        ids = self.tokenizer(item["context"], add_special_tokens=False)["input_ids"]
        windows, first = [], 0
        for row in range(len(encoding["input_ids"])):
            sequence = encoding.sequence_ids(row)
            question, count = sequence.count(0), sequence.count(1)
            if sequence != [None, *[0] * question, None, *[1] * count, None]:
                raise SystemExit(f"The window is not [CLS] question [SEP] passage [SEP]: {sequence}.")
            if encoding["input_ids"][row][question + 2 : -1] != ids[first : first + count]:
                raise SystemExit(f"Window {row} does not begin at token {first} of the passage: {item}.")
            batch = {name: torch.tensor([encoding[name][row]]) for name in self.tokenizer.model_input_names}
            windows.append({**self._logits(batch), "first": first, "count": count, "question": question})
            first += count - stride
        return windows

    @torch.inference_mode()
    def _logits(self, batch: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        output = self.model(**batch)
        return {"start": _rounded(output.start_logits[0].tolist()), "end": _rounded(output.end_logits[0].tolist())}

    def pipeline_answer(self, item: dict[str, str], parameters: Parameters) -> Answer | list[Answer]:
        """Returns the pipeline's answer to one question and passage: a dict if there is only one, otherwise a list."""
        answer: Answer | list[Answer] = self.pipeline(question=item["question"], context=item["context"], **parameters)
        return [_plain(entry) for entry in answer] if isinstance(answer, list) else _plain(answer)


def golden(request: dict[str, Any], reference: Reference) -> dict[str, Any]:
    inputs, parameters = request["inputs"], request.get("parameters", {})
    items = inputs if isinstance(inputs, list) else [inputs]
    answers = [reference.pipeline_answer(item, parameters) for item in items]
    windows = [reference.windows(item, parameters) for item in items]
    return {"windows": windows, "answer": answers if isinstance(inputs, list) else answers[0]}


def _rounded(logits: list[float]) -> list[float]:
    return [float(f"{logit:.{DIGITS}g}") for logit in logits]


def _plain(entry: Answer) -> Answer:
    return {"score": float(entry["score"]), "start": int(entry["start"]), "end": int(entry["end"]), "answer": entry["answer"]}


if __name__ == "__main__":
    if transformers.__version__ != VERSION:
        raise SystemExit(f"The answers are those of transformers {VERSION}, this is {transformers.__version__}.")
    cases.remake("question_answering", __doc__, Reference, golden, separators=(",", ":"))
