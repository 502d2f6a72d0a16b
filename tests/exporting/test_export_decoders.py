"""Exports of decoder models: classifiers, taggers and question answering, their padding, and refused checkpoints."""

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from support.bundles import exported, refused
from support.checkpoints import edit_json
from support.families import FAMILIES, LENGTH, gpt2_tokenizer, llama_tokenizer

pytestmark = pytest.mark.torch

CLASSIFIES = "text-classification"
FULL = pytest.mark.full_grid


def padding_of(source: Path) -> tuple[int, str]:
    """Returns the padding of an exported checkpoint: its token and side. The export has compared all samples with PyTorch.

    Asserts that it does not change the outputs of rows in a batch.
    """
    manifest = exported(source).manifest
    assert manifest.graphs[0].batch_invariant
    return manifest.tokenizer.pad_id, manifest.tokenizer.padding_side


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
def test_the_side_that_the_tokenizer_declares_does_not_matter(tmp_path: Path, family: str, task: str) -> None:
    """The other side, which the tokenizers of the families have, is among the tests of all families."""
    source = FAMILIES[family].save(tmp_path / "checkpoint", task)
    edit_json(source / "tokenizer_config.json", padding_side="right" if family == "LLaMA" else "left")
    padding_of(source)


EOS, OTHER = 1100, 7  # token ids: the only special token of the tokenizer below, and a token that no text contains


@pytest.mark.parametrize(
    ("configured", "declared"), [(None, None), *(pytest.param(*ids, marks=FULL) for ids in ((OTHER, EOS), (None, EOS), (EOS, None)))]
)
def test_a_padding_token_is_found_if_none_is_declared(tmp_path: Path, configured: int | None, declared: int | None) -> None:
    """Without a padding token, transformers reads the last position and refuses batches. With two, the configuration's is used."""
    source = FAMILIES["GPT-2"].save(tmp_path / "checkpoint", CLASSIFIES)
    tokenizer = gpt2_tokenizer(pad=None if declared is None else "<|endoftext|>")
    tokenizer.save_pretrained(source)
    edit_json(source / "config.json", pad_token_id=configured, eos_token_id=None, bos_token_id=None)
    spec = load_checkpoint(str(source)).tokenizer

    assert (spec.pad_id, spec.padding_side) == (EOS if configured is None else configured, "right")


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

    assert padding_of(source)[0] == tokenizer.unk_token_id


def test_a_padding_id_outside_the_embedding_is_ignored(tmp_path: Path) -> None:
    """With `pad_token_id` -1, LLaMA is padded on the left with the tokenizer's token."""
    source = FAMILIES["LLaMA"].save(tmp_path / "checkpoint", CLASSIFIES)
    edit_json(source / "config.json", pad_token_id=-1)
    checkpoint = load_checkpoint(str(source))

    assert (checkpoint.tokenizer.padding_side, checkpoint.tokenizer.pad_id) == ("left", llama_tokenizer().pad_token_id)


def test_a_text_generation_model_needs_an_explicit_task(tmp_path: Path) -> None:
    """BART can fill masks in transformers, but it is not exported for fill-mask by default."""
    source = FAMILIES["BART"].save(tmp_path / "bart", "fill-mask")

    assert "['BartForConditionalGeneration']; give --task" in refused(source)
    assert load_checkpoint(str(source), LoadOptions(task="fill-mask")).task == "fill-mask"


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
    tokenizer = FAMILIES["T5"].tokenizer()
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    manifest = exported(tmp_path / "t5", task="feature-extraction").manifest

    assert [spec.name for spec in manifest.graphs[0].inputs] == ["input_ids", "attention_mask"]
    assert manifest.graphs[0].batch_invariant
