"""The front matter of a checkpoint's card: what is read of it, and what is left out with a note."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertserve.export.checkpoint.source import MAX_CARD_BYTES, CardMetadata, read_card, read_card_metadata

pytestmark = pytest.mark.torch


def card(folder: Path, front_matter: str) -> Path:
    """Writes a card with this front matter and returns its path."""
    path = folder / "README.md"
    path.write_text(f"---\n{front_matter}\n---\n# A model\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("front_matter", "expected"),
    [
        ("license: mit", CardMetadata(license=("mit",))),
        ("license: [mit, apache-2.0]\nlanguage: en", CardMetadata(license=("mit", "apache-2.0"), language=("en",))),
        (
            "license: other\nlicense_name: our-terms\nlicense_link: LICENSE.md",
            CardMetadata(license=("other",), license_name="our-terms", license_link="LICENSE.md"),
        ),
        ("language:\n- 'no'\n- zh\ndatasets:\n- stanfordnlp/sst2", CardMetadata(language=("no", "zh"), datasets=("stanfordnlp/sst2",))),
        ("license:\nlanguage: []\ntags: {a: 1}\n5: x", CardMetadata()),
        ("", CardMetadata()),
    ],
)
def test_what_a_card_says_is_read(tmp_path: Path, front_matter: str, expected: CardMetadata, caplog: pytest.LogCaptureFixture) -> None:
    """A text is a list of one; other fields, and those without a value, are nothing to note."""
    assert expected == read_card_metadata(card(tmp_path, front_matter))
    assert "" == caplog.text


@pytest.mark.parametrize("content", [None, "", "# A model", "license: mit", "---\nlicense: mit"])
def test_a_checkpoint_without_front_matter_has_none(tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """No card, or none with a block of YAML at its beginning."""
    if content is not None:
        (tmp_path / "README.md").write_text(content, encoding="utf-8")

    assert CardMetadata() == read_card_metadata(tmp_path / "README.md")
    assert "" == caplog.text


@pytest.mark.parametrize(
    ("line", "key", "shown"),
    [
        ("license: 5", "license", "5 instead of a text or a list of texts,"),
        ("license: {id: mit}", "license", "{'id': 'mit'}"),
        ("license: [[mit]]", "license", "[['mit']]"),
        ("license_name: [a]", "license_name", "['a'] instead of a text,"),
        ("language: no", "language", "False"),
        ("datasets: [sst2, 2024-01-01]", "datasets", "['sst2', datetime.date(2024, 1, 1)]"),
        (f"datasets: {list(range(1000))}", "datasets", "21, 2… instead of"),
    ],
)
def test_a_value_that_is_no_text_is_left_out_and_noted(
    tmp_path: Path, line: str, key: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The note has key and value, and the other fields are read."""
    found = read_card_metadata(card(tmp_path, f"{line}\n{'license' if key != 'license' else 'language'}: en"))

    assert CardMetadata(**{"license" if key != "license" else "language": ("en",)}) == found
    assert caplog.text.count(f"`{key}` in the front matter of `{tmp_path / 'README.md'}` is ") == 1
    assert shown in caplog.text


@pytest.mark.parametrize(
    "front_matter",
    [
        "- license",
        "license: [mit",
        "license: mit\n\tlanguage: en",
        "a: !!python/object:os.system x",
        "date: 2024-99-99",
        "a: !!int ''",
        "[" * 9999,
        "a: &a [mit]\nlicense: *a",
    ],
)
def test_broken_front_matter_is_noted(tmp_path: Path, front_matter: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever YAML makes of it ends no export."""
    assert CardMetadata() == read_card_metadata(card(tmp_path, front_matter))
    assert "is not a YAML object" in caplog.text


def test_a_card_that_is_not_in_utf_8_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its bytes are not guessed at; one with a byte order mark is read."""
    (tmp_path / "README.md").write_bytes("---\nlicense: mit\n---\n".encode("utf-16"))
    assert CardMetadata() == read_card_metadata(tmp_path / "README.md")
    assert "is not a YAML object" in caplog.text
    (tmp_path / "README.md").write_bytes("---\r\nlicense: mit\r\n---\r\n".encode("utf-8-sig"))
    assert ("mit",) == read_card_metadata(tmp_path / "README.md").license


def test_a_card_that_is_gigabytes_once_it_is_written_out_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nine lists of ten aliases each are 10^9 values; and merged keys multiply while they are read."""
    lists = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)), "license: *a9"]
    merged = ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 10))]
    for lines in (lists, merged):
        caplog.clear()
        assert CardMetadata() == read_card_metadata(card(tmp_path, "\n".join(lines)))
        assert "has an alias" in caplog.text


def test_a_card_without_end_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is neither read nor quoted."""
    path = card(tmp_path, "license: mit")
    with path.open("r+b") as file:
        file.truncate(MAX_CARD_BYTES + 1)
    assert CardMetadata() == read_card_metadata(path)
    assert read_card(path) is None
    assert f"more than {MAX_CARD_BYTES} bytes" in caplog.text
