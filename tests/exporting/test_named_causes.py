"""Checkpoints whose export once ended in an error about something else: each is exported now, or refused by its cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

import tiny
from bertserve.export import cli
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.errors import CheckpointError
from bundles import FAST, Run
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
    source = bert(tmp_path, positions=positions, architecture=architecture)
    assert 0 == cli.main([str(source), "--output", str(tmp_path / "models"), *FAST])


def test_too_few_positions_are_refused_by_name(tmp_path: Path) -> None:
    """Not by sizes of tensors."""
    with pytest.raises(CheckpointError, match=r"usable length of 8 tokens.* needs 16.*max_position_embeddings"):
        load_checkpoint(str(bert(tmp_path, positions=8)))


def test_windows_without_room_end_the_export_in_one_line(tmp_path: Path, run: Run) -> None:
    """Questions of the samples leave a short model no room for a passage, so that tokenizers panics."""
    code, message = run(bert(tmp_path, "short", positions=24, architecture="BertForQuestionAnswering", labels=("a", "b")), *FAST)
    assert 1 == code
    assert "cannot run all samples of up to 24 tokens" in message


@pytest.mark.parametrize("token", ["the", "!"])
def test_padding_by_an_ordinary_token_is_refused(tmp_path: Path, run: Run, token: str) -> None:
    """Which the service would read as unknown text, so that parity failed without a cause."""
    source = bert(tmp_path, "padded")
    edit_json(source / "tokenizer_config.json", pad_token=token)
    edit_json(source / "config.json", pad_token_id=tiny.VOCABULARY.index(token))
    code, message = run(source, *FAST)
    assert 1 == code
    assert f"the padding token of `{source}` is `{token}` (id {tiny.VOCABULARY.index(token)}), which is an ordinary token" in message


def response(status: int) -> Any:
    """Returns the hub's response of a status."""
    return httpx.Response(status, request=httpx.Request("GET", "http://hub"))


def gated() -> Exception:
    """Returns what huggingface_hub raises for a gated repository."""
    return GatedRepoError("403 Client Error.", response=response(403))


def hidden() -> Exception:
    """Returns what huggingface_hub raises for a repository that is private, or does not exist."""
    return RepositoryNotFoundError("401 Client Error.", response=response(401))


def uncached() -> Exception:
    """Returns what huggingface_hub raises for a gated repository of which nothing is in the cache."""
    error = LocalEntryNotFoundError("not in the cache")
    error.__cause__ = gated()
    return error


@pytest.mark.parametrize(
    ("error", "named"), [(gated(), "is a gated repository"), (uncached(), "is a gated repository"), (hidden(), "private")]
)
def test_a_repository_that_needs_a_token_says_so(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, named: str) -> None:
    """And how one is given."""

    def download(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("bertserve.export.checkpoint.source.snapshot_download", download)
    code, message = run("org/model", *FAST)
    assert 1 == code
    assert named in message
    assert "HF_TOKEN" in message
    assert "hf auth login" in message
