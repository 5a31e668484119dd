"""The unix socket that ``sublet studio --socket`` and ``sublet studio serve --socket`` listen on."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from sublet.cli.studio import listening_on
from sublet.errors import InvalidRequest

UNUSED = ("127.0.0.1", 0)


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(str(path)) == 0


def test_a_socket_is_made_where_nothing_is_and_where_a_studio_was(tmp_path: Path) -> None:
    path = tmp_path / "studio.sock"
    for _ in range(2):
        with listening_on(UNUSED, str(path), mode=0o600) as (_, where):
            assert where == f"unix://{path}"
            assert connects(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.exists()
        assert not connects(path)


def test_a_socket_that_is_served_and_what_is_no_socket_stay(tmp_path: Path) -> None:
    path, file = tmp_path / "studio.sock", tmp_path / "notes.txt"
    file.write_text("mine")
    with listening_on(UNUSED, str(path)):
        for taken in (path, file, tmp_path):
            with pytest.raises(InvalidRequest, match="is in use") as refused, listening_on(UNUSED, str(taken)):
                pass
            assert refused.value.do == "Choose another path with --socket."
        assert connects(path)
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [("x" * 108, "has 1 to 107 bytes"), ("", "has 1 to 107 bytes"), ("none/studio.sock", "No such file or directory")],
)
def test_a_path_that_will_not_do_is_refused_with_the_option_that_names_another(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path without a name would be an address of the kernel's choice that every user can reach."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match=said) as refused, listening_on(UNUSED, name):
        pass
    assert refused.value.do == "Choose another with --socket."


def test_an_address_in_use_is_refused_with_its_option() -> None:
    with listening_on(UNUSED, None) as (listening, _):
        taken = "127.0.0.1", listening.getsockname()[1]
        with pytest.raises(InvalidRequest, match="cannot listen on") as refused, listening_on(taken, None):
            pass
    assert refused.value.do == "Choose another with --listen."
