"""Ordinary texts as questions with choices: which texts are the choices of one question, and which text is asked about. Pure."""

from __future__ import annotations

CHOICES = 4  # of a question


def asked(choice: int, count: int) -> int:
    """Returns which of `count` texts is the question of a choice, by the choice's index: the text before its group, or the last of all."""
    return (choice - choice % CHOICES - 1) % count
