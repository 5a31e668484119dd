"""The tool plants each kind of mistake and finds what no test notices; every survivor that is known is explained."""

from __future__ import annotations

import ast
import functools
import runpy
import shutil
import subprocess
import sys
import tomllib
import types
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest

from tools import mutants
from tools.forked_tests import code_with_mistake
from tools.mutants import Reach, Results, explanations
from tools.planting import OPERATORS, is_python, mutants_of, planted, probed

ROOT: Final = Path(__file__).parents[2]

# ------------------------------------------------------------------------------------------------------ the mistakes

PLANTED: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "compare": (
        ("if a < b: f()", "if a <= b: f()"),
        ("if a >= b: f()", "if a > b: f()"),
        ("x = a == b", "x = a != b"),
        ("x = a is not b", "x = a is b"),
        ("x = a not in b", "x = a in b"),
        ("x = a < b < c", "x = a < b <= c"),
    ),
    "negate": (
        ("if a: f()", "if (not (a)): f()"),
        ("while not a: f()", "while (a): f()"),
        ("x = b if a else c", "x = b if (not (a)) else c"),
        ("x = [b for b in a if b]", "x = [b for b in a if (not (b))]"),
    ),
    "condition": (("x = a and b", "x = ((a))"), ("x = a or b or c", "x = ((a) or (c))")),
    "and-or": (("x = a and b", "x = ((a) or (b))"),),
    "leave-out": (
        ("f()", "pass"),
        ("if a: raise b", "if a: pass"),
        ("a.b = c", "pass"),
        ("a += 1", "pass"),
        ("for b in a: continue", "for b in a: pass"),
    ),
    "call": (("x = max(a, b)", "x = (a)"), ("x = sorted(a)", "x = (a)")),
    "swap": (("f(a, b)", "f(b, a)"), ("if a:\n    f()\n    g()", "if a:\n    g()\n    f()")),
    "number": (("x = a[1]", "x = a[2]"), ("f(flag=True)", "f(flag=False)"), ("x = 0.5", "x = 1.5")),
    "plus-minus": (("x = a + b", "x = a - b"), ("a -= b", "a += b")),
    "except": (
        ("try: f()\nexcept OSError: g()", "try: f()\nexcept Exception: g()"),
        ("try: f()\nexcept Exception: g()", "try: f()\nexcept BaseException: g()"),
    ),
}


@pytest.mark.parametrize("pattern", sorted({*mutants.DRIVERS, *mutants.CORES, *mutants.LEFT_ALONE}))
def test_every_pattern_of_what_is_looked_at_matches_a_file(pattern: str) -> None:
    """A module that was renamed would otherwise leave the sample without a word."""
    files = (path.relative_to(mutants.ROOT / "src/sublet").as_posix() for path in (ROOT / "src").rglob("*.py"))
    assert any(fnmatch(name, pattern) for name in files)


def test_every_room_has_its_tests() -> None:
    lost = [test for tests in mutants.ROOMS.values() for test in tests if not (ROOT / test).exists()]
    assert lost == []


def test_every_operator_is_looked_at() -> None:
    assert PLANTED.keys() == OPERATORS.keys()


@pytest.mark.parametrize(
    ("operator", "before", "after"), [(name, *pair) for name, pairs in PLANTED.items() for pair in pairs]
)
def test_an_operator_plants_its_mistake(operator: str, before: str, after: str) -> None:
    source = in_a_function(before)
    found = [planted(source, mutant) for mutant in mutants_of("a.py", source) if mutant.operator == operator]
    assert in_a_function(after) in found


def in_a_function(body: str) -> str:
    return "def whole(a, b, c):\n    " + body.replace("\n", "\n    ") + "\n"


@pytest.mark.parametrize(
    "left_alone",
    [
        '"""What it says is > 0 and 1."""',
        "log.warning('it took %d s', a)",
        "raise ValueError(f'{a + 1} and {b or c}')",
        "x: Literal[1] | None",
        "assert a > 0",
        "x = f'{a + 1}'",
        "x = 'a' + 'b'",
        "import os",
        "if TYPE_CHECKING: f()",
    ],
)
def test_texts_logs_errors_types_and_assertions_are_left_alone(left_alone: str) -> None:
    found = [mutant for mutant in mutants_of("a.py", in_a_function(left_alone)) if mutant.before != left_alone]
    assert found == []


def test_annotations_and_what_an_object_is_printed_as_are_left_alone() -> None:
    source = "class A:\n    def f(self, a: Literal[1] = 1) -> 'x > 1': ...\n    def __repr__(self): return f(1)\n"
    assert mutants_of("a.py", source) == []


def test_a_mutant_keeps_its_name_when_its_file_changes_elsewhere() -> None:
    before = "def f(a):\n    return a > 1\n"
    after = "def g(a):\n    return a > 1\n\n\n" + before
    assert {one.key for one in mutants_of("a.py", before)} < {one.key for one in mutants_of("a.py", after)}
    assert {one.source_hash for one in mutants_of("a.py", before)} < {
        one.source_hash for one in mutants_of("a.py", after)
    }


def test_a_result_does_not_count_when_its_function_has_changed(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    [one, *_] = mutants_of("a.py", "def f(a):\n    return a > 1\n")
    results.add("cores", one, mutants.Outcome(outcome="caught", by="x", reached=1, seconds=1.0))
    results.save()
    assert Results.load(results.path).knows(one)
    [changed] = [
        other for other in mutants_of("a.py", "def f(a):\n    g()\n    return a > 1\n") if other.key == one.key
    ]
    assert not Results.load(results.path).knows(changed)


def test_what_is_open_is_known_as_far_as_it_was_followed(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    [one, *_] = mutants_of("a.py", "def f(a):\n    return a > 1\n")
    results.add("cores", one, mutants.Outcome(outcome="open", by="", reached=1, seconds=1.0, depth="unit"))
    results.save()
    known = [depth for depth in mutants.DEPTHS if Results.load(results.path).knows(one, depth)]
    assert known == ["first", "unit"]


def test_all_that_is_planted_in_sublet_is_another_program_and_has_a_name_of_its_own() -> None:
    for name in ("lease/renewal.py", "client/renewal_thread.py", "node/supervisor/recovery.py"):
        source = (ROOT / "src/sublet" / name).read_text()
        found = mutants_of(name, source)
        assert {one.operator for one in found} >= OPERATORS.keys() - {"except", "call", "plus-minus"}, name
        assert Counter(one.key for one in found).most_common(1)[0][1] == 1
        assert all(is_python(source, one) for one in found[::10])


def test_a_mark_stands_before_each_statement_and_changes_nothing_else() -> None:
    head = '"""Text."""\nfrom __future__ import annotations\n\n\n'
    source = head + 'def f(a):\n    """Text."""\n    if a:\n        g()\n    return a\n'
    marked, keys = probed(source, 7)
    assert len(keys) == 3
    assert len(set(keys)) == 3
    marks = [line.strip() for line in marked.splitlines() if "_reached_[" in line]
    assert sorted(marks) == [f"_reached_[{number}] = 1" for number in (7, 8, 9)]
    rest = "\n".join(line for line in marked.splitlines() if "_reached" not in line)
    assert ast.dump(ast.parse(rest)) == ast.dump(ast.parse(source))
    reached_by = {one.statement: one.reached_by for one in mutants_of("a.py", source)}
    assert set(reached_by.values()) <= set(keys)


# ------------------------------------------------------------------------------ planted in a process that has loaded it

SOUND: Final = """
def outer(a):
    def inner(b):
        return a + b > 1
    return [inner(c) for c in (0, 1)], (lambda d: d > 2)(a)

class Kind:
    def outer(self, a):
        return a > 3
"""


def code_of(function: object) -> types.CodeType:
    assert isinstance(function, types.FunctionType)
    return function.__code__


@pytest.mark.parametrize(
    ("mistaken", "changed"),
    [
        (("b > 1", "b >= 1"), {"outer", "outer.<locals>.inner"}),
        (("d > 2", "d >= 2"), {"outer", "outer.<locals>.<lambda>"}),
        (("a > 3", "a >= 3"), {"Kind", "Kind.outer"}),
        (("(0, 1)", "(0, 2)"), {"outer"}),
    ],
)
def test_each_function_with_the_mistake_is_paired_with_its_sound_twin(
    mistaken: tuple[str, str], changed: set[str]
) -> None:
    pairs = code_with_mistake(SOUND, SOUND.replace(*mistaken), "a.py")
    assert {old.co_qualname for old in pairs} == changed
    assert all(old.co_qualname == new.co_qualname for old, new in pairs.items())


def test_a_loaded_function_makes_the_mistake_and_its_other_functions_do_not(tmp_path: Path) -> None:
    path = tmp_path / "loaded.py"
    path.write_text(SOUND)
    loaded = runpy.run_path(str(path))
    assert loaded["outer"](1) == ([False, True], False)
    pairs = code_with_mistake(SOUND, SOUND.replace("b > 1", "b >= 1"), str(path))
    loaded["outer"].__code__ = pairs[loaded["outer"].__code__]
    assert loaded["outer"](1) == ([True, True], False)
    assert code_of(vars(loaded["Kind"])["outer"]) not in pairs


# ------------------------------------------------------------------------------------ a small project, and its tests

MODULE: Final = "def is_over(now: int, end: int) -> bool:\n    return now >= end > 0\n"
WEAK: Final = (
    "import os\nfrom sublet.lease.over import is_over\n\n"
    "def test_over():\n    assert os.getppid() != 1, 'orphans become children of process 1'\n    assert is_over(2, 2)\n"
)
STRONG: Final = WEAK + "    assert is_over(1, 1)\n    assert not is_over(0, 0)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "survive"), [(WEAK, {"compare: > -> >=", "number: 0 -> 1"}), (STRONG, set())], ids=["weak", "strong"]
)
def test_what_a_weak_test_lets_pass_is_found_and_a_strong_one_catches_it(
    tmp_path: Path, tests: str, survive: set[str]
) -> None:
    """The whole command, on a project of one module; it goes on where it stopped, and leaves the source as it is."""
    make_project(tmp_path, tests)
    if tests == WEAK:
        assert "1 planted" in command(tmp_path, "--number", "1").stdout
        assert "3 mistakes, 2 to test" in command(tmp_path).stdout
    else:
        assert "3 mistakes, 3 to test" in command(tmp_path).stdout
    found = Results.load(tmp_path / "tests/mutants/results.jsonl")
    assert found.about["complete"]
    assert len(found.found) == 3
    assert {f"{one['operator']}: {one['before']} -> {one['after']}" for one in found.survivors} == survive
    caught = [one["by"] for one in found.found.values() if one["outcome"] == "caught"]
    assert caught == ["tests/unit/lease/test_over.py::test_over"] * (3 - len(survive))
    assert (tmp_path / "src/sublet/lease/over.py").read_text() == MODULE
    if not survive:
        return
    again = command(tmp_path)
    assert "0 to test" in again.stdout
    assert again.returncode == 1, "a survivor without an explanation"
    reasons = "".join(f'["{one["key"]}"]\nwhy = "It is so."\n' for one in found.survivors)
    (tmp_path / "tests/mutants/explanations.toml").write_text(reasons)
    assert command(tmp_path, "--report").returncode == 0


def make_project(folder: Path, tests: str) -> None:
    for name in ("src/sublet/lease", "tests/unit/lease", "tools"):
        (folder / name).mkdir(parents=True)
    for name in ("forked_tests.py", "mutants.py", "planting.py"):
        shutil.copy(ROOT / "tools" / name, folder / "tools")
    (folder / "src/sublet/lease/over.py").write_text(MODULE)
    (folder / "src/sublet/__init__.py").touch()
    (folder / "tests/unit/lease/test_over.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = src\n")
    (folder / ".gitignore").write_text("/.venv\n/.mutants\n__pycache__\n")
    (folder / ".venv/bin").mkdir(parents=True)
    interpreter = folder / ".venv/bin/python"
    plugins = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_PLUGINS=pytest_timeout"  # others take longer than its tests
    interpreter.write_text(f'#!/bin/sh\n{plugins} PYTHONPATH={folder}/src exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/mutants.py", *words], cwd=folder, capture_output=True, text=True, timeout=200
    )


# ----------------------------------------------------------------------------------------------- what was committed

KNOWN: Final = ROOT / "tests/mutants"


def test_every_survivor_that_is_known_is_explained() -> None:
    results, known = Results.load(KNOWN / "results.jsonl"), explanations(KNOWN / "explanations.toml")
    assert results.about["seed"] == mutants.SEED
    left = [f"{one['key']} {one['file']}: {one['before']} -> {one['after']}" for one in results.survivors]
    unexplained = [line for line in left if line.partition(" ")[0] not in known]
    assert not results.about.get("complete") or unexplained == [], "close each by a test, or explain it"


def test_an_explanation_is_a_sentence_about_a_survivor() -> None:
    """Or about a mistake that was planted by hand, which can still be planted and is in no sample yet."""
    found = Results.load(KNOWN / "results.jsonl").found
    survivors = {key for key, one in found.items() if one["outcome"] in ("survived", "open")}
    for key, one in tomllib.loads((KNOWN / "explanations.toml").read_text()).items():
        assert key in survivors or (key not in found and key in keys_of(one["mutant"].partition(" ")[0])), (
            f"{key} is not among the survivors any more; strike its explanation"
        )
        assert len(one["why"].split()) >= 6, one["why"]
        assert one["why"].endswith("."), one["why"]


@functools.cache
def keys_of(file: str) -> frozenset[str]:
    """Of all that can be planted there."""
    return frozenset(one.key for one in mutants_of(file, (ROOT / "src/sublet" / file).read_text()))


def test_the_committed_page_is_what_the_results_say() -> None:
    results, known = Results.load(KNOWN / "results.jsonl"), explanations(KNOWN / "explanations.toml")
    assert (KNOWN / "table.md").read_text() == "\n".join(mutants.table(results, known)) + "\n"


def test_every_file_of_the_tables_exists() -> None:
    for pattern in (*mutants.DRIVERS, *mutants.CORES):
        assert list((ROOT / "src/sublet").glob(pattern)), pattern
    groups = mutants.sources()
    assert not set(groups["drivers"]) & set(groups["cores"])
    assert {name.partition("/")[0] for names in groups.values() for name in names} == mutants.ROOMS.keys()
    for path in (path for paths in mutants.ROOMS.values() for path in paths):
        assert (ROOT / path).exists(), path


def test_the_most_particular_test_comes_first() -> None:
    reach = Reach()
    tests = [["tests/integration/a.py::b", 0.1, True, 3], ["tests/unit/a.py::c", 0.1, True, 9]]
    tests += [["tests/unit/a.py::d", 0.1, True, 5], ["tests/unit/a.py::e", 0.1, False, 1]]
    reach.load({"tests": tests, "reach": {"a.py:f:x:1": [0, 1, 2, 3]}})
    [mutant, *_] = mutants_of("a.py", "def f(a):\n    x(a > 1)\n")
    reach.by_statement[f"a.py:{mutant.reached_by}"] = reach.by_statement["a.py:f:x:1"]
    assert [test.name[-1] for test in reach.of(mutant)] == ["d", "c", "b"], "what failed without a mistake is left out"


def test_a_mistake_outside_of_functions_meets_the_tests_that_reach_any_function_of_the_file() -> None:
    reach = Reach()
    tests = [["tests/unit/a.py::c", 0.1, True, 9], ["tests/unit/a.py::d", 0.1, True, 5]]
    reach.load({"tests": tests, "reach": {"a.py:f:x:1": [0, 1], "a.py:f:y:1": [0], "b.py:f:x:1": [1]}})
    [mutant] = mutants_of("a.py", "LIMIT = 1\n")
    assert [test.name[-1] for test in reach.of(mutant)] == ["d", "c"]


def test_tests_of_one_file_stand_together() -> None:
    assert mutants.by_files(["a.py::b", "c.py::d", "a.py::e"]) == ["a.py::b", "a.py::e", "c.py::d"]


def test_few_cases_of_a_test_come_before_the_other_tests() -> None:
    """Forty cases of one test say little more than two of them."""
    reach = Reach()
    tests = [[f"tests/unit/a.py::c[{case}]", 0.1, True, 3] for case in "xyz"] + [["tests/unit/a.py::d", 0.1, True, 9]]
    [mutant, *_] = mutants_of("a.py", "def f(a):\n    x(a > 1)\n")
    reach.load({"tests": tests, "reach": {f"a.py:{mutant.reached_by}": [0, 1, 2, 3]}})
    assert [test.name.partition("::")[2] for test in reach.of(mutant)] == ["c[x]", "c[y]", "d", "c[z]"]
