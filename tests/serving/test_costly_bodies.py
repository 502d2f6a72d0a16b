"""The largest allowed value of each field of each task, and one above, delay the event loop and need memory only within bounds.

The fields come from the bodies' models; a field without a case is an error. With `-s` and `-m ""`, pytest prints a line for each case.
"""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.task_spec import UNNAMED_TEXT, TaskSpec
from support import ROOT, tiny
from support.replica import BERT_SERVE, ServeProcess, running

pytestmark = pytest.mark.serial

STALL_S, MEMORY = 0.05, 150 * 2**20
TRIES = 4
ALLOWED = {200, 400, 404, 413, 422, 429}  # 400: not JSON; 404: a model of an unknown name
CHARS, ITEMS, BYTES, TOP_K = Settings().max_chars, Settings().max_inputs, Settings().max_body_bytes, Settings().max_top_k
LABELS, SPECIAL = 200, 2**62  # candidate labels; an integer without an upper bound
SENTENCE = "The old bridge was built by Ada Lovelace in Porto in 1886. "
NO_CHOICE = "no such value"
PER_TASK = (UNNAMED_TEXT, "top_k")  # fields that a task reads with its own code


def text(chars: int, of: str = SENTENCE) -> str:
    return (of * (chars // len(of) + 1))[:chars]


def fill_body(count: int) -> list[str]:
    """Returns texts of the same length that fill a body."""
    return [text(min(CHARS, (BYTES - 8000) // count - 4))] * count


PASSAGE = text(6000)
MASKED = text(300) + "[MASK] "
BASES: dict[str, dict[str, Any]] = {
    "text-classification": {"inputs": text(1500)},
    "token-classification": {"inputs": PASSAGE},
    "question-answering": {"inputs": {"question": "Who built it?", "context": PASSAGE}},
    "fill-mask": {"inputs": MASKED},
    "multiple-choice": {"inputs": {"question": "Who built it?", "context": PASSAGE, "choices": ["Ada.", "Nobody."]}},
    "feature-extraction": {"inputs": PASSAGE},
    "sentence-similarity": {"inputs": {"source_sentence": PASSAGE, "sentences": [PASSAGE] * 4}},
    "text-ranking": {"query": "Who built it?", "texts": [PASSAGE] * 4},
    "zero-shot-classification": {"inputs": text(300), "parameters": {"candidate_labels": ["building", "film"]}},
    "attention": {"inputs": text(300), "parameters": {"output_attentions": True}},
}
DECIDED = ("text-classification", "token-classification", "question-answering", "text-ranking", "zero-shot-classification")
SHORT_TEXTS = (["A short text."] * ITEMS, ["A short text."] * (ITEMS + 1))
SLOW_WORDS = text(2000, "q" * 100 + " ")
ONE_TEXT = (text(CHARS), text(CHARS + 1))
PUNCTUATION = (text(CHARS, "."), text(CHARS + 1, "."))  # a token for each character
UNKNOWN_WORDS = (text(CHARS, "q" * 100 + " "), text(CHARS + 1, "q" * 100 + " "))  # the slowest text for WordPiece
NUMBER = (SPECIAL, 10**400)
NUMBERS = ([-1] * 256, list(range(257)))
# (task, field) -> pairs of the largest allowed value and one above. A field that is missing here has its values in its schema.
CASES: dict[tuple[str, str], list[tuple[Any, Any]]] = {
    ("text-classification", "text"): [ONE_TEXT, PUNCTUATION, UNKNOWN_WORDS, SHORT_TEXTS, (fill_body(26), fill_body(28))],
    ("text-classification", "text_pair"): [ONE_TEXT],
    ("text-classification", "top_k"): [NUMBER],
    ("text-classification", "stride"): [(480, 511), NUMBER],
    ("token-classification", "text"): [ONE_TEXT, PUNCTUATION, UNKNOWN_WORDS, SHORT_TEXTS, (fill_body(26), fill_body(28))],
    ("token-classification", "ignore_labels"): [(["x" * 1000] * 1000, ["x"] * 1001)],
    ("token-classification", "stride"): [(480, 511), NUMBER],
    ("question-answering", "question"): [ONE_TEXT],
    ("question-answering", "context"): [ONE_TEXT, PUNCTUATION, UNKNOWN_WORDS],
    ("question-answering", "top_k"): [(TOP_K, TOP_K + 1)],
    ("question-answering", "doc_stride"): [(360, 384), NUMBER],
    ("question-answering", "max_seq_len"): [(512, 513), NUMBER],
    ("fill-mask", "text"): [
        *((MASKED + text(CHARS - len(MASKED), of), MASKED + text(CHARS, of)) for of in (SENTENCE, ".")),
        (MASKED + "[MASK] " * 63, MASKED + "[MASK] " * 64),
        (["a [MASK]"] * ITEMS, ["a [MASK]"] * (ITEMS + 1)),
    ],
    ("fill-mask", "top_k"): [(TOP_K, TOP_K + 1)],
    ("fill-mask", "targets"): [([f"film{i}" for i in range(1000)], ["film"] * 1001), (["q" * 256] * 64, ["q" * 256] * 65)],
    ("multiple-choice", "question"): [ONE_TEXT],
    ("multiple-choice", "prompt"): [ONE_TEXT],
    ("multiple-choice", "context"): [ONE_TEXT],
    ("multiple-choice", "choices"): [([text(10_000)] * 64, [text(10_000)] * 65)],
    ("feature-extraction", "text"): [ONE_TEXT, PUNCTUATION, UNKNOWN_WORDS, SHORT_TEXTS, (fill_body(26), fill_body(28))],
    ("feature-extraction", "prompt_name"): [("x" * 1_000_000, 1)],
    ("feature-extraction", "dimensions"): [(384, 385), NUMBER],
    ("feature-extraction", "layers"): [NUMBERS],
    ("sentence-similarity", "source_sentence"): [ONE_TEXT],
    ("sentence-similarity", "sentences"): [SHORT_TEXTS],
    ("sentence-similarity", "prompt_name"): [("x" * 1_000_000, 1)],
    ("text-ranking", "query"): [ONE_TEXT],
    ("text-ranking", "texts"): [SHORT_TEXTS, ([SLOW_WORDS] * ITEMS, [SLOW_WORDS] * (ITEMS + 1)), (fill_body(13), fill_body(14))],
    ("zero-shot-classification", "text"): [ONE_TEXT, (fill_body(ITEMS // 2), fill_body(ITEMS // 2 + 1))],
    ("zero-shot-classification", "candidate_labels"): [
        (",".join(map(str, range(LABELS))), "," * 1_000_000),
        ([f"{i:03}" + "x" * 997 for i in range(LABELS)], [str(i) for i in range(LABELS + 1)]),
    ],
    ("zero-shot-classification", "hypothesis_template"): [(text(998) + "{}", text(999) + "{}")],
    ("attention", "text"): [ONE_TEXT],
    ("attention", "text_pair"): [ONE_TEXT],
    ("attention", "layers"): [NUMBERS],
    ("attention", "heads"): [NUMBERS],
    **{(task, "model"): [("x" * 1_000_000, 1)] for task in BASES},
    **{(task, "threshold"): [({f"label {i}": 0.5 for i in range(50_000)}, "high"), NUMBER] for task in DECIDED},
    **{(task, "min_confidence"): [NUMBER] for task in DECIDED},
}
# parts of a body that make a field costly, or without which it is not allowed
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("text-classification", "stride"): {"inputs": PASSAGE, "parameters": {"window": "mean"}},
    ("text-classification", "offset_unit"): {"inputs": text(300), "parameters": {"explain": True}},
    ("token-classification", "text"): {"parameters": {"ignore_labels": []}},
    ("token-classification", "offset_unit"): {"parameters": {"ignore_labels": []}},
    ("question-answering", "top_k"): {"parameters": {"max_answer_len": 512}},
    ("question-answering", "max_answer_len"): {"parameters": {"top_k": TOP_K}},
    ("question-answering", "duplicates"): {"parameters": {"top_k": TOP_K, "max_answer_len": 512, "doc_stride": 300}},
    ("question-answering", "explain"): {"inputs": {"question": "Who built it?", "context": text(600)}},
    ("fill-mask", "targets"): {"parameters": {"joint": True}},
    ("fill-mask", "beam"): {"inputs": "[MASK] " * 4, "parameters": {"joint": True}},
    ("feature-extraction", "encoding_format"): {"parameters": {"pooling": "none"}},
    **{
        (task, name): {"parameters": BASES[task].get("parameters", {}) | {"decide": True}}
        for task in DECIDED
        for name in ("threshold", "min_confidence")
    },
}


def full(head: str, item: str, tail: str = "", count: int = BYTES) -> bytes:
    """Returns a body with as many equal items as it can have, or at most `count`; `{i}` in an item becomes its number."""
    length = len(item.replace("{i}", "")) + 7 * ("{i}" in item)
    count = min(count, (BYTES - len(head) - len(tail)) // length)
    return (head + "".join(item.replace("{i}", str(i)) for i in range(count)) + tail).encode()


# bodies that are costly to parse, or whose items are all wrong
WHOLE_BODIES = {
    "lists": lambda: full("[", "[],", "[]]"),
    "nested lists": lambda: full('{"inputs": ', "["),
    "allowed texts": lambda: full('{"inputs": [', '"",', "1]}", count=2**18 - 2),
    "pairs with a wrong one": lambda: full('{"inputs": [', '{"text": "a warm film"},', "1]}", count=2**13 - 1),
    "numbers": lambda: full('{"inputs": [', "1.5e-7,", "1]}", count=2**18 - 2),
    "a number": lambda: full('{"inputs": "a", "parameters": {"top_k": ', "1", "}}"),
    "unknown parameters": lambda: full('{"inputs": "a", "parameters": {"a": 1', ',"k{i}": 1', "}}", count=2**16 - 4),
    "a key": lambda: full('{"inputs": "a", "', "a", '": 1}'),
    "structure within a text": lambda: full('{"inputs": ["', "[1,", '"]}'),
}


@dataclass(frozen=True)
class Case:
    """A body that sets one field to its largest value, or to one above; `body` makes it, because the bodies of all cases have 100 MB."""

    spec: TaskSpec
    field: str
    value: Any
    is_large: bool

    @property
    def body(self) -> bytes:
        name, value, task = self.field, self.value, self.spec.name
        body: dict[str, Any] = json.loads(json.dumps(BASES[task] | WITH.get((task, name), {})))
        if name in self.spec.body.parameters_type.model_fields:
            body["parameters"] = body.get("parameters", {}) | {name: value}
        elif name in self.spec.body.model_fields:
            body[name] = value
        elif name == UNNAMED_TEXT and isinstance(body["inputs"], str):
            body["inputs"] = value
        else:
            inputs = body["inputs"] if isinstance(body["inputs"], dict) else {UNNAMED_TEXT: body["inputs"]}
            if name == "prompt":
                del inputs["question"]
            body["inputs"] = inputs | {name: value}
        return json.dumps(body).encode()


def fields_of(spec: TaskSpec) -> dict[str, dict[str, Any]]:
    """Returns the JSON schema of each field of a task's body by its name."""
    whole, parameters = spec.body.model_json_schema(), spec.body.parameters_type.model_json_schema().get("properties", {})
    own = {name: schema for name, schema in whole["properties"].items() if name not in ("inputs", "parameters")}
    return own | parameters | {name: {} for name in spec.input_fields if name not in own}


def values_of(schema: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Returns the pairs of values of a field whose schema limits them; empty for others."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    [kind] = kinds if len(kinds) == 1 else [{}]
    if "enum" in kind:
        return [(value, NO_CHOICE) for value in kind["enum"]]
    if kind.get("type") == "boolean":
        return [(True, "true"), (False, 2)]
    return [(kind["maximum"], kind["maximum"] + 1)] if "maximum" in kind else []


def cases() -> Iterator[Any]:
    """Yields all cases. `make test` runs the first one of each field with its own limit, of one task unless tasks differ in its cost."""
    names = set[str]()
    for spec in TASKS.values():
        for name, schema in fields_of(spec).items():
            own_values = CASES.get((spec.name, name))
            for i, (largest, above) in enumerate(own_values or values_of(schema)):
                marks = () if own_values and i == 0 and (name in PER_TASK or name not in names) else pytest.mark.full_grid
                yield pytest.param(Case(spec, name, largest, is_large=True), id=f"{spec.path}-{name}-{i}-largest", marks=marks)
                yield pytest.param(Case(spec, name, above, is_large=False), id=f"{spec.path}-{name}-{i}-above", marks=marks)
            if own_values:
                names.add(name)


@dataclass
class Bench:
    """A served process; `memory` is the peak of its memory during ordinary requests, in bytes."""

    server: ServeProcess
    memory: int = 0
    bodies: list[tuple[str, bytes]] = field(
        default_factory=lambda: [(f"/{TASKS[task].path}", json.dumps(body).encode()) for task, body in BASES.items()]
    )

    def post(self, path: str, body: bytes) -> int:
        with closing(HTTPConnection(*self.server.address, timeout=300)) as connection:
            connection.request("POST", path, body)
            answer = connection.getresponse()
            answer.read()
            return answer.status

    def measure(self, path: str, body: bytes) -> tuple[int, float, int]:
        """Returns the status of a request, the longest delay of a probe in seconds, and the peak of the memory in bytes."""
        Path(f"/proc/{self.server.process.pid}/clear_refs").write_text("5", encoding="ascii")
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            probe = pool.submit(self.server.longest_probe_s, over, 0.001)
            time.sleep(0.01)
            try:
                status = self.post(path, body)
            finally:
                over.set()
        return status, probe.result(), self.peak()

    def peak(self) -> int:
        """Returns the peak of its resident memory since `clear_refs`."""
        lines = Path(f"/proc/{self.server.process.pid}/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

    def ordinary_stall_s(self, seconds: float) -> float:
        """Returns the longest delay of a probe while ordinary requests run for at least this many seconds."""
        end, longest_s = time.monotonic() + seconds, 0.0
        while longest_s == 0.0 or time.monotonic() < end:
            longest_s = max(longest_s, *(self.measure(path, body)[1] for path, body in self.bodies))
        return longest_s


@pytest.fixture(name="bench", scope="module")
def bench_of_a_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Yields a service with all included models and two tiny ones, after ordinary requests to each task."""
    folder = tmp_path_factory.mktemp("costly")
    tiny.bundle(folder / "models", "choices", task="multiple-choice", max_length=512)
    tiny.bundle(folder / "models", "attentive", max_length=512, attention_heads=(4, 4))
    flags = ("--models", str(folder / "models"), "--threads", "1", "--allow-implicit-default", "--timeout-ms", "120000")
    # a busy machine must not count as a hung run
    program = f"from bertserve.service.scheduling import scheduler; scheduler.MIN_HANG_S = 60; {BERT_SERVE}"
    with running(ROOT / "models", folder / "log", *flags, program=program) as server:
        bench = Bench(server)
        for path, body in bench.bodies * 2:
            assert bench.post(path, body) == 200, path
        bench.memory = bench.peak()
        yield bench


@pytest.mark.parametrize("spec", TASKS.values(), ids=TASKS)
def test_every_field_has_a_case(spec: TaskSpec) -> None:
    fields = fields_of(spec)
    assert [name for name, schema in fields.items() if not CASES.get((spec.name, name)) and not values_of(schema)] == []
    assert [name for task, name in [*CASES, *WITH] if task == spec.name and name not in fields] == []


@pytest.mark.parametrize("case", list(cases()))
def test_a_field_costs_little(bench: Bench, case: Case, request: pytest.FixtureRequest) -> None:
    body = case.body
    assert len(body) <= BYTES or not case.is_large
    check(bench, f"/{case.spec.path}", body, request.node.callspec.id)


@pytest.mark.parametrize("name", WHOLE_BODIES)
def test_a_body_costs_little(bench: Bench, name: str) -> None:
    body = WHOLE_BODIES[name]()
    assert BYTES // 16 < len(body) <= BYTES
    check(bench, "/classify", body, name)


def check(bench: Bench, path: str, body: bytes, name: str) -> None:
    """Other load on the machine only adds to a delay, so a case can try again; the last delay is compared with ordinary requests for as long."""
    for _ in range(TRIES):
        start = time.monotonic()
        status, stall_s, peak = bench.measure(path, body)
        print(f"\n| {name} | {status} | {1000 * stall_s:.0f} | {(peak - bench.memory) / 2**20:.0f} |")
        assert status in ALLOWED
        assert peak - bench.memory < MEMORY
        if stall_s < STALL_S:
            return
    assert stall_s < STALL_S + bench.ordinary_stall_s(time.monotonic() - start)
