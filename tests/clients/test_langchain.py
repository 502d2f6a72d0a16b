"""LangChain: embeddings through the huggingface_hub client and through the OpenAI client."""

import asyncio

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings

TEXTS = ["a good film", "a bad\nfilm"]


def test_the_huggingface_class_returns_embeddings(url: str) -> None:
    """Since version 1, the class has no URL parameter, so the test replaces its clients."""
    embeddings = HuggingFaceEndpointEmbeddings(model="any/name", huggingfacehub_api_token="hf_x")
    embeddings.client = InferenceClient(model=f"{url}/embed")
    embeddings.async_client = AsyncInferenceClient(model=f"{url}/embed")
    vectors = embeddings.embed_documents(TEXTS)

    assert [len(vector) for vector in vectors] == [384, 384]
    assert embeddings.embed_query(TEXTS[0]) == pytest.approx(vectors[0])
    assert asyncio.run(embeddings.aembed_documents(TEXTS))[1] == pytest.approx(vectors[1])


def test_the_openai_class_returns_embeddings(url: str) -> None:
    """By default, the class sends token ids of OpenAI's vocabulary; `check_embedding_ctx_length=False` makes it send texts."""
    embeddings = OpenAIEmbeddings(base_url=f"{url}/v1", api_key="x", model="embed", check_embedding_ctx_length=False)
    raw = InferenceClient(model=f"{url}/embed").feature_extraction(TEXTS)

    for expected, vector in zip(raw, embeddings.embed_documents(TEXTS), strict=True):
        assert vector == pytest.approx(expected.tolist(), rel=1e-6)
