"""Exports of decoder models: classifiers, taggers and question answering, their padding, and refused checkpoints.

Each row of a padded batch is compared with transformers' outputs for the same text alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from bertserve.export import cpu, trace
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import TokenizerSpec
from bertserve.service.engine.onnx_engine import OnnxEngine, Row
from bertserve.service.text.tokenizer import Encoding
from bundles import engine_of, exported, refused
from checkpoints import edit_json
from families import FAMILIES, HEADS, LENGTH, gpt2_tokenizer, llama_tokenizer

pytestmark = pytest.mark.torch

CLASSIFIES = "text-classification"
TEXTS = ("good", "A warm, funny and thoroughly engaging film.", "No.", "It isn't that the acting is bad; it's that there is none of it.")
FULL = pytest.mark.full_grid


def engine(checkpoint: Checkpoint, folder: Path) -> OnnxEngine:
    """Returns an engine with the optimized float32 graph of a checkpoint."""
    folder.mkdir()
    traced = trace.trace(checkpoint, folder / "raw.onnx", "torchscript")
    optimized = cpu.optimize(folder / "raw.onnx", checkpoint, traced.form)
    spec = GraphSpec.model_construct(
        file=optimized.path.name, provider="cpu", precision="fp32", inputs=traced.inputs, outputs=checkpoint.outputs, shapes=None
    )
    return OnnxEngine(optimized.path, spec, pad_id=checkpoint.tokenizer_spec.pad_id, padding_side=checkpoint.tokenizer_spec.padding_side)


def encoding_of(feed: Any) -> Encoding:
    return Encoding(np.array(feed["input_ids"]), np.zeros(len(feed["input_ids"]), dtype=np.int64))


def alone(source: Path, task: str, tokenizer: Any, texts: Any = TEXTS) -> tuple[list[Encoding], list[Row]]:
    """Returns each text's encoding and the unchanged checkpoint's outputs for it alone, both from transformers."""
    model = HEADS[task][1].from_pretrained(source, dtype=torch.float32).eval()  # type: ignore[attr-defined]
    encodings, rows = [], []
    for text in texts:
        feed = tokenizer(*text) if isinstance(text, tuple) else tokenizer(text)
        encodings.append(encoding_of(feed))
        with torch.no_grad():
            outputs = model(**{name: torch.tensor([feed[name]]) for name in ("input_ids", "attention_mask")})
        rows.append({name: outputs[name][0].numpy() for name in outputs if "logits" in name})
    return encodings, rows


def assert_equal(expected: list[Row], found: list[Row]) -> None:
    for a, b in zip(expected, found, strict=True):
        for name, values in a.items():
            np.testing.assert_allclose(values, b[name], rtol=0, atol=1e-4)


def assert_answers(source: Path, folder: Path, task: str, tokenizer: Any, texts: Any = TEXTS) -> TokenizerSpec:
    """Asserts that batch rows match transformers' outputs for each text alone, and returns the tokenizer's spec."""
    loaded = load_checkpoint(str(source))
    encodings, expected = alone(source, task, tokenizer, texts)
    assert_equal(expected, engine(loaded, folder).run(encodings))
    return loaded.tokenizer_spec


@pytest.mark.parametrize("declared", ["left", pytest.param("right", marks=FULL)])
@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("GPT-2", CLASSIFIES),
        pytest.param("GPT-2", "token-classification", marks=FULL),
        pytest.param("GPT", CLASSIFIES, marks=FULL),
        pytest.param("LLaMA", CLASSIFIES, marks=FULL),
        pytest.param("BART", CLASSIFIES, marks=FULL),
        pytest.param("BART", "question-answering", marks=FULL),
        pytest.param("T5", CLASSIFIES, marks=FULL),
    ],
)
def test_padding_does_not_change_outputs(tmp_path: Path, family: str, task: str, declared: str) -> None:
    """Batch rows match transformers' outputs for each text alone, whichever side the tokenizer declares."""
    source = FAMILIES[family].save(tmp_path / "checkpoint", task)
    edit_json(source / "tokenizer_config.json", padding_side=declared)
    assert_answers(source, tmp_path / "graph", task, FAMILIES[family].tokenizer())


EOS, OTHER = 1100, 7  # token ids: the only special token of the tokenizer below, and a token that no text contains


@pytest.mark.parametrize(
    ("configured", "declared"),
    [(None, None), *(pytest.param(*ids, marks=FULL) for ids in ((OTHER, EOS), (None, EOS), (EOS, None)))],
)
def test_a_padding_token_is_found_if_none_is_declared(tmp_path: Path, configured: int | None, declared: int | None) -> None:
    """Without a padding token, transformers reads the last position and refuses batches. With two, the configuration's is used."""
    source = FAMILIES["GPT-2"].save(tmp_path / "checkpoint", CLASSIFIES)
    tokenizer = gpt2_tokenizer(pad=None if declared is None else "<|endoftext|>")
    tokenizer.save_pretrained(source)
    edit_json(source / "config.json", pad_token_id=configured, eos_token_id=None, bos_token_id=None)
    spec = assert_answers(source, tmp_path / "graph", CLASSIFIES, tokenizer)

    assert (EOS if configured is None else configured, "right") == (spec.pad_id, spec.padding_side)


@pytest.mark.full_grid
def test_the_closing_token_of_texts_is_not_used_as_padding(tmp_path: Path) -> None:
    source = FAMILIES["LLaMA"].save(tmp_path / "checkpoint", CLASSIFIES)
    tokenizer = llama_tokenizer()
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B {end}",
        special_tokens=[(begin, tokenizer.bos_token_id), (end, tokenizer.eos_token_id)],
    )
    tokenizer.pad_token, tokenizer.unk_token = end, "<|pad|>"
    tokenizer.save_pretrained(source)
    edit_json(source / "config.json", pad_token_id=None)

    assert tokenizer.unk_token_id == assert_answers(source, tmp_path / "graph", CLASSIFIES, tokenizer).pad_id


@pytest.mark.full_grid
@pytest.mark.parametrize("family", ["BART", "T5"])
def test_texts_and_pairs_share_a_batch(tmp_path: Path, family: str) -> None:
    """A pair ends at its second or third `</s>`; transformers refuses rows with different numbers of `</s>`."""
    source = FAMILIES[family].save(tmp_path / "checkpoint", CLASSIFIES)
    texts = (*TEXTS, ("Someone eats.", "A man is eating food."), TEXTS[1:3])

    assert_answers(source, tmp_path / "graph", CLASSIFIES, FAMILIES[family].tokenizer(), texts)


def test_a_padding_id_outside_the_embedding_is_ignored(tmp_path: Path) -> None:
    """With `pad_token_id` -1, LLaMA is padded on the left with the tokenizer's token."""
    source = FAMILIES["LLaMA"].save(tmp_path / "checkpoint", CLASSIFIES)
    edit_json(source / "config.json", pad_token_id=-1)
    loaded = load_checkpoint(str(source))

    assert ("left", llama_tokenizer().pad_token_id) == (loaded.tokenizer_spec.padding_side, loaded.tokenizer_spec.pad_id)


def test_a_text_generation_model_needs_an_explicit_task(tmp_path: Path) -> None:
    """BART can fill masks in transformers, but it is not exported for fill-mask by default."""
    source = FAMILIES["BART"].save(tmp_path / "bart", "fill-mask")

    assert "['BartForConditionalGeneration']; give --task" in refused(source)
    assert "fill-mask" == load_checkpoint(str(source), task="fill-mask").task


def test_a_decoder_that_needs_generated_tokens_is_refused(tmp_path: Path) -> None:
    """Marian's decoder needs the tokens generated so far; the error contains transformers' own message."""
    tokenizer = FAMILIES["BERT"].tokenizer()
    sizes = {"d_model": 32, "max_position_embeddings": LENGTH, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 3}
    config = transformers.MarianConfig(vocab_size=len(tokenizer), encoder_layers=1, decoder_layers=1, **sizes)
    transformers.MarianModel(config).save_pretrained(tmp_path / "marian")
    tokenizer.save_pretrained(tmp_path / "marian")
    edit_json(tmp_path / "marian" / "tokenizer_config.json", tokenizer_class="BertTokenizer")

    assert "decoder_input" in refused(tmp_path / "marian", task="feature-extraction")


@FULL
def test_t5_feature_extraction_uses_only_the_encoder(tmp_path: Path) -> None:
    """The decoder is left out, although encoder and decoder share an embedding."""
    tokenizer = FAMILIES["T5"].tokenizer()
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    bundle = exported(tmp_path / "t5", task="feature-extraction")
    model = transformers.T5EncoderModel.from_pretrained(tmp_path / "t5").eval()
    made = [encoding_of(tokenizer(text)) for text in TEXTS]
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor(encoding.ids)[None]).last_hidden_state[0].numpy() for encoding in made]

    assert bundle.graph("cpu", "fp32").batch_invariant
    assert_equal([{"last_hidden_state": values} for values in expected], engine_of(bundle).run(made))
