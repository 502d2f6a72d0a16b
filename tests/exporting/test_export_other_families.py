"""Encoders outside the table of families: most are exported, and the others are refused with a message that says what was not understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bertserve.service.tasks import embed
from bundles import Served, exported, refused
from checkpoints import bert, edit_json, few_texts
from families import FAMILIES, Family, bert_tokenizer, modernbert_tokenizer, roberta_tokenizer
from grid import compared, rows, worst_error

pytestmark = pytest.mark.torch

CLASSIFIES = "text-classification"
ONE_TYPE = {"type_vocab_size": 1}
UNGROUPED = dict.fromkeys(("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups"), 1)
BIG_BIRD = Family(transformers.BigBirdConfig, bert_tokenizer, {"block_size": 4, "num_random_blocks": 1})
XMOD = Family(transformers.XmodConfig, roberta_tokenizer, {**ONE_TYPE, "languages": ["en_XX", "de_DE"]}, offset=2)
OTHERS: dict[str, tuple[Family, dict[str, Any]]] = {
    # with the fields without which it is refused, or is something else
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
# What `make test` exports of these: one that batches move, one that needs a field.
SAMPLE = {"ConvBERT"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full_grid) for name in OTHERS])
def test_an_encoder_that_is_not_in_the_table_answers_as_pytorch_does(name: str, tmp_path: Path) -> None:
    """Over the grid of lengths each text alone, and all in one batch where padding leaves the model's own answers as they are."""
    family, fields = OTHERS[name]
    source = family.save(tmp_path / "checkpoint", CLASSIFIES, **fields)
    bundle = exported(source)
    encodings, expected = compared(source, bundle, CLASSIFIES)
    alone, together = rows(bundle, "fp32", encodings)
    invariant = bundle.manifest.graphs[0].batch_invariant

    assert invariant == (name not in NOT_INVARIANT)
    assert worst_error(expected, [alone, together] if invariant else [alone]) <= 1e-4


POOLER = {
    "directionality": "bidi",
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
}
# the fields of their configurations that say no size, and whether the tokenizer keeps case
PUBLISHED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "SpanBERT": ("question-answering", {**POOLER, "gradient_checkpointing": False, "position_embedding_type": "absolute"}, True),
    "multilingual BERT": ("fill-mask", {**POOLER, "classifier_dropout": None, "use_cache": True}, True),
    "MT-DNN": (CLASSIFIES, {"answer_opt": 0, "enable_san": False, "dump_feature": False, "finetuning_task": "mnli"}, False),
}


@pytest.mark.parametrize(
    "name", ["SpanBERT", *(pytest.param(name, marks=pytest.mark.full_grid) for name in PUBLISHED if name != "SpanBERT")]
)
def test_a_bert_of_another_name_is_a_bert(name: str, tmp_path: Path) -> None:
    """Configurations as they are published, with fields that transformers has no use for, and tokenizers that keep case."""
    task, fields, cased = PUBLISHED[name]
    source = FAMILIES["BERT"].save(tmp_path / "checkpoint", task)
    edit_json(source / "config.json", **fields)
    edit_json(source / "tokenizer_config.json", do_lower_case=not cased)
    bundle = exported(source)
    encodings, expected = compared(source, bundle, task)
    graph = bundle.manifest.graphs[0]

    assert (task, True) == (bundle.manifest.task, graph.batch_invariant)
    assert "packed MultiHeadAttention" in graph.form
    assert worst_error(expected, rows(bundle, "fp32", encodings)) <= 1e-4


@pytest.mark.full_grid
def test_an_encoder_that_calls_its_pooler_gives_vectors(tmp_path: Path) -> None:
    """SqueezeBERT does so without looking whether there is one; its vectors are those of the whole model."""
    family, fields = OTHERS["SqueezeBERT"]
    source = family.save(tmp_path / "checkpoint", CLASSIFIES, **fields)
    bundle = exported(source, task="feature-extraction")
    [encoding] = Served(bundle).encodings(embed.EmbedRequest("a film of the first half hour"))
    with torch.no_grad():
        model = transformers.AutoModel.from_pretrained(source).eval()
        expected = model(input_ids=torch.tensor(encoding.ids)[None]).last_hidden_state[0]

    np.testing.assert_allclose(expected, rows(bundle, "fp32", [encoding])[0][0]["last_hidden_state"], rtol=0, atol=1e-4)


def test_a_model_that_changes_itself_is_refused(tmp_path: Path) -> None:
    """Sparse BigBird takes full attention for good after a short text; the message names the setting, with which it is exported."""
    source = BIG_BIRD.save(tmp_path / "sparse", CLASSIFIES, attention_type="block_sparse")
    message = refused(source)

    assert "BigBirdBlockSparseAttention `bert.encoder.layer.0.attention.self` with a BigBirdSelfAttention" in message
    assert "`attention_type` to 'original_full'" in message
    edit_json(source / "config.json", attention_type="original_full")
    assert exported(source).manifest.graphs[0].batch_invariant


def test_a_model_that_wants_a_language_is_refused(tmp_path: Path) -> None:
    assert "ValueError: Input language" in refused(XMOD.save(tmp_path / "languages", CLASSIFIES))


@pytest.mark.full_grid
def test_a_graph_of_convolutions_has_no_int8(tmp_path: Path) -> None:
    """What SqueezeBERT computes in place of matrix products is not quantized; the bundle has fp32, and says what to ask for."""
    family, fields = OTHERS["SqueezeBERT"]
    source = family.save(tmp_path / "checkpoint", "token-classification", **fields)
    manifest = exported(source, precisions=None, calibration=few_texts(tmp_path)).manifest
    [omitted] = manifest.omitted

    assert [("fp32", True)] == [(graph.precision, graph.default) for graph in manifest.graphs]
    assert all(fact in omitted.reason for fact in ("no matrix", "--precision fp32"))


@pytest.mark.full_grid
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # models have it all the same
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is not supported:DeprecationWarning")
def test_a_model_that_decides_while_it_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code within a model keeps its branches in the traced graph, in graphs of their own."""

    def decide(mask: torch.Tensor) -> torch.Tensor:
        if bool(mask.sum() > 9):
            return mask * 2
        return mask

    decide.__annotations__ = {"mask": torch.Tensor, "return": torch.Tensor}
    compiled, forward = torch.jit.script(decide), transformers.BertForSequenceClassification.forward

    def deciding(self: Any, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        return forward(self, input_ids, compiled(attention_mask), **options)

    source = bert(tmp_path, "deciding")
    monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", deciding)

    assert "`If` (" in refused(source)


@pytest.mark.full_grid
def test_a_length_that_the_tracer_kept_is_an_error_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that computes with the length as a number, as Longformer's does, has a graph for one length; that is said with the text that fails."""
    forward = transformers.BertForSequenceClassification.forward

    def counting(self: Any, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        return forward(self, input_ids, attention_mask * torch.ones(int(input_ids.shape[1]), dtype=torch.int64), **options)

    source = bert(tmp_path, "counting")
    monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", counting)
    message = refused(source)

    assert all(fact in message for fact in (" 2 tokens, ", "[ONNXRuntimeError]"))
