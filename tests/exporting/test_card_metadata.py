"""The front matter of a checkpoint's card: the fields that are read, and the values that are ignored with a warning."""

from pathlib import Path
from typing import Any

import pytest

from bertserve.export.checkpoint.card import MAX_CARD_BYTES, MAX_FRONT_MATTER_CHARS, find_card, read_card_metadata
from bertserve.export.model_card import model_card
from bertserve.service.bundle.files import load_bundle
from support import ROOT

pytestmark = pytest.mark.torch


def card(folder: Path, content: str | bytes) -> Path:
    path = folder / "README.md"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def front(matter: str) -> str:
    return f"---\n{matter}\n---\n# A model\n"


def fields(**values: Any) -> dict[str, Any]:
    """Returns the fields of a card with these values; all others are empty."""
    return {"license": (), "license_name": None, "license_link": None, "language": (), "datasets": ()} | values


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("---\r\nlicense: mit\r\n---\r\n".encode("utf-8-sig"), fields(license=("mit",))),  # with a byte order mark
        (front("license: [mit, apache-2.0]\nlicense_name: terms"), fields(license=("mit", "apache-2.0"), license_name="terms")),
        (front("language:\n- 'no'\n- zh\ndatasets:\n- stanfordnlp/sst2"), fields(language=("no", "zh"), datasets=("stanfordnlp/sst2",))),
        # unknown fields, fields without a value, and no front matter at the beginning
        (front("license:\nlanguage: []\ntags: {a: 1}\n5: x"), fields()),
        ("", fields()),
        ("---\nlicense: mit", fields()),
    ],
)
def test_card_fields_are_read(tmp_path: Path, content: str | bytes, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A string is read as a list of one. A missing field or a missing card causes no warning."""
    assert read_card_metadata(card(tmp_path, content)) == expected
    assert read_card_metadata(find_card(tmp_path / "none")) == fields()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "key", "row"),
    [
        ("license: {id: mit}", "license", "{'id': 'mit'}"),
        ("license_name: [a]", "license_name", "['a']"),
        ("language: no", "language", "False"),
        ("datasets: [sst2, 2024-01-01]", "datasets", "['sst2', datetime.date(2024, 1, 1)]"),
        (f"datasets: {list(range(1000))}", "datasets", str(list(range(1000)))[:80]),
    ],
)
def test_a_value_that_is_not_a_string_is_ignored_with_a_warning(
    tmp_path: Path, line: str, key: str, row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "license" if key != "license" else "language"

    assert read_card_metadata(card(tmp_path, front(f"{line}\n{other}: en"))) == fields(**{other: ("en",)})
    [line] = capsys.readouterr().err.splitlines()
    assert f"WARNING: `{key}` in the front matter of `{tmp_path / 'README.md'}` is {row} instead" in line


# It expands to gigabytes: nine levels of ten aliases are 10^9 values.
ALIASES = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)), "license: *a9"]


@pytest.mark.parametrize(
    "content",
    [
        front("- license"),
        front("license: [mit"),
        front("a: !!python/object:os.system x"),
        front("date: 2024-99-99"),
        "---\nlicense: mit\n---\n".encode("utf-16"),
        front("\n".join(ALIASES)),
        front("license: mit") + "a" * MAX_CARD_BYTES,
        front("license: mit\n" + "# comment\n" * (MAX_FRONT_MATTER_CHARS // 10)),
        front("license: mit\na: " + "[" * 33 + "]" * 33),
    ],
    ids=range(9),
)
def test_broken_front_matter_and_a_large_card_are_warnings(
    tmp_path: Path, content: str | bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invalid YAML does not make the export fail. Bytes that are not UTF-8 are not decoded with another encoding."""
    assert read_card_metadata(find_card(card(tmp_path, content).parent)) == fields()
    [line] = capsys.readouterr().err.splitlines()
    assert f"`{tmp_path / 'README.md'}`" in line
    assert " unknown." in line  # if a field were ignored, the others would be known


@pytest.mark.parametrize(
    ("checkpoint", "target", "is_read"),
    [
        ("models--a--b/snapshots/0123", "../../blobs/45", True),
        ("a/b", "../../blobs/45", False),
        ("models--a--b/snapshots/0123", "../../../blobs/45", False),
        ("a", "docs/card.md", True),
    ],
)
def test_a_link_out_of_the_checkpoint_is_ignored(
    tmp_path: Path, checkpoint: str, target: str, is_read: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links from the hub's cache to its blobs are followed."""
    folder = tmp_path / checkpoint
    folder.mkdir(parents=True)
    (folder / target).resolve().parent.mkdir(exist_ok=True, parents=True)
    (folder / target).write_text(front("license: mit"), encoding="utf-8")
    (folder / "README.md").symlink_to(target)

    assert read_card_metadata(find_card(folder))["license"] == (("mit",) if is_read else ())
    assert is_read is (capsys.readouterr().err == "")


def test_the_card_separates_quantized_operators_from_matrices_in_float() -> None:
    bundle = load_bundle(ROOT / "models/embed")
    card = model_card(bundle.manifest, bundle.path)

    assert (
        "quantized MatMulIntegerToFloat 20, PerRowEmbedding 1; partly or wholly in float FloatUnits 6, FloatInputs 7, KeptFloat 4" in card
    )
