"""Who owns a folder above the state folder could put another one into its place: then no office starts, and none acts.

Finding: root's office in a folder of a user's removed whatever tree that user put a link to into its way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import sublet
from sublet.client.home import make_private_dir
from sublet.errors import InvalidRequest, SubletError
from sublet.node.sandbox.cleaning import remove_tree
from sublet.wire.unix import replaceable

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root")

STRANGER = 65534


def test_the_state_folder_and_all_above_it_belong_to_the_caller_or_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who owns a folder above the state folder can put another one into its place."""
    above = tmp_path / "his"
    home = above / "a" / "office"
    above.mkdir()
    os.chown(above, STRANGER, STRANGER)
    monkeypatch.setenv("SUBLET_HOME", str(home))
    with pytest.raises(SubletError, match="which belongs to"):
        sublet.connect().leases()
    done = subprocess.run([sys.executable, "-m", "sublet", "up"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "which belongs to" in done.stderr
    assert not (above / "a").exists(), "nothing was made"


@pytest.mark.parametrize("whose", [STRANGER, 0], ids=["a stranger's", "root's"])
def test_who_made_a_link_on_the_way_can_lead_it_elsewhere(whose: int) -> None:
    """Though all folders on the way to where it leads now are root's."""
    with tempfile.TemporaryDirectory(prefix="sublet-link-", dir="/tmp") as text:
        folder = Path(text)
        (folder / "real" / "deep").mkdir(parents=True)
        (folder / "link").symlink_to("real/../real")
        os.chown(folder / "link", whose, whose, follow_symlinks=False)
        found = replaceable(str(folder / "link" / "deep" / "office"), set())
        assert found == (f"lies in {folder}/link, which belongs to nobody (uid {whose})" if whose else "")
        (folder / "loop").symlink_to("loop")
        assert "links" in replaceable(str(folder / "loop" / "office"), set())


def test_root_with_the_home_of_another_user_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, STRANGER, STRANGER)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InvalidRequest, match="since HOME is") as error:
        make_private_dir(tmp_path / ".local" / "state" / "sublet")
    assert "sudo -H" in error.value.do
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("kernel")
def test_a_folder_above_that_became_a_link_is_not_followed_when_a_tree_is_removed(tmp_path: Path) -> None:
    """Who owns a folder above may rename it, and put a link to what is root's into its place."""
    canary = tmp_path / "canary"
    (canary / "leases" / "l-1").mkdir(parents=True)
    (tmp_path / "blocks").symlink_to(canary)
    left = remove_tree(str(tmp_path / "blocks" / "leases" / "l-1"))
    assert "a symbolic link is on the way" in str(left)
    assert (canary / "leases" / "l-1").is_dir()
