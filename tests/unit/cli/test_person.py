"""``sublet person``: the link of an invite leads to where the studio listens."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest

from sublet.cli import main
from sublet.studio.office import sessions_folder
from sublet.studio.people import People


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of a studio that knows ivy."""
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("SUBLET_HOME", str(made))
    People(sessions_folder(), wall_ns=time.time_ns, random=secrets.token_bytes).add("ivy", "physics")
    return made


@pytest.mark.parametrize(
    ("settings", "base"),
    [
        ("", "http://127.0.0.1:8320"),
        ('[listen]\naddress = "127.0.0.1:8391"\n', "http://127.0.0.1:8391"),
        ('[listen]\naddress = "[::1]:8391"\n', "http://[::1]:8391"),
    ],
)
def test_an_invite_leads_to_where_the_settings_have_the_studio_listen(
    settings: str, base: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It led to the default port whatever the settings said."""
    (home / "studio.toml").write_text(settings)
    (home / "studio.toml").chmod(0o644)
    assert main(["person", "invite", "ivy"]) == 0
    assert capsys.readouterr().out.startswith(f"{base}/join#")
    assert main(["person", "invite", "ivy", "--url", "https://gpu.example.org/"]) == 0
    assert capsys.readouterr().out.startswith("https://gpu.example.org/join#")


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ('[listen]\nsocket = "/run/studio.sock"\n', "a unix socket"),
        ('[listen]\naddress = "127.0.0.1:0"\n', "any free port"),
    ],
)
def test_no_invite_is_made_whose_link_would_lead_nowhere(
    settings: str, where: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "studio.toml").write_text(settings)
    (home / "studio.toml").chmod(0o644)
    assert main(["person", "invite", "ivy"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert f"the studio listens on {where}" in said.err
    assert "--url" in said.err
    people = People(sessions_folder(), wall_ns=time.time_ns, random=secrets.token_bytes)
    assert people.invited_until_ns(people.find("ivy")) is None
