"""The playground in a real Chromium, driven by playwright-core (`playground.mjs`): each loaded task, by keyboard."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from conftest import in_browser, needs_browser, running

pytestmark = needs_browser


@cache
def visit(url: str, *key: str) -> dict[str, Any]:
    return in_browser("playground.mjs", url, *key)


def test_every_task_is_run_and_shown(url: str) -> None:
    page = visit(url)
    tasks = page["tasks"]

    assert page["errors"] + page["outside"] == []
    assert {"Classify", "Entities", "Answer", "Fill mask", "Zero-shot", "Similarity", "Rerank", "Embed", "Attention"} <= tasks.keys()
    assert [name for name, task in tasks.items() if not task["result"].strip() or "inference" not in task["timing"]] == []
    assert "PER" in tasks["Entities"]["result"]
    assert "1886" in tasks["Answer"]["result"]
    assert "raises the score" in tasks["Classify"]["reasons"]
    assert "positive (99.7 %)" in tasks["Classify"]["spoken"]
    assert [name for name, task in tasks.items() if task["wide"] or task["read"]] == []
    assert page["nameless"] == []
    assert all(f"curl -s '{url}" in task["code"] for task in tasks.values())


def test_the_stages_of_a_request_are_shown_separately(url: str) -> None:
    """Each stage has a time and a description. All runs of `explain` count as inference, because an idle service has no queue."""
    page = visit(url)
    stages = ["tokenize", "queue", "inference", "decode", "rest"]
    stages_by_name = {name: (ms, about) for name, ms, about in page["explained"]}

    assert {name: [part[0] for part in task["stages"]] for name, task in page["tasks"].items()} == dict.fromkeys(page["tasks"], stages)
    assert list(stages_by_name) == stages
    assert (stages_by_name["queue"][1], stages_by_name["inference"][1]) == ("wait for the first run", "all runs of the model")
    assert stages_by_name["queue"][0] < stages_by_name["inference"][0] / 4


def test_attention_is_drawn_by_layer_and_head(url: str) -> None:
    page = visit(url)["attention"]

    assert page["heads"] == 3
    assert page["caption"].startswith("Head 2: each row is a token")
    assert "%" in page["row"]


def test_decisions_follow_the_slider_and_a_diagram_shows_the_calibration(url: str) -> None:
    page = visit(url)
    [[low, decided, bars], [high, abstained, _]] = page["decisions"]

    assert ([low, high], bars) == (["0.01", "0.99"], 3)
    assert decided in [f"Decision: {label}" for label in ("negative", "positive", "neutral")]
    assert re.fullmatch(r"No decision: the best score 0\.\d+ is below its threshold 0\.99\.", abstained)
    assert page["reliability"][0].startswith("Share of correct predictions")
    assert page["reliability"][1:] == [3, False]


def test_user_input_and_errors_are_shown_as_text(url: str) -> None:
    """Markup is not executed, a truncated text has a notice, and errors keep their message. The page fits a phone."""
    page = visit(url)

    assert "onerror" in page["markup"][0]
    assert page["markup"][1] == "bertserve playground"
    assert "truncation" in page["cut"][0]
    assert "characters" in page["cut"][1]
    assert page["cut"][2].lstrip().startswith("good")
    assert "80000" in page["problem"]
    assert "Requests per second" in page["load"]
    assert not page["wide"]


def test_the_form_stays_where_it_is_if_a_request_fails(url: str) -> None:
    assert visit(url)["moved"] == 0


def test_words_are_explained_on_request_and_up_to_a_length(url: str) -> None:
    """The first latency that a user sees has no runs for an explanation."""
    page = visit(url)

    assert page["explains"] is False
    assert "too long to explain" in page["tooLong"]


def test_the_load_is_hidden_if_there_are_no_metrics(url: str) -> None:
    assert visit(url)["shown"] == []


def test_the_windows_of_a_long_text_are_drawn(url: str) -> None:
    """The page draws all windows that the service read, and scrolls to the answer. The run button keeps the focus."""
    page = visit(url)["windows"]

    assert (page["read"], page["drawn"], page["rows"]) == ("Read in 4 windows", 4, 4)
    assert page["marked"].startswith("1914")
    assert page["inView"]
    assert (page["focus"], page["wide"]) == ("run", False)


def test_the_words_that_explain_an_answer_are_marked(url: str) -> None:
    """The marks are in the question and the passage, but not in the answer. A character beyond 16 bits does not shift them."""
    page = visit(url)["why"]

    assert (page["title"], page["texts"]) == ("Why “1886”?", ["Passage", "Question"])
    assert page["words"][2:10] == ["𝒜", "bridge", "was", "built", "in", "Porto", "in", "."]  # the first two belong to the legend


def test_the_page_asks_for_an_api_key(tiny_models: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("swordfish")
    with running(tiny_models, "--default", "text-classification=sentiment", "--api-key-file", str(tmp_path / "key")) as url:
        page = visit(url, "swordfish")

    assert "API key" in page["refused"]
    assert page["tasks"]["Classify"]["result"].strip()
    assert "swordfish" not in page["tasks"]["Classify"]["code"]
