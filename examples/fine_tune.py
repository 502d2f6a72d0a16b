"""Fine-tunes a small classifier of support requests with transformers, on the CPU, in a minute.

It writes a checkpoint like `save_pretrained`, and next to it `test.jsonl`: labeled texts whose sentences the model has not seen.

    python examples/fine_tune.py --output my-checkpoint

Without `--base` it starts from random weights and its own vocabulary, which needs no network. With the id of a model on the Hugging
Face Hub, such as `--base google-bert/bert-base-uncased`, it works as for your own data.
"""

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

DATA = Path(__file__).with_name("support.json")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEST_SENTENCES = 3  # per label; no training text contains them
TEXTS_PER_SENTENCE = 40


def main() -> None:
    """Creates the texts, trains, and writes the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--base", help="hub id or folder of a model to start from (default: random weights)")
    parser.add_argument("--epochs", type=float, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test, labels = make_texts()
    naming = {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}
    if args.base:
        tokenizer = AutoTokenizer.from_pretrained(args.base)
        model = AutoModelForSequenceClassification.from_pretrained(args.base, **naming)
    else:
        tokenizer = make_tokenizer([text for text, _ in train])
        model = BertForSequenceClassification(small_config(len(tokenizer), naming))

    def encoded(texts: list[tuple[str, str]]) -> list[dict[str, Any]]:
        return [{**tokenizer(text, truncation=True), "labels": naming["label2id"][label]} for text, label in texts]

    settings = TrainingArguments(
        output_dir=str(args.output),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=32,
        learning_rate=5e-5 if args.base else 5e-4,
        save_strategy="no",
        report_to="none",
        logging_steps=100,
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(model, settings, DataCollatorWithPadding(tokenizer), train_dataset=encoded(train), compute_metrics=accuracy)
    trainer.train()
    found = trainer.evaluate(encoded(test))
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in test]
    (args.output / "test.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{args.output}: accuracy {found['eval_accuracy']:.4f} on {len(test)} texts of sentences that it has not seen")


def make_texts() -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Returns training and test texts with their labels, and the labels.

    The last sentences of each label are only for the test.
    """
    data = json.loads(DATA.read_text(encoding="utf-8"))
    draw = random.Random(0)

    def texts(label: str, sentence: str) -> list[tuple[str, str]]:
        made = []
        for _ in range(TEXTS_PER_SENTENCE):
            filled = sentence.format(**{name: draw.choice(values) for name, values in data["words"].items()})
            made.append((" ".join(filter(None, (draw.choice(data["openings"]), filled, draw.choice(data["endings"])))), label))
        return made

    train, test = [], []
    for label, sentences in data["sentences"].items():
        for number, sentence in enumerate(sentences):
            (test if number >= len(sentences) - TEST_SENTENCES else train).extend(texts(label, sentence))
    draw.shuffle(train)
    return train, test, list(data["sentences"])


def make_tokenizer(texts: list[str]) -> BertTokenizerFast:
    """Returns BERT's tokenizer with the words and letters of these texts as its vocabulary.

    The trainer of the tokenizers library would find another vocabulary in each process.
    """
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    letters = sorted(set("".join(words)))
    pieces = dict.fromkeys([*SPECIAL, *words, *letters, *(f"##{letter}" for letter in letters)])
    return BertTokenizerFast(vocab={piece: number for number, piece in enumerate(pieces)}, model_max_length=128)


def small_config(vocabulary: int, naming: dict[str, Any]) -> BertConfig:
    """Returns the configuration of a BERT with 2 layers and a hidden size of 128."""
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=128,
        **naming,
    )


def accuracy(predicted: Any) -> dict[str, float]:
    """Returns the share of correct labels."""
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


if __name__ == "__main__":
    main()
