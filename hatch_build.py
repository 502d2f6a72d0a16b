"""Builds the wheel: what are `service`, `export` and `bench` in this repository is installed as `bertserve.service` and so on.

Three words like these as packages of their own would collide with other people's. Their folders stay as they are, and nothing is kept
twice: each import of one of them is rewritten on the way into the wheel, by its place in the syntax tree. The commands start in
`bertserve.commands`, which an editable install has too; all else of that is this repository itself.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INSTALLED = "bertserve"
PACKAGES = ("service", "export", "bench")
PARTS = "BERTSERVE_PARTS"  # a variable for images: which packages the wheel gets, where that is not all
COMMANDS = {"bert_serve": "service", "bert_export": "export", "bert_bench": "bench"}
COMMAND = '''

def {command}() -> int:
    """Runs the command; returns its exit code."""
    from {package}.cli import main

    return main()
'''
LEFT_OUT = '''

def {command}() -> int:
    """Says that the command is not here; returns the exit code of a missing package."""
    print("{name}: this installation serves and has no `{package}`; install all of bertserve.", file=sys.stderr)
    return 3
'''


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    """Makes the package that the wheel holds, in a temporary folder."""

    _folder: Path

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the package, and has hatchling take it."""
        self._folder = Path(tempfile.mkdtemp())
        package = self._folder / INSTALLED
        package.mkdir()
        (package / "__init__.py").write_text('"""Serves fine-tuned BERT-family encoders: `bert-serve`, `bert-export`, `bert-bench`."""\n')
        editable = version == "editable"
        parts = os.environ.get(PARTS, ",".join(PACKAGES)).split(",")
        (package / "commands.py").write_text(commands(parts) if editable else rewritten(commands(parts)))
        for name in [] if editable else parts:
            _copy(Path(self.root) / name, package / name)
        build_data["force_include_editable" if editable else "force_include"][str(package)] = INSTALLED

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder)


def commands(parts: Sequence[str]) -> str:
    """Returns the source of the module in which the commands start.

    Args:
        parts: The packages that are installed.
    """
    functions = [
        (COMMAND if package in parts else LEFT_OUT).format(command=command, package=package, name=command.replace("_", "-"))
        for command, package in COMMANDS.items()
    ]
    return '"""Where the commands start."""\n\nimport sys\n' + "".join(functions)


def rewritten(source: str) -> str:
    """Returns Python source whose imports of our packages are those of the installed ones.

    Raises:
        ValueError: An import is of a form that cannot be told from a name, as `import service.cli`, which binds `service`.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module or ""):
            lines[node.lineno - 1] = re.sub(r"\bfrom\s+", f"from {INSTALLED}.", lines[node.lineno - 1], count=1)
        if isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            if len(node.names) > 1 or "." in node.names[0].name:
                raise ValueError(f"line {node.lineno}, `{lines[node.lineno - 1].strip()}`: write it as `from PACKAGE import MODULE`")
            lines[node.lineno - 1] = re.sub(r"\bimport\s+", f"from {INSTALLED} import ", lines[node.lineno - 1], count=1)
    return "".join(lines)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _copy(source: Path, target: Path) -> None:
    """Copies a package: its Python rewritten, its data as they are, and no documents or caches."""
    for path in sorted(source.rglob("*")):
        if path.suffix not in (".py", ".txt", ".html", ".css", ".js") or "__pycache__" in path.parts:
            continue
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            place.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copyfile(path, place)
