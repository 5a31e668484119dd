"""`sublet status` and `sublet doctor` where the control socket of an office answers and its data door does not."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.cli import data_door, doctor, status
from sublet.cli.call import CommandOffice
from sublet.cli.data_door import data_door_trouble
from sublet.client.address import Address
from sublet.errors import Disconnected, SubletError, Unauthorized
from sublet.wire.conversation import Conversation
from sublet.wire.link import Link

VIEW = {
    "pid": 7,
    "uptime": 60,
    "version": "1",
    "live": 0,
    "queued": 0,
    "quarantined": 0,
    "embedded": False,
    "home": "/srv/sublet",
    "devices": [],
    "nodes": [],
}


LATE_S = 3.5


class Door:
    """A data door that welcomes, at once or late, keeps silent, or turns away."""

    def __init__(self, place: Path, answer: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(place / "data.sock"))
        self._listening.listen()
        self._answer = answer
        self._open: list[Conversation] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError:
            return
        visitor = Conversation(sock, Link.accepting())
        self._open.append(visitor)
        if self._answer == "late":
            self._is_over.wait(LATE_S)
        if self._answer in ("welcome", "late"):
            visitor.welcome()
        elif self._answer == "refusal":
            visitor.link.end(Unauthorized("this token is not ours", do="Show another."))
            visitor.flush()

    def close(self) -> None:
        self._is_over.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        for one in self._open:
            one.close()


@pytest.fixture
def door(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    made = Door(tmp_path, request.param)
    if request.param != "late":
        patience_s = 0.3 if request.param == "silence" else 60.0
        monkeypatch.setattr(data_door.data_door_trouble, "__defaults__", (patience_s,))
    yield Address(url="the office", socket=tmp_path / "office.sock")
    made.close()


@pytest.mark.parametrize("door", ["welcome"], indirect=True)
def test_a_door_that_welcomes_is_whole(door: Address) -> None:
    assert data_door_trouble(door) is None


@pytest.mark.parametrize("door", ["silence"], indirect=True)
def test_a_door_that_keeps_silent_is_said_to_with_what_to_do(door: Address) -> None:
    found = data_door_trouble(door)
    assert isinstance(found, Disconnected)
    assert "data door of the office does not answer" in found.message
    assert "sublet down --keep" in found.do


@pytest.mark.parametrize("door", ["refusal"], indirect=True)
def test_a_door_that_turns_us_away_says_why(door: Address) -> None:
    found = data_door_trouble(door)
    assert isinstance(found, Unauthorized)


def test_no_door_at_all_and_an_office_elsewhere(tmp_path: Path) -> None:
    assert isinstance(data_door_trouble(Address(url="the office", socket=tmp_path / "office.sock")), Disconnected)
    assert data_door_trouble(Address(url="https://gpu.example.org", socket=None)) is None


class _Office:
    """An office that answers on its control socket."""

    def __init__(self, address: Address, troubles: list[dict[str, Any]] | SubletError) -> None:
        self.address, self._troubles = address, troubles

    def get(self, path: str) -> Any:
        if path == "/v1/troubles":
            if isinstance(self._troubles, SubletError):
                raise self._troubles
            return self._troubles
        return VIEW


def reach(monkeypatch: pytest.MonkeyPatch, address: Address, troubles: Any = ()) -> None:
    office = _Office(address, list(troubles) if not isinstance(troubles, SubletError) else troubles)
    monkeypatch.setattr(CommandOffice, "reach", lambda **_: office)


@pytest.mark.parametrize("door", ["silence"], indirect=True)
@pytest.mark.parametrize("as_json", [False, True])
def test_status_fails_and_says_so(
    door: Address, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    reach(monkeypatch, door)
    assert status.status(as_json=as_json) == 1
    said = capsys.readouterr().out
    if as_json:
        assert "does not answer" in json.loads(said)["data_door"]
    else:
        assert "The data door of the office does not answer" in said
        assert "sublet down --keep" in said


@pytest.mark.parametrize("door", ["welcome"], indirect=True)
def test_status_of_a_whole_office_is_as_ever(
    door: Address, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reach(monkeypatch, door)
    assert status.status(as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["data_door"] is None


@pytest.mark.parametrize("door", ["late"], indirect=True)
def test_status_of_an_office_whose_door_is_slow_is_as_ever(
    door: Address, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that has much to do takes seconds; that is no door that is closed."""
    reach(monkeypatch, door)
    assert status.status() == 0
    assert "does not answer" not in capsys.readouterr().out


@pytest.mark.parametrize("door", ["welcome"], indirect=True)
def test_what_the_office_says_is_shown_before_its_door_is_waited_for(
    door: Address, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def asked(address: Address) -> SubletError | None:
        shown.append(capsys.readouterr().out)
        return data_door_trouble(address)

    monkeypatch.setattr(status, "data_door_trouble", asked)
    reach(monkeypatch, door)
    assert status.status() == 0
    assert "The office is running" in shown[0]
    assert "DEVICE" in shown[0]


@pytest.mark.parametrize(("door", "state"), [("welcome", "ok"), ("silence", "broken")], indirect=["door"])
def test_doctor_looks_at_the_door(door: Address, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, door)
    assert doctor._check_data_door()[0] == state


@pytest.mark.parametrize(
    ("troubles", "state", "words"),
    [
        ([], "ok", "nothing has failed"),
        ([{"shortages": 3, "errors": 0, "failing": 0}], "note", "3 shortages, 0 errors, works"),
        ([{"shortages": 3, "errors": 1, "failing": 1}], "broken", "does not work now"),
        (Unauthorized("operators only"), "note", "operators only"),
    ],
)
def test_doctor_shows_what_failed_in_the_background(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, troubles: Any, state: str, words: str
) -> None:
    if isinstance(troubles, list):
        troubles = [{"part": "supervisor", "loop": "publish_door", "last": "OSError: no", **one} for one in troubles]
    reach(monkeypatch, Address(url="the office", socket=tmp_path / "office.sock"), troubles)
    found = doctor._check_background()
    assert found[0] == state
    assert words in found[1]
    if state in ("note", "broken") and isinstance(troubles, list):
        assert found[2], "it says what to do"  # type: ignore[misc]
