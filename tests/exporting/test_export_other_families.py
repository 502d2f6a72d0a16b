"""Encoders outside the family table: most are exported, and the others are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.service.tasks import embed
from bundles import Served, exported, refused
from checkpoints import bert, edit_json, few_texts
from families import Family, bert_tokenizer, modernbert_tokenizer, roberta_tokenizer
from grid import compared, rows, worst_error

pytestmark = pytest.mark.torch

CLASSIFIES = "text-classification"
ONE_TYPE = {"type_vocab_size": 1}
UNGROUPED = dict.fromkeys(("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups"), 1)
BIG_BIRD = Family(transformers.BigBirdConfig, bert_tokenizer, {"block_size": 4, "num_random_blocks": 1})
XMOD = Family(transformers.XmodConfig, roberta_tokenizer, {**ONE_TYPE, "languages": ["en_XX", "de_DE"]}, offset=2)
OTHERS: dict[str, tuple[Family, dict[str, Any]]] = {
    # with the configuration fields that each family needs
    "BigBird": (BIG_BIRD, {"attention_type": "original_full"}),
    "ConvBERT": (Family(transformers.ConvBertConfig, bert_tokenizer, {"embedding_size": 16}), {}),
    "Data2Vec": (Family(transformers.Data2VecTextConfig, roberta_tokenizer, ONE_TYPE, offset=2), {}),
    "EuroBERT": (Family(transformers.EuroBertConfig, modernbert_tokenizer), {"num_key_value_heads": 4, "head_dim": 8}),
    "I-BERT": (Family(transformers.IBertConfig, roberta_tokenizer, ONE_TYPE, offset=2), {}),
    "LUKE": (Family(transformers.LukeConfig, roberta_tokenizer, ONE_TYPE, offset=2), {"entity_vocab_size": 10, "entity_emb_size": 8}),
    "Megatron-BERT": (Family(transformers.MegatronBertConfig, bert_tokenizer), {}),
    "Nyströmformer": (Family(transformers.NystromformerConfig, bert_tokenizer), {}),
    "RemBERT": (Family(transformers.RemBertConfig, bert_tokenizer), {"input_embedding_size": 16, "output_embedding_size": 16}),
    "RoBERTa-PreLayerNorm": (Family(transformers.RobertaPreLayerNormConfig, roberta_tokenizer, ONE_TYPE, offset=2), {}),
    "RoFormer": (Family(transformers.RoFormerConfig, bert_tokenizer), {"rotary_value": True}),
    "SqueezeBERT": (Family(transformers.SqueezeBertConfig, bert_tokenizer, UNGROUPED), {"embedding_size": 32}),
    "X-MOD": (XMOD, {"default_language": "de_DE"}),
    "YOSO": (Family(transformers.YosoConfig, bert_tokenizer), {"type_vocab_size": 2}),
}
NOT_INVARIANT = {"ConvBERT", "Nyströmformer", "YOSO"}
# `make test` exports only this encoder, whose outputs depend on padding.
SAMPLE = {"ConvBERT"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full_grid) for name in OTHERS])
def test_outputs_of_an_encoder_outside_the_table_match_pytorch(name: str, tmp_path: Path) -> None:
    """Each text of the length grid runs alone; batch-invariant models also run all texts in one padded batch."""
    family, fields = OTHERS[name]
    source = family.save(tmp_path / "checkpoint", CLASSIFIES, **fields)
    bundle = exported(source)
    encodings, expected = compared(source, bundle, CLASSIFIES)
    alone, together = rows(bundle, "fp32", encodings)
    invariant = bundle.manifest.graphs[0].batch_invariant

    assert invariant == (name not in NOT_INVARIANT)
    assert worst_error(expected, [alone, together] if invariant else [alone]) <= 1e-4


@pytest.mark.full_grid
def test_a_model_that_always_calls_its_pooler_gives_vectors(tmp_path: Path) -> None:
    """SqueezeBERT calls its pooler even if it has none; its vectors match those of the whole model."""
    family, fields = OTHERS["SqueezeBERT"]
    source = family.save(tmp_path / "checkpoint", CLASSIFIES, **fields)
    bundle = exported(source, task="feature-extraction")
    [encoding] = Served(bundle).encodings(embed.EmbedRequest("a film of the first half hour"))
    with torch.no_grad():
        model = transformers.AutoModel.from_pretrained(source).eval()
        expected = model(input_ids=torch.tensor(encoding.ids)[None]).last_hidden_state[0]

    np.testing.assert_allclose(expected, rows(bundle, "fp32", [encoding])[0][0]["last_hidden_state"], rtol=0, atol=1e-4)


def test_a_model_that_changes_itself_is_refused(tmp_path: Path) -> None:
    """Sparse BigBird switches permanently to full attention after a short text. The error names the setting that allows an export."""
    source = BIG_BIRD.save(tmp_path / "sparse", CLASSIFIES, attention_type="block_sparse")
    message = refused(source)

    assert "`attention_type` = 'block_sparse'" in message
    edit_json(source / "config.json", attention_type="original_full")
    assert exported(source).manifest.graphs[0].batch_invariant
    edit_json(bert(tmp_path) / "config.json", attention_type="relative_shift")  # Funnel has this field, too
    assert load_checkpoint(str(tmp_path / "tiny-bert"))


def test_a_model_that_needs_a_language_is_refused(tmp_path: Path) -> None:
    assert "ValueError: Input language" in refused(XMOD.save(tmp_path / "languages", CLASSIFIES))


@pytest.mark.full_grid
def test_a_model_of_convolutions_gets_no_int8_graph(tmp_path: Path) -> None:
    """SqueezeBERT has convolutions instead of matrix products. Its bundle has only fp32, and names the flag for that."""
    family, fields = OTHERS["SqueezeBERT"]
    source = family.save(tmp_path / "checkpoint", "token-classification", **fields)
    manifest = exported(source, precisions=None, calibration=few_texts(tmp_path)).manifest
    [omitted] = manifest.omitted

    assert [("fp32", True)] == [(graph.precision, graph.default) for graph in manifest.graphs]
    assert all(fact in omitted.reason for fact in ("no matrix", "--precision fp32"))


@pytest.mark.full_grid
def test_a_model_traced_with_a_fixed_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that uses the length as a number, like Longformer's, gives a graph for one length. The error names a text that fails."""
    forward = transformers.BertForSequenceClassification.forward

    def counting(self: Any, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        return forward(self, input_ids, attention_mask * torch.ones(int(input_ids.shape[1]), dtype=torch.int64), **options)

    source = bert(tmp_path, "counting")
    monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", counting)
    message = refused(source)

    assert all(fact in message for fact in (" characters)", "[ONNXRuntimeError]"))
