"""What a file sets up once is set up once, however many processes run the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security import conftest as security
from tests.unit.small_suite import run_small

WHERE = """
def where(word):
    with open("where", "a") as file:
        file.write(f"{word} {os.environ['PYTEST_XDIST_WORKER']}\\n")

@pytest.fixture(scope="module")
def office():
    where("set up")

@pytest.mark.parametrize("n", range(24))
def test_there(office, n): where("file")

@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.xdist_group(k)) for k in ("a", "b")])
@pytest.mark.parametrize("n", range(12))
def test_kind(kind, n): where(kind)
"""


def test_tests_that_share_something_run_in_one_process(tmp_path: Path) -> None:
    result = run_small(tmp_path, WHERE, "-n", "3", "--dist=loadgroup")
    assert result.returncode == 0, result.stdout
    said = (tmp_path / "where").read_text().splitlines()
    assert len(said) == 49
    for word in ("set up", "file", "a", "b"):
        assert len({line for line in said if line.startswith(f"{word} ")}) == 1, said


@pytest.mark.parametrize(("folder", "grouped"), [("security", True), ("crash", False)])
def test_only_the_security_tests_are_grouped_by_their_office(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: str, grouped: bool
) -> None:
    """A ``place`` of another folder's tests is another thing; one process for all of them would be the last."""
    test = pytest.Function.from_parent(request.node.parent, name="test_it", callobj=lambda: None)
    monkeypatch.setattr(test, "path", Path(security.__file__).parents[1] / folder / "test_it.py")
    monkeypatch.setattr(test, "fixturenames", ["place"])
    security.pytest_collection_modifyitems([test])
    assert (test.get_closest_marker("xdist_group") is not None) == grouped
