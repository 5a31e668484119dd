"""Words that the project does not use: scenes in place of terms, actors without a name, and sentences read twice.

They were in it once. Each has the word that a reader of the field would look for. The rule covers everything that is
read: source (comments, docstrings, messages) and pages. A second rule covers the names of functions, a third those of
values.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.unit.package_source import LOOKS_AT_SOURCE, source_files

pytestmark = LOOKS_AT_SOURCE

ROOT: Final = Path(__file__).parents[2]

RULES: Final[tuple[tuple[tuple[str, ...], str, str], ...]] = (
    (("nobody", "somebody", "anybody", "whoever"), r"(?<![\"'_])\b{}\b(?![\"'(:])", "a part with a name: holder, user"),
    (("no one can", "no one else", "no one has", "no one who"), r"\b{}\b", "a part with a name: no process, no user"),
    (("the middle one of",), r"\b{}\b", "median"),
    (("manieth",), r"\b{}\b", "1-based position"),
    (("o many of them",), r"\b[Ss]{}\b", "number of …"),
    (("may be given again",), r"\b{}\b", "Repeatable."),
    (("where it is not said", "if not said"), r"\b{}(?=[\"'.;,)]|$)", "(default: …)"),
    (("rubbish",), r"\b{}\b", "garbage"),
    (("stands in line", "stand in line", "stood in line"), r"\b{}\b", "waits in the queue"),
    (("has to be told of", "have to be told of"), r"\b{}\b", "needs …"),
    (("says itself what it needs",), r"\b{}\b", "takes its resources from the parked lease"),
    (("made a mistake",), r"\b{}\b", "internal error; see its log"),
    (("gone on with",), r"\b{}\b", "used after that, continued, resumed"),
    (("scaffolding",), r"\b{}\b", "temporaries"),
    (("whereabouts",), r"\b{}\b", "environment: folder and variables"),
    (("errand",), r"{}s?\b", "forked job, background request"),
    (("hitherto", "henceforth", "hereafter", "thereupon", "yonder"), r"\b{}\b", "plain words"),
    (("questions about this volume wait",), r"\b{}\b", "the volume's request queue is full"),
    (("Who ",), r"(?m)(?:^\s*(?:[#*|-] ?)?|\"\"\"|[.:;|] ){}(?![^?\n]*\?|\|)", "the part's name: the holder that …"),
    (("requests before this one",), r"\b{}\b", "office overloaded: … requests are queued"),
)
"""Words, the pattern around them, and what to write instead."""

PAGES: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md")


def texts() -> list[Path]:
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    return [*sorted((ROOT / "src").rglob("*.py")), *pages]


def found_in(text: str) -> list[tuple[int, str, str]]:
    return [
        (number, match[0], better)
        for words, pattern, better in RULES
        for word in words
        if word in text  # a hundred times as fast as the pattern, which few texts need
        for match in re.finditer(pattern.format(word), text)
        if (number := text.count("\n", 0, match.start()) + 1)
    ]


def test_words_that_were_mended_do_not_come_back() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {said!r}; write: {better}"
        for path in texts()
        for number, said, better in found_in(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "so that nobody waits for it",
        "Whoever asks gets it.".lower(),
        "the middle one of 64 that are released at once",
        "How manieth the lease is in the line".lower(),
        "So many of them, on one machine, all or none.",
        "1GiB if not said",
        "Interactive where it is not said.",
        "Who goes first by tier.",
        '    """Who holds it."""',
        "It is closed. Who waits is told why.",
        "what is parked says itself what it needs",
        "the office made a mistake while it answered",
        "the office has 50000 requests before this one",
        "64 questions about this volume wait already",
        "cell 3 gives x a value itself, and it is gone on with",
        "for index in errands:",
    ],
)
def test_a_rule_catches_what_it_is_for(line: str) -> None:
    assert len(found_in(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        'TenantId("nobody")',
        "class Nobody:",
        "    if not said:",
        "def fd_seek(self, memory, fd, offset, whence, out):",
        "64 guests released at once: median 34 ms",
        "Who holds the device?",
        "    who: Who | None = None",
    ],
)
def test_a_rule_lets_terms_and_code_pass(line: str) -> None:
    assert found_in(line) == []


FUNCTION_NAMES: Final = {
    "came": "on_arrival, dispatch",
    "confess": "log_internal_error",
    "go_on": "resume, advance, retry",
    "hear": "receive, read_events, decode",
    "heard": "on_event, on_answer, on_output",
    "knock": "warm_up",
    "let_go": "release, close, detach",
    "lets_go": "may_release",
    "look": "read, check, inspect, poll",
    "looked": "on_inspected, possible, found",
    "mistake": "internal_error",
    "said": "reports_of, failure_text, on_sent",
    "say": "send, report, print, write",
    "says": "reads, reports",
    "settle": "schedule, reconcile, wait, roll_back_to",
    "tell": "notify, send, write",
    "told": "on_answer, on_end, read",
}
"""Function names that a reader of the field would not search for, with or without an underscore; what to write."""

FUNCTIONS_THAT_STAY: Final = {
    "guest/calls.py: came": "a flag of one function",
    "guest/work.py: came": "a flag of one function",
    "notebook/batch/inside.py: go_on": "users call it in a notebook",
    "notebook/cell_io.py: let_go": "reads a field of that name, which is written",
    "testing/pretended.py: lets_go": "a guest that lets go of its device, or does not",
    "wire/open_files.py: came": "whether a descriptor came with a message",
}
"""Those that stay, each with its reason."""


DEFINITION: Final = re.compile(rf"(?m)^\s*(?:async )?def _*({'|'.join(FUNCTION_NAMES)})\(")


def test_functions_have_the_names_of_the_field() -> None:
    src = ROOT / "src/sublet"
    found = {
        f"{path.relative_to(src)}: {name}"
        for path in src.rglob("*.py")
        for name in DEFINITION.findall(path.read_text(encoding="utf-8"))
    }
    wrong = [f"{one}; write: {FUNCTION_NAMES[one.split(': ')[1]]}" for one in sorted(found - set(FUNCTIONS_THAT_STAY))]
    assert not wrong, "\n".join(wrong)
    assert not set(FUNCTIONS_THAT_STAY) - found, "they are gone; strike them"


@pytest.mark.parametrize("source", ["def say(): ...", "class A:\n    async def _say(self): ..."])
def test_the_rule_over_function_names_catches_methods_and_coroutines(source: str) -> None:
    assert DEFINITION.findall(source) == ["say"]
    assert DEFINITION.findall(source.replace("say", "say_again")) == []


VALUE_NAMES: Final = {
    "asked": "request, question, query, requested",
    "heard": "received, answers, last_event",
    "here": "local, own, present, in_notebook",
    "said": "reply, response, text, line, reason, message, error",
    "spoken": "reply, answer",
    "there": "remote, present, existing, on_device",
    "told": "answer, is_notified, reported, record",
}
"""Participles and adverbs that do not say what a value is, with or without an underscore; what to write."""

VALUES_THAT_STAY: Final = {
    "client/model.py: asked": "public: what a program reads of an offer",
    "notebook/batch/jobs.py: asked": "written: the file of a notebook job",
    "notebook/example.py: _said": "written: saved with the variables of a notebook",
    "state/replicated/memory.py: asked": "public: what a test reads of a replica in memory",
    "studio/api.py: asked": "written: JSON of the studio",
    "studio/records.py: asked": "written: a record of a session",
    "wire/http.py: asked": "written: the office's answer",
    "wire/orders.py: told": "written: a report of the agent",
}
"""Those that stay, each with its reason."""


VALUE: Final = re.compile(rf"_*(?:is_|was_)?({'|'.join(VALUE_NAMES)})(?<!is_here)(?<!is_there)")
"""``is_there`` is a plain name of a boolean."""


def bound_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names of variables, parameters, fields and functions that are given here."""
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.alias(asname=str(name)):
                yield name
            case _:
                pass


def values_in(nodes: Iterable[ast.AST]) -> set[str]:
    return {name for name in bound_in(nodes) if VALUE.fullmatch(name)}


def test_values_are_named_by_what_they_are() -> None:
    found = {f"{file.name}: {name}" for file in source_files() for name in values_in(file.nodes)}
    wrong = [
        f"{one}; write: {VALUE_NAMES[match[1]]}"
        for one in sorted(found - set(VALUES_THAT_STAY))
        if (match := VALUE.fullmatch(one.split(": ")[1]))
    ]
    assert not wrong, "\n".join(wrong)
    assert not set(VALUES_THAT_STAY) - found, "they are gone; strike them"


@pytest.mark.parametrize(
    "source",
    [
        "said = reply()",
        "self._said = reply()",
        "def print_it(*, said): ...",
        "def said(): ...",
        "class A:\n    said: str",
        "[said for said in replies]",
        "if (said := reply()): ...",
        "try: ...\nexcept OSError as said: ...",
        "match reply:\n    case Reply() as said: ...",
    ],
)
def test_the_rule_over_names_of_values_catches_all_that_give_a_name(source: str) -> None:
    assert {name.strip("_") for name in values_in(ast.walk(ast.parse(source)))} == {"said"}
    assert not values_in(ast.walk(ast.parse(source.replace("said", "reply"))))
