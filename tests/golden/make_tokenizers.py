"""Computes the golden ids of tokenizers in files without `tokenizer.json`, with the classes of transformers 4.

    python tests/golden/make_tokenizers.py

The script reads `tokenizers.json` and replaces the file:

- `files`: tiny vocabularies and SentencePiece models by name; a model is Base64, and its normalizer is a small part of NFKC;
- `texts`: `{mask}` is the tokenizer's mask, if any;
- `cases`: the `model_type` in config.json and the other files of the folder (a name of `files`, or JSON), and computed from them the
  `mask`, the ids of each text, and the ids and types of the pair of the first two texts.

To add a case, append its `model_type` and `files`. Needs the packages of `tokenizers.requirements.txt`.
"""

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

PATH = Path(__file__).with_name("tokenizers.json")
GOLDEN: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))


def write_folder(folder: Path, model_type: str, files: dict[str, Any]) -> Path:
    """Writes the files of a case to a folder, and returns the folder."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        if isinstance(content, dict):
            (folder / name).write_text(json.dumps(content))
        elif content.endswith(".model"):
            (folder / name).write_bytes(base64.b64decode(GOLDEN["files"][content]))
        else:
            (folder / name).write_text(GOLDEN["files"][content], encoding="utf-8")
    return folder


def with_ids(case: dict[str, Any]) -> dict[str, Any]:
    """Returns a case with what transformers computes for it."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(write_folder(Path(folder), case["model_type"], case["files"]))
    texts = [text.format(mask=tokenizer.mask_token or "") for text in GOLDEN["texts"]]
    pair = tokenizer(texts[0], texts[1], return_token_type_ids=True)
    ids = {"ids": tokenizer(texts)["input_ids"], "pair": [pair["input_ids"], pair["token_type_ids"]]}
    return {"model_type": case["model_type"], "files": case["files"], "mask": tokenizer.mask_token, **ids}


def main() -> None:
    lines = [json.dumps(with_ids(case), ensure_ascii=False, separators=(",", ":")) for case in GOLDEN["cases"]]
    inputs = json.dumps({"files": GOLDEN["files"], "texts": GOLDEN["texts"]}, ensure_ascii=False, indent=0).removesuffix("\n}")
    PATH.write_text(inputs + ',\n"cases": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
