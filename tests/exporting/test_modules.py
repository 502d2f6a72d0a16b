"""PyTorch modules of a user: the modules of examples/ are exported, and invalid modules refused."""

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import bertserve.service.cli
from bertserve.export import cli
from bertserve.export.checkpoint.module import load_module
from bertserve.export.errors import ExportError
from bertserve.service.bundle.files import Bundle
from support import ROOT, raises_exactly, tiny
from support.bundles import exported, usage_error
from support.grid import logit_error

pytestmark = pytest.mark.torch

LENGTH = 128


def example(folder: Path, name: str) -> tuple[str, Any]:
    """Writes an example with a tokenizer and random weights; returns the value of `--module`, and the module."""
    path = Path(shutil.copy(ROOT / "examples" / f"{name}.py", folder))
    tiny.tokenizer().save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    module = runpy.run_path(str(path))[name.title()]().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # a lost parameter of zeros would not show
    save_file(module.state_dict(), folder / f"{name}.safetensors")
    return f"{path}:make", module


def test_the_page_shows_the_function_of_the_tagger() -> None:
    page = (ROOT / "docs/how-to/serve-a-checkpoint.md").read_text(encoding="utf-8")
    assert re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[0] in (ROOT / "examples/tagger.py").read_text(encoding="utf-8")


def bundle_of(reference: str, folder: Path, **options: Any) -> Bundle:
    return exported(reference, folder / "models", module=True, max_int8_error=1.0, **options)


@pytest.mark.parametrize(
    ("name", "precisions"), [("tagger", ("fp32",)), pytest.param("recurrent", ("fp32", "int8"), marks=pytest.mark.full_grid)]
)
def test_an_example_answers_like_its_module(name: str, precisions: tuple[str, ...], tmp_path: Path) -> None:
    reference, module = example(tmp_path, name)
    bundle = bundle_of(reference, tmp_path, precisions=precisions)
    manifest = bundle.manifest

    def logits_of(ids: torch.Tensor) -> Any:
        return module(ids, torch.ones_like(ids))

    assert logit_error(bundle, logits_of) <= 1e-4
    assert manifest.graphs[0].batch_invariant
    assert (manifest.name, manifest.source.checkpoint, manifest.tokenizer.max_length) == (name, f"{name}.py:make", LENGTH)
    if "int8" in precisions:
        assert manifest.graphs[1].validation.quantized["MatMulIntegerToFloat"] >= 2
        assert logit_error(bundle, logits_of, "int8") <= 0.5
    assert bertserve.service.cli.main(["check", "--models", str(bundle.path.parent)]) == 0


def test_a_bundle_is_verified_against_its_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference, module = example(tmp_path, "tagger")
    path = bundle_of(reference, tmp_path).path
    trusted = ["verify", str(path), "--module", reference, "--trust-module"]
    assert cli.main(trusted) == 0
    assert "ok      parity cpu/fp32" in capsys.readouterr().out
    assert cli.main(["verify", str(path), "--checkpoint", str(tmp_path)]) == 1
    assert "--module FILE:FACTORY and --trust-module" in capsys.readouterr().err
    assert cli.main([*trusted, "--update"]) == 0

    save_file({name: 2 * tensor for name, tensor in module.state_dict().items()}, tmp_path / "tagger.safetensors")
    capsys.readouterr()
    assert cli.main(trusted) == 1
    assert "FAILED  checkpoint" in capsys.readouterr().out


def test_a_module_that_depends_on_padding_is_not_batch_invariant(tmp_path: Path) -> None:
    reference, _ = example(tmp_path, "tagger")
    path = Path(reference.removesuffix(":make"))
    code = path.read_text(encoding="utf-8")
    path.write_text(
        code.replace("place < count, count - 1 - place, place", "place < count + 999, place.flip(0) + 0 * count, place"), encoding="utf-8"
    )

    assert not bundle_of(reference, tmp_path).manifest.graphs[0].batch_invariant


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--module", "loud.py:make"], "`loud.py:make`"),
        (["folder", "--module", "loud.py:make", "--trust-module"], "give a SOURCE"),
        ([], "give a SOURCE"),
        ([""], "give a SOURCE"),
        (["folder", "--trust-module"], "--trust-module:"),
        (["--module", "loud.py:make", "--trust-module", "--task", "fill-mask"], "--task, --revision"),
        (["--module", "loud.py:make", "--trust-module", "--combine", "sum"], "--combine, --ignore-weights"),
        (["--module", "loud.py:make", "--trust-module", "--attentions"], "--attentions: "),
    ],
)
def test_code_is_not_run_without_permission(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text("open('ran', 'w')\n", encoding="utf-8")
    assert message in " ".join(usage_error(capsys, *arguments, "--output", "models").split())
    assert not (tmp_path / "ran").exists()


def test_the_command_announces_that_it_runs_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.py").write_text("def make():\n    raise KeyError('weights')\n", encoding="utf-8")
    arguments = ["--module", f"{tmp_path / 'bad.py'}:make", "--trust-module", "--output", str(tmp_path / "models")]

    assert cli.main(arguments) == 1
    ran, failed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bert-export:")]
    assert "--trust-module" in ran
    assert all(fact in failed for fact in ("`make`", "KeyError: 'weights'"))
    assert not list(tmp_path.glob("models/*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"labels": LABELS', '"labels": ["A", "A", "B", "C", "D"]'), "0: 'A', 1: 'A'"),
        (('"labels": LABELS', '"labels": ["A", "B"]'), r"`logits` .* \[2, 5, 5\] .* \[2, 5, 2\]"),
        (('"pad_token": "[PAD]"', '"pad_token": "<none>"'), "`pad_token` .* `<none>`"),
        (('"tokenizer": "tokenizer.json"', '"tokenizer": "none.json"'), "none.json` "),
        (('"max_length": 128', '"max_length": 2'), "`max_length`: .* 3 .* 2"),
        (("words = self.embedding(input_ids)", "words = self.embedding(input_ids + 120)"), r" at most \d+, .*: IndexError: "),
        (("words = self.embedding(input_ids)", "words = self.embedding(input_ids[:, :9] + 0 * input_ids)"), " 128 tokens: RuntimeError: "),
        (
            ("input_ids: Tensor, attention_mask: Tensor) -> Tensor:", "ids, attention_mask):\n        input_ids = ids"),
            "`forward` .* `input_ids`",
        ),
        (("def make()", "def other()"), "`make` .*: AttributeError: "),
        (('return {\n        "module"', 'return {} or {\n        "modul"'), "ModuleSpec: `module?`"),
    ],
)
def test_an_invalid_module_is_refused_with_the_reason(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    reference, _ = example(tmp_path, "tagger")
    path = Path(reference.removesuffix(":make"))
    code = path.read_text(encoding="utf-8")
    assert change[0] in code
    assert len(change[0]) != len(change[1])  # Python compares time (in seconds) and size, and would run the bytecode of the original
    path.write_text(code.replace(*change), encoding="utf-8")

    with raises_exactly(ExportError, match=message):
        load_module(reference)


@pytest.mark.parametrize("reference", ["nothing.py:make", "nothing.py", "a.py:not a name"])
def test_an_invalid_module_reference_is_refused(reference: str) -> None:
    with raises_exactly(ExportError, match="FILE:FACTORY"):
        load_module(reference)
