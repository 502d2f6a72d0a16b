"""Tiny bundles that pass all checks of `bert-export verify`, and changes of them. Importing this module does not import torch."""

from pathlib import Path
from typing import Any

import onnx
import pytest

from bertserve.service.bundle.files import digest
from bertserve.service.engine.sessions import unavailable_reason
from support import json_lines, tiny
from support.bundles import Service

without_gpu = pytest.mark.skipif(unavailable_reason("cuda") is None, reason="this machine has a GPU")
TEXTS = ["a good film", "a bad book", "very dull !", "the film was not great", "fine", "poor , but short ."]
FP32 = "model.cpu.fp32.onnx"


def answer(path: Path, body: dict[str, Any], precision: str = "auto") -> Any:
    return Service(path, precision).answer(body)


def store_digests(path: Path) -> Path:
    def store(manifest: dict[str, Any]) -> None:
        for graph in manifest["graphs"]:
            graph["sha256"] = digest(path / graph["file"])

    return tiny.edit(path, store)


def store_example(path: Path) -> Path:
    return tiny.edit(path, lambda manifest: manifest["example"].update(result=answer(path, manifest["example"]["request"])))


def sound(folder: Path, task: str = "text-classification", *, other_seed: int | None = None, **fields: Any) -> Path:
    """Writes a tiny bundle that passes all checks, with a validation report and the result of its example.

    Args:
        folder: The models folder.
        task: Its task.
        other_seed: If given, the bundle also has an fp32 graph of this seed, and the default graph, of seed 0, is declared as int8.
        fields: Other fields of the manifest.
    """
    path = tiny.bundle(folder, task, task=task, max_length=160, **fields)

    def complete(manifest: dict[str, Any]) -> None:
        [graph] = manifest["graphs"]
        graph["validation"]["samples"] = 18
        if other_seed is not None:
            (path / FP32).rename(path / "model.cpu.int8.onnx")
            onnx.save(tiny.graph(task, labels=len(manifest["labels"]), seed=other_seed), str(path / FP32))
            other = graph | {"default": False, "sha256": digest(path / FP32)}
            # its bounds allow any difference
            validation = graph["validation"] | {"quantization_limit": 1000.0}
            manifest["graphs"] = [graph | {"file": "model.cpu.int8.onnx", "precision": "int8", "validation": validation}, other]

    return store_example(tiny.edit(path, complete))


def with_gpu_graph(path: Path, *, runnable: bool = True, only: bool = False) -> Path:
    """Adds a CUDA graph in fp16 to a bundle, or replaces its fp32 graph. The new graph is a copy, or an invalid file."""
    file = path / "model.cuda.fp16.onnx"
    file.write_bytes((path / FP32).read_bytes() if runnable else b"x")

    def add(manifest: dict[str, Any]) -> None:
        [graph] = manifest["graphs"]
        other = {"file": file.name, "sha256": digest(file), "provider": "cuda", "precision": "fp16"}
        other["validation"] = graph["validation"] | {"worst_abs_error": 0.25}
        manifest["graphs"] = [*([] if only else [graph]), graph | other]

    return tiny.edit(path, add)


def data(folder: Path, *lines: Any) -> Path:
    return json_lines(folder / "data.jsonl", *lines)
