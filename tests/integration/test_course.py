"""The tutorial ``docs/course.md``, followed word by word on a fresh state folder: what it runs, says and shows.

Only places are others: the folder of the sockets, the port of the studio, and a host device of a stated size; and the
planner's course has fewer students, unless ``SUBLET_CRASH_ALL`` is set.
JupyterLab is left out; the student's cells run in an IPython of that user's own.
"""

from __future__ import annotations

import csv
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import pytest

from sublet.client.home import runtime_dir
from sublet.wire.zygote import TENANT_WARM_VARIABLE
from tests.commands import Process, command_file, run_sublet, start_sublet
from tests.integration.test_docs import FENCED
from tests.light_jupyter import light_environment
from tests.security.other_users import ROOT, User, closed_folder
from tests.traces import end_office, plain_env, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root"),
    pytest.mark.skipif(closed_folder(ROOT) is not None, reason="other users cannot enter this checkout"),
]
PAGE: Final = (ROOT / "docs" / "course.md").read_text()
PATIENCE_S: Final = 120.0
STUDENTS: Final = "120" if os.environ.get("SUBLET_CRASH_ALL") else "30"
"""Of the course that the planner plays, which has 120 on the page."""


class Afternoon:
    """One machine: root's terminals, a student's, and what the last block printed."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.home, self.port = folder, (folder / "state").resolve(), port
        self.said = ""
        self.studio: Process | None = None
        (folder / "bin").mkdir()
        (folder / "root").mkdir()
        self.env = plain_env() | {
            "SUBLET_HOME": str(self.home),
            "XDG_STATE_HOME": str(folder / "anchors"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            TENANT_WARM_VARIABLE: "no",
        }
        command_file(folder / "bin" / "sublet", self.env)
        light = light_environment(folder / "light", str(ROOT), str(ROOT / "src"))
        self.student = User(2001, folder / "ana", "", env=light)

    def here(self, text: str) -> str:
        """With the places of this machine."""
        text = text.replace("--course 120", f"--course {STUDENTS}")
        text = text.replace("sublet up --shared", f"sublet up --shared {self.folder}/shared --host-gpus 1x2GiB")
        address = f"127.0.0.1:{self.port}"
        text = text.replace("enrol course.csv", f"enrol course.csv --url http://{address}")
        return text.replace("/run/sublet", f"{self.folder}/shared").replace("127.0.0.1:8320", address)

    def run(self, commands: str) -> None:
        """In root's terminal."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.here(commands)],
            cwd=self.folder / "root",
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        self.said = done.stdout

    def serve(self, command: str) -> None:
        """In the second terminal."""
        log = self.folder / "studio"
        sublet, *words = self.here(command).split()
        assert sublet == "sublet"
        with log.open("wb") as said:
            self.studio = start_sublet(*words, "--listen", f"127.0.0.1:{self.port}", env=self.env, said=said)
        until("the studio is up", lambda: "The studio is up" in log.read_text(), PATIENCE_S)
        self.said = log.read_text()

    def close(self) -> None:
        if self.studio is not None:
            self.studio.send_signal(signal.SIGTERM)
            assert self.studio.wait(PATIENCE_S) == 0
        run_sublet("down", "--now", env=self.env, timeout=PATIENCE_S)
        end_office(runtime_dir(self.home))


@pytest.fixture
def afternoon() -> Iterator[Afternoon]:
    with socket.socket() as reserved, tempfile.TemporaryDirectory(prefix="sublet-course-", dir="/tmp") as text:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))  # the studio may listen there, and no other gets the port meanwhile
        Path(text).chmod(0o755)
        made = Afternoon(Path(text), reserved.getsockname()[1])
        try:
            yield made
        finally:
            made.close()


def check_said(expected: str, said: str) -> None:
    """Each line of it stands in what was printed, in this order; … is any text within a line."""
    rest = said
    for line in expected.splitlines():
        pattern = ".*".join(re.escape(piece) for piece in line.split("…")).replace(r"\ ", r"\s+")
        found = re.search(pattern, rest)
        assert found is not None, f"{line!r} is not in:\n{rest}"
        rest = rest[found.end() :]


def send(afternoon: Afternoon, method: str, path: str, fields: dict[str, str], cookie: str = "") -> tuple[str, str]:
    """A browser's request; the text of the page, and the cookie that it was given."""
    line = http.client.HTTPConnection("127.0.0.1", afternoon.port, timeout=PATIENCE_S)
    try:
        line.request(method, path, urlencode(fields), {"cookie": cookie})
        answer = line.getresponse()
        text = " ".join(re.sub(r"<[^>]*>", " ", answer.read().decode()).split())
        assert answer.status in (200, 303), text
        return text, (answer.headers["set-cookie"] or "").partition(";")[0]
    finally:
        line.close()


def table(afternoon: Afternoon, name: str) -> list[dict[str, str]]:
    """A CSV file in root's folder."""
    return list(csv.DictReader((afternoon.folder / "root" / name).read_text().splitlines()))


def join(afternoon: Afternoon, name: str) -> str:
    """Open the link of a student, and press the button; the token that is shown."""
    link = next(row["invite"] for row in table(afternoon, "invites.csv") if row["name"] == name)
    assert link.startswith(f"http://127.0.0.1:{afternoon.port}/join#")
    page, _ = send(afternoon, "POST", "/join", {"invite": link.partition("#")[2]})
    found = re.search(r"sublet_studio_[\w-]{43}", page)
    assert found is not None
    return found[0]


def teachers_page(afternoon: Afternoon) -> str:
    token = (afternoon.folder / "root" / "tea.token").read_text().strip()
    _, cookie = send(afternoon, "POST", "/sign-in", {"token": token})
    return send(afternoon, "GET", "/course/ml1", {}, cookie)[0]


def run_notebook(afternoon: Afternoon, exports: str, cells: list[str]) -> str:
    """What the cells print, in one notebook of the student's."""
    token = join(afternoon, "ana")
    env = dict(re.findall(r"^export (\w+)=(.*)$", afternoon.here(exports), re.MULTILINE))
    assert env["SUBLET_STUDIO_TOKEN"] == "sublet_studio_…"
    env["SUBLET_STUDIO_TOKEN"] = token
    notebook = {
        "cells": [
            {"cell_type": "code", "id": f"c{n}", "metadata": {}, "source": cell, "outputs": [], "execution_count": None}
            for n, cell in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = afternoon.student.folder / "lab1.ipynb"
    path.write_text(json.dumps(notebook))
    done = afternoon.student.run(sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", str(path), **env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_page_is_followed_word_by_word(afternoon: Afternoon) -> None:
    blocks = FENCED.findall(PAGE)
    cells = [text for mark, text in blocks if mark == "python student"]
    exports = next(text for mark, text in blocks if mark == "sh course student")
    has_run = False
    for mark, text in blocks:
        match mark:
            case "csv course.csv":
                (afternoon.folder / "root" / "course.csv").write_text(text)
            case "sh course":
                afternoon.run(text)
            case "sh course studio":
                afternoon.serve(text)
            case "sh course student":
                pass
            case "python student":
                if not has_run:
                    afternoon.said, has_run = run_notebook(afternoon, exports, cells), True
            case "text says":
                check_said(afternoon.here(text), afternoon.said)
            case "text shows":
                check_said(text, teachers_page(afternoon))
            case _:
                pytest.fail(f"nothing is done with a block that is marked {mark!r}")
    assert has_run
    bill = table(afternoon, "bill.csv")
    assert [row for row in bill if row["key"].startswith("s-") and float(row["held_seconds"]) > 0], bill
    page = teachers_page(afternoon)
    assert "1 member;" in page, "ben is gone"
    assert "As planned on" in page
