"""What is promised about dependencies: each has its reason, each is locked, and the lock names no address."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[2]
PYPROJECT: Final = (ROOT / "pyproject.toml").read_text()
PROJECT: Final[dict[str, Any]] = tomllib.loads(PYPROJECT)["project"]
LOCK: Final = (ROOT / "requirements.lock").read_text()


def declared() -> list[Requirement]:
    extras = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    return [Requirement(text) for text in (*PROJECT["dependencies"], *extras)]


def locked() -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==([^ ]+)", LOCK, flags=re.MULTILINE))


def test_each_dependency_is_locked_at_a_version_it_allows() -> None:
    versions = locked()
    for requirement in declared():
        name = requirement.name
        version = versions.get(canonicalize_name(name))
        assert version, f"{name} is not in requirements.lock; run `make lock`"
        assert version in requirement.specifier, f"requirements.lock has {version} of {name}; run `make lock`"


def test_each_dependency_carries_its_reason_on_its_line() -> None:
    for requirement in declared():
        lines = [line for line in PYPROJECT.splitlines() if line.strip().startswith(f'"{requirement}"')]
        assert len(lines) == 1, requirement
        assert re.search(r"# \S+ \S+", lines[0]), f"say why {requirement.name} is needed, on its line"


def test_every_locked_package_has_a_hash() -> None:
    for block in re.split(r"\n(?=[a-z0-9])", LOCK.partition("\n\n")[2] or LOCK):
        if "==" in block:
            assert "--hash=sha256:" in block, block.partition("\n")[0]


def test_the_lock_names_no_address() -> None:
    assert not re.search(r"://|file:|--(extra-)?index-url|--find-links", LOCK)


def test_the_demo_installs_a_part_of_the_lock_and_all_that_it_needs() -> None:
    """The same versions with the same hashes, so `make setup` after `make demo` only adds. Not a package more than the
    core, the notebook extra, and what builds an editable install."""
    text = (ROOT / "requirements-demo.lock").read_text()
    demo = dict(_blocks(text))
    whole = dict(_blocks(LOCK))
    assert demo.items() <= whole.items()
    assert not re.search(r"://|file:|--(extra-)?index-url|--find-links", text)
    needed = {
        canonicalize_name(Requirement(line).name)
        for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["notebook"])
    }
    assert needed | {"hatchling", "editables"} <= demo.keys(), "run `make lock`"
    own = {canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"]["dev"]}
    assert own & demo.keys() <= needed | {"hatchling", "editables"}
    assert len(demo) < len(whole) / 2


def _blocks(lock: str) -> list[tuple[str, frozenset[str]]]:
    """Each package with its version and its hashes. Its marker may be narrower where fewer packages ask for it."""
    found = []
    for block in re.split(r"\n(?=[a-z0-9])", lock):
        if name := re.match(r"[a-z0-9._-]+(?===)", block):
            lines = (
                line.partition(";")[0].strip(" \\") for line in block.splitlines() if not line.strip().startswith("#")
            )
            found.append((name[0], frozenset(line for line in lines if line)))
    return found


def test_set_up_and_project_agree_on_the_range_of_pythons() -> None:
    script = (ROOT / "tools" / "setup.sh").read_text()
    found = re.search(r"OLDEST=(\d+) NEWEST=(\d+)", script)
    assert found
    oldest, newest = map(int, found.groups())
    assert PROJECT["requires-python"] == f">=3.{oldest},<3.{newest + 1}"
    named = {
        c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    }
    assert named == {f"3.{minor}" for minor in range(oldest, newest + 1)}


def test_the_gpu_extra_goes_together_with_pytorch() -> None:
    """PyTorch 2.13 for CUDA 13 names exactly this compiler; all our kernels compile with it as with the newest."""
    extras = PROJECT["optional-dependencies"]
    (nvrtc,) = (found for found in map(Requirement, extras["gpu"]) if found.name == "nvidia-cuda-nvrtc")
    assert "13.0.88" in nvrtc.specifier
