"""What was pickled under the name of a module that has moved since is found where it is now."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import sublet
from sublet.state.transfer.encoded import Head
from sublet.state.transfer.loading import decode
from sublet.state.transfer.names import MOVED


@pytest.mark.parametrize(("module", "name"), MOVED)
def test_a_class_that_moved_is_found_by_the_name_it_was_saved_under(module: str, name: str) -> None:
    face = module.split(".")[1]
    public = getattr(getattr(sublet, face) if face in {"replicated", "training"} else sublet, name)
    assert public.__module__ == MOVED[module, name]
    assert _saved_as(module, name) is public


def test_a_value_that_was_saved_under_an_old_name_is_the_value() -> None:
    domain = sublet.replicated.FailureDomain(region="here", host="h1")
    stream = pickle.dumps(domain, protocol=0).replace(b"sublet.state.replicated.replica", b"sublet.replicated.policy")
    assert _decoded(stream) == domain


def test_other_names_are_taken_as_they_stand() -> None:
    with pytest.raises(ModuleNotFoundError):
        _saved_as("sublet.replicated.policy", "Levels")


def _saved_as(module: str, name: str) -> Any:
    return _decoded(f"c{module}\n{name}\n.".encode())


def _decoded(stream: bytes) -> Any:
    return decode(Head(windows=(), splices=(), buffers=(), stream=stream).dump(), [])
