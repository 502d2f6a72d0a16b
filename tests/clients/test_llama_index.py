"""LlamaIndex: the classes that take an endpoint URL, for the Hub API, Text Embeddings Inference and Jina."""

import asyncio
from collections.abc import Callable

import pytest
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.huggingface_api import HuggingFaceInferenceAPIEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

TEXTS = ["a good film", "a bad film"]


def test_both_embedding_classes_return_the_same_vectors(url: str) -> None:
    hub = HuggingFaceInferenceAPIEmbedding(model_name=f"{url}/embed", token="hf_x")
    inference = TextEmbeddingsInference(base_url=url, model_name="embed")
    vectors = inference.get_text_embedding_batch(TEXTS)

    assert [len(vector) for vector in vectors] == [384, 384]
    assert asyncio.run(hub.aget_text_embedding(TEXTS[0])) == pytest.approx(vectors[0], rel=1e-6)
    assert asyncio.run(inference.aget_text_embedding(TEXTS[1])) == pytest.approx(vectors[1], rel=1e-6)


@pytest.mark.parametrize(
    "build",
    [
        lambda url: TextEmbeddingInference(base_url=url, top_n=2),
        lambda url: JinaRerank(base_url=f"{url}/v1", api_key="none", model="rerank", top_n=2),
    ],
    ids=["TEI", "Jina"],
)
def test_nodes_are_ranked(url: str, build: Callable[[str], BaseNodePostprocessor]) -> None:
    texts = ("The film was too long.", "The bridge was built in Porto.", "A dull book.")
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
    ranked = build(url).postprocess_nodes(nodes, query_str="Where was the bridge built?")

    assert [ranked[0].text, len(ranked)] == ["The bridge was built in Porto.", 2]
    assert ranked[0].score > 0.5 > ranked[1].score
