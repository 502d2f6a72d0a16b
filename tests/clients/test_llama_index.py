"""LlamaIndex: the classes that take an endpoint URL, for the Hub API and for Text Embeddings Inference."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.huggingface_api import HuggingFaceInferenceAPIEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

TEXTS = ["a good film", "a bad film"]


def test_both_embedding_classes_return_the_same_vectors(url: str) -> None:
    hub = HuggingFaceInferenceAPIEmbedding(model_name=f"{url}/embed", token="hf_x")
    inference = TextEmbeddingsInference(base_url=url, model_name="embed")
    vectors = inference.get_text_embedding_batch(TEXTS)

    assert [384, 384] == [len(vector) for vector in vectors]
    assert vectors[0] == pytest.approx(asyncio.run(hub.aget_text_embedding(TEXTS[0])), rel=1e-6)
    assert vectors[1] == pytest.approx(asyncio.run(inference.aget_text_embedding(TEXTS[1])), rel=1e-6)


def test_nodes_are_ranked(url: str) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in ("a bad film", "a good film", "a dull book")]
    ranked = TextEmbeddingInference(base_url=url, top_n=2).postprocess_nodes(nodes, query_str="good")
    scores = [node.score for node in ranked]

    assert 2 == len(ranked)
    assert sorted(scores, reverse=True) == scores
