"""The systemd units and the container recipe of ``examples/deploy``: what they say is run, in folders of its own.

There is no container engine here and no systemd that runs; their commands are carried out as those would, with the
program of this environment in the place of the installed one.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.integration.deploy_stage import DEPLOY, INSTALLED, PATIENCE_S, PROGRAM, ROOT, Machine, machine_stage, unit
from tests.traces import until

UNITS: Final = ("sublet-office", "sublet-studio")


@pytest.fixture
def machine() -> Iterator[Machine]:
    with machine_stage() as made:
        yield made


@pytest.mark.needs("systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Without a word; and of one with a wrong key it says so, or this would prove nothing."""
    paths = [tmp_path / f"{name}.service" for name in UNITS]
    for path in paths:
        path.write_text((DEPLOY / path.name).read_text().replace(INSTALLED, sys.executable))

    def verify() -> tuple[int, str]:
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *map(str, paths)], capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stderr

    assert verify() == (0, "")
    paths[0].write_text(paths[0].read_text().replace("\nRestart=", "\nRestrt="))
    assert "Unknown key" in verify()[1]


@pytest.mark.parametrize("name", UNITS)
def test_the_system_starts_it_again_for_as_long_as_a_disk_is_full(name: str) -> None:
    """By default it would give up after five times in ten seconds, and stay ended when there is room again."""
    made = unit(name)
    assert made["Service"]["Restart"] in ("always", "on-failure")
    assert made["Unit"]["StartLimitIntervalSec"] == "0"


@pytest.mark.slow
def test_the_units_start_in_any_order_and_leases_outlive_both(machine: Machine) -> None:
    """The studio waits for the office; a lease and a studio outlive an office that is started again."""
    machine.start("sublet-studio", "--listen", "127.0.0.1:0")
    until("the studio waits", lambda: "Waiting for the office." in machine.said("sublet-studio"), PATIENCE_S)
    machine.start_office()
    until("the studio is up", lambda: "The studio is up" in machine.said("sublet-studio"), PATIENCE_S)
    until("the office answers", lambda: machine.readiness() == (200, []), PATIENCE_S)
    added = machine.run("tenant", "add", "physics")
    assert added.returncode == 0, added
    lease = json.loads(machine.run("lease", "acquire", "--gpu", "1GiB", "--ttl", "10m", "--json").stdout)["id"]
    assert machine.stop("sublet-office") == 0
    until("the studio notices", lambda: machine.readiness() == (503, ["office"]), PATIENCE_S)
    machine.start_office()
    until("the studio goes on", lambda: machine.readiness() == (200, []), PATIENCE_S)
    assert [one["id"] for one in json.loads(machine.run("lease", "ls", "--json").stdout)] == [lease]
    reload = unit("sublet-studio")["Service"]["ExecReload"]
    pid = machine.running["sublet-studio"].pid
    subprocess.run(machine.words(reload.replace("$MAINPID", str(pid))), check=True, timeout=PATIENCE_S)
    until("the settings are read again", lambda: "was read again" in machine.said("sublet-studio"), PATIENCE_S)
    assert machine.stop("sublet-studio") == 0


# ---- the container


def instructions() -> dict[str, list[str]]:
    """Those of the recipe, by name; the comment at its top is under ``#``."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "Containerfile").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if name:
            found.setdefault(name, []).append(rest.strip())
    return found


def test_what_the_recipe_copies_is_enough_to_install_it(tmp_path: Path) -> None:
    """The wheel that comes of it is whole, and the extras that it asks for are there."""
    recipe = instructions()
    for line in recipe["COPY"]:
        *sources, target = line.split()
        for source in sources:
            there = tmp_path / target.lstrip("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, there)
            else:
                there.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, there)
    install = re.search(r"pip install --no-cache-dir '/sublet\[(.*)\]'", recipe["RUN"][0])
    assert install is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(install[1].split(",")) <= set(extras)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=tmp_path / "sublet", check=True, capture_output=True, timeout=PATIENCE_S)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {"sublet/__init__.py", "sublet/studio/studio.css", "sublet/studio/studio.js"} <= names


@pytest.mark.slow
def test_the_commands_of_the_containers_serve(machine: Machine) -> None:
    """The office is what the image runs, the studio what the comment says; the health check is 0 while it answers."""
    recipe = instructions()
    office = json.loads(recipe["ENTRYPOINT"][0]) + json.loads(recipe["CMD"][0])
    assert office[0] == "sublet"
    assert office[1:] == shlex.split(unit("sublet-office")["Service"]["ExecStart"])[1:]
    studio = re.search(r"sublet (studio --no-start)$", "\n".join(recipe["#"]), re.MULTILINE)
    assert studio is not None
    health = re.search(r"CMD (sublet .*)$", recipe["HEALTHCHECK"][0])
    assert health is not None

    def is_healthy() -> bool:
        env = {**machine.env, "SUBLET_HOME": str(machine.home)}
        done = subprocess.run(machine.words(health[1]), env=env, capture_output=True, timeout=PATIENCE_S)
        return done.returncode == 0

    assert not is_healthy()
    machine.start_office()
    until("the office is healthy", is_healthy, PATIENCE_S)
    assert machine.run("tenant", "add", "physics").returncode == 0
    env = {**machine.env, "SUBLET_HOME": str(machine.home)}
    words = [*PROGRAM, *studio[1].split(), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "The studio is up" in process.stdout.readline()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
