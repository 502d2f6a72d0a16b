"""The golden file of all messages."""

from __future__ import annotations

from golden import make_messages


def test_the_file_of_messages_is_up_to_date() -> None:
    """`messages.txt` has all messages of the code, so that its diff shows each change of wording."""
    stored = make_messages.FILE.read_text(encoding="utf-8").splitlines()

    assert make_messages.messages() == stored, "run `python tests/golden/make_messages.py`"
