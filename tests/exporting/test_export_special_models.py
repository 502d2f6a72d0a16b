"""Encoders outside the family table, special cases of families, and compressed BERTs; others are refused with the cause."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import ExportError
from bertserve.service.tasks import embed
from support import raises_exactly
from support.bundles import Service, exported, refused
from support.checkpoints import SIZES, bert, edit_json, edit_weights, prune_heads, save_random, silence_heads
from support.families import FAMILIES, LENGTH, Family, bert_tokenizer, modernbert_tokenizer, roberta_tokenizer
from support.grid import compared, logit_error, rows, save_bundle, worst_error

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

    assert (name not in NOT_INVARIANT) == invariant
    assert worst_error(expected, [alone, together] if invariant else [alone]) <= 1e-4


@pytest.mark.parametrize("name", ["BERT", pytest.param("SqueezeBERT", marks=pytest.mark.full_grid)])
def test_the_encoder_below_a_classifier_gives_vectors(name: str, tmp_path: Path) -> None:
    """Its vectors match the whole model's. They need no weights of a pooler, although SqueezeBERT always calls it."""
    family, fields = OTHERS.get(name, (FAMILIES["BERT"], {}))
    source = family.save(tmp_path / "checkpoint", CLASSIFIES, **fields)
    edit_weights(source, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".pooler." in name])
    bundle = exported(source, task="feature-extraction")
    [encoding] = Service(bundle.path).encodings(embed.EmbedInput("a film of the first half hour", embed.EmbedParameters()))
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
    assert load_checkpoint(str(source))
    edit_json(bert(tmp_path) / "config.json", attention_type="relative_shift")  # Funnel has this field, too
    assert load_checkpoint(str(tmp_path / "tiny-bert"))


def test_a_model_that_needs_a_language_is_refused(tmp_path: Path) -> None:
    assert "ValueError: Input language" in refused(XMOD.save(tmp_path / "languages", CLASSIFIES))


@pytest.mark.full_grid
def test_a_model_of_convolutions_gets_no_int8_graph(tmp_path: Path) -> None:
    """SqueezeBERT has convolutions instead of matrix products. Its bundle has only fp32, and names the flag for that."""
    family, fields = OTHERS["SqueezeBERT"]
    source = family.save(tmp_path / "checkpoint", "token-classification", **fields)
    manifest = exported(source, precisions=None).manifest
    [omitted] = manifest.omitted

    assert [(graph.precision, graph.default) for graph in manifest.graphs] == [("fp32", True)]
    assert all(fact in omitted.reason for fact in ("no matrix", "--precision fp32"))


def saved(path: Path, architecture: str, config: Any, tokenizer: Any) -> Path:
    save_random(path, architecture, config)
    tokenizer.save_pretrained(path)
    return path


def test_a_model_without_a_supported_task_is_refused(tmp_path: Path) -> None:
    """The name of a language model ends in `Model`, like that of an encoder."""
    config = transformers.GPT2Config(vocab_size=2000, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH)
    source = saved(tmp_path / "other", "GPT2LMHeadModel", config, roberta_tokenizer())

    assert "['GPT2LMHeadModel']; give --task" in refused(source)
    assert " fill-mask head for a GPT2Config " in refused(source, task="fill-mask")


def test_another_head_for_the_same_task_is_refused(tmp_path: Path) -> None:
    family, tokenizer = FAMILIES["XLNet"], FAMILIES["XLNet"].tokenizer()
    config = family.config(vocab_size=len(tokenizer), d_model=32, n_layer=2, n_head=4, d_inner=64)
    source = saved(tmp_path / "beam", "XLNetForQuestionAnswering", config, tokenizer)

    assert "['XLNetForQuestionAnswering'] is not XLNetForQuestionAnsweringSimple" in refused(source)


FUNNEL = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1, 1]}


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        # hashes characters, so it has no embedding to compare with a vocabulary
        ("Canine", SIZES, "no embedding"),
        # mixes tokens with a Fourier transform, which TorchScript cannot export
        ("FNet", {"vocab_size": 2000, **SIZES}, " torchscript: UnsupportedOperatorError: "),
        # cannot read a text of two tokens: the first run, which chooses the padding, fails with the cause
        pytest.param("Funnel", {"vocab_size": 2000, **FUNNEL}, "[1, 4, 2, 1]", marks=pytest.mark.full_grid),
    ],
)
def test_a_model_that_cannot_be_run_or_traced_is_refused(tmp_path: Path, model: str, fields: dict[str, Any], reason: str) -> None:
    architecture = f"{model}ForSequenceClassification"
    config = getattr(transformers, f"{model}Config")(**fields)
    message = refused(saved(tmp_path / "other", architecture, config, bert_tokenizer()))

    assert architecture in message
    assert reason in message


def test_an_embedding_model_without_a_hidden_size_is_refused(tmp_path: Path) -> None:
    """CLIP contains two models, each with its own hidden size."""
    config = transformers.CLIPConfig(text_config={"vocab_size": 2000, **SIZES}, vision_config={**SIZES, "image_size": 8, "patch_size": 4})
    transformers.CLIPModel(config).save_pretrained(tmp_path / "clip")
    bert_tokenizer().save_pretrained(tmp_path / "clip")

    assert "no `hidden_size`" in refused(tmp_path / "clip", task="feature-extraction")


def test_padding_is_on_the_side_that_the_model_supports(tmp_path: Path) -> None:
    """Absolute positions count padding on the left, whatever the tokenizer says. XLNet needs a token at the last position."""
    source = FAMILIES["BERT"].save(tmp_path / "left", "text-classification")
    edit_json(source / "tokenizer_config.json", padding_side="left")
    other = FAMILIES["XLNet"].save(tmp_path / "right", "text-classification")
    edit_json(other / "tokenizer_config.json", padding_side="right")

    assert load_checkpoint(str(source)).tokenizer.padding_side == "right"
    assert load_checkpoint(str(other)).tokenizer.padding_side == "left"


def test_a_tokenizer_without_a_limit_gets_the_default_length(tmp_path: Path) -> None:
    """Relative positions have no maximum, and 10^30 tokens are not a usable length."""
    source = FAMILIES["XLNet"].save(tmp_path / "endless", "text-classification")
    edit_json(source / "tokenizer_config.json", model_max_length=int(1e30))

    assert load_checkpoint(str(source)).tokenizer.max_length == 512


def test_a_fill_mask_checkpoint_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    source = bert(tmp_path, architecture="BertForMaskedLM")
    edit_json(source / "tokenizer_config.json", mask_token=None, tokenizer_class="PreTrainedTokenizerFast")

    assert "mask token" in refused(source)


def test_a_question_answering_checkpoint_without_cls_has_no_null_answer(tmp_path: Path) -> None:
    source = bert(tmp_path, architecture="BertForQuestionAnswering", labels=("LABEL_0", "LABEL_1"))
    edit_json(source / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    template = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["post_processor"]
    for pieces in (template["single"], template["pair"]):
        del pieces[0]
    edit_json(source / "tokenizer.json", post_processor=template)

    assert load_checkpoint(str(source)).tokenizer.cls_index is None


@pytest.mark.full_grid
def test_shared_weights_of_layers_are_stored_once(tmp_path: Path) -> None:
    """Twice as many layers add nodes to a graph but no weights, in float and in int8."""
    sizes = []
    for layers in (1, 2):
        _, bundle = save_bundle("ALBERT", "token-classification", tmp_path / str(layers), num_hidden_layers=layers)
        models = [onnx.load(str(bundle.path / graph.file)) for graph in bundle.manifest.graphs]
        sizes.append([sum(len(tensor.raw_data) for tensor in model.graph.initializer if len(tensor.dims) == 2) for model in models])

    assert sizes[1] == sizes[0]
    assert min(sizes[0]) > 0


FULL = pytest.mark.full_grid
HEADS = SIZES["num_attention_heads"]
PRUNED = {0: (1, 3), 1: (0,)}


def saved_bert(folder: Path, **fields: Any) -> tuple[Path, Any]:
    """Returns a checkpoint and its model, which later changes of the checkpoint do not affect."""
    source = FAMILIES["BERT"].save(folder / "checkpoint", CLASSIFIES, **fields)
    return source, transformers.AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32).eval()


@FULL
def test_a_checkpoint_with_pruned_heads_is_exported(tmp_path: Path) -> None:
    source, whole = saved_bert(tmp_path)
    prune_heads(source, PRUNED, heads=HEADS)
    silence_heads(whole, PRUNED, heads=HEADS)
    bundle = exported(source, precisions=("fp32", "int8"), max_int8_error=1.0)

    assert logit_error(bundle, lambda ids: whole(ids).logits) <= 1e-4
    assert logit_error(bundle, lambda ids: whole(ids).logits, "int8") <= 0.5
    assert bundle.manifest.graphs[0].batch_invariant
    assert bundle.manifest.graphs[0].validation.fusions["Attention"] == SIZES["num_hidden_layers"]


@pytest.mark.parametrize(
    ("pruned", "message"),
    [
        # a layer without heads, a head that does not exist, a name that is not a layer, a value that is not a list
        *((pruned, "`pruned_heads`") for pruned in ({"0": [0, 1, 2, 3]}, {"0": [4]}, {"layer": [1]}, {"0": 1})),
        # matrices that are not pruned
        ({"0": [1]}, r"\[32, 24\]"),
    ],
)
def test_invalid_pruned_heads_are_refused(tmp_path: Path, pruned: dict[str, Any], message: str) -> None:
    source, _ = saved_bert(tmp_path)
    edit_json(source / "config.json", pruned_heads=pruned)

    with raises_exactly(ExportError, match=message):
        load_checkpoint(str(source))


def test_distilbert_with_a_pruned_head_is_loaded(tmp_path: Path) -> None:
    source = FAMILIES["DistilBERT"].save(tmp_path / "checkpoint", CLASSIFIES)
    layer = "distilbert.transformer.layer.{}.attention"
    prune_heads(source, {0: (0,)}, heads=HEADS, layer=layer, inputs=("q_lin", "k_lin", "v_lin"), output="out_lin")
    weight = load_checkpoint(str(source)).model.get_parameter(f"{layer.format(0)}.out_lin.weight")

    assert weight.shape == (32, 32 - 32 // HEADS)
