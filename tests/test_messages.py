"""The file of all messages."""

from __future__ import annotations

from golden import make_messages


def test_the_file_of_messages_is_up_to_date() -> None:
    """`messages.txt` has the messages of the code, so that a diff of it shows each change of wording."""
    stored = make_messages.FILE.read_text(encoding="utf-8").splitlines()

    assert make_messages.messages() == stored, "run `python tests/golden/make_messages.py`"
