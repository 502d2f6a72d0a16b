"""Checkpoints whose export once ended in an error about something else: each is exported now, or refused by its cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

import tiny
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import CheckpointError
from bundles import FAST, Run, exported
from checkpoints import bert, edit_json
from test_embeddings import encoder, sentence_transformers

pytestmark = pytest.mark.torch
pytest_plugins = ("export_fixtures",)


def test_modules_json_decides_for_embeddings(tmp_path: Path) -> None:
    """all-mpnet-base-v2's configuration names the class that its base was trained in, and its weights have no such head."""
    source = sentence_transformers(encoder(tmp_path), "Transformer", "Pooling", "Normalize")
    edit_json(source / "config.json", architectures=["BertForMaskedLM"])
    checkpoint = load_checkpoint(str(source))
    assert "feature-extraction" == checkpoint.task
    assert checkpoint.embedding is not None
    assert ("mean", True) == (checkpoint.embedding.pooling, checkpoint.embedding.normalize)


def test_modules_without_pooling_decide_nothing(tmp_path: Path) -> None:
    """A cross-encoder that lists its one module is a classifier still, and --task goes over both."""
    source = bert(tmp_path)
    (source / "modules.json").write_text('[{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]', encoding="utf-8")
    assert "text-classification" == load_checkpoint(str(source)).task
    masked = sentence_transformers(bert(tmp_path, "masked", architecture="BertForMaskedLM"), "Transformer", "Pooling")
    assert "fill-mask" == load_checkpoint(str(masked), task="fill-mask").task


@pytest.mark.parametrize(("architecture", "positions"), [("BertForSequenceClassification", 16), ("BertForMaskedLM", 32)])
def test_a_short_position_table_is_long_enough(tmp_path: Path, architecture: str, positions: int) -> None:
    """The texts with which padding is found are cut to it."""
    assert positions == exported(bert(tmp_path, positions=positions, architecture=architecture)).manifest.tokenizer.max_length


def test_too_few_positions_are_refused_by_name(tmp_path: Path) -> None:
    """Not by sizes of tensors."""
    with pytest.raises(CheckpointError, match=r"usable length of 8 tokens.* needs 16.*max_position_embeddings"):
        load_checkpoint(str(bert(tmp_path, positions=8)))


@pytest.mark.parametrize("token", ["the", "!"])
def test_padding_by_an_ordinary_token_is_refused(tmp_path: Path, run: Run, token: str) -> None:
    """Which the service would read as unknown text, so that parity failed without a cause."""
    source = bert(tmp_path, "padded")
    edit_json(source / "tokenizer_config.json", pad_token=token)
    edit_json(source / "config.json", pad_token_id=tiny.VOCABULARY.index(token))
    code, message = run(source, *FAST)
    assert 1 == code
    assert f"`{token}` (id {tiny.VOCABULARY.index(token)}), which is an ordinary token" in message


def response(status: int) -> Any:
    """Returns the hub's response of a status."""
    return httpx.Response(status, request=httpx.Request("GET", "http://hub"))


def uncached() -> Exception:
    """Returns what huggingface_hub raises for a gated repository of which nothing is in the cache."""
    error = LocalEntryNotFoundError("not in the cache")
    error.__cause__ = GATED
    return error


GATED = GatedRepoError("403 Client Error.", response=response(403))
PRIVATE = RepositoryNotFoundError("401 Client Error.", response=response(401))  # or one that does not exist


@pytest.mark.parametrize(("error", "named"), [(GATED, "gated"), (uncached(), "gated"), (PRIVATE, "private")])
def test_a_repository_that_needs_a_token_says_so(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, named: str) -> None:
    """And how one is given."""

    def download(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("bertserve.export.checkpoint.source.snapshot_download", download)
    code, message = run("org/model", *FAST)
    assert 1 == code
    assert all(fact in message for fact in (named, "HF_TOKEN", "hf auth login"))
