"""What happens before a command runs and after it went wrong; and a correct command loads nothing it does not use."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sublet import __version__
from sublet.cli import main
from sublet.cli.declare import Opt
from sublet.cli.hints import ELSEWHERE, SYNONYMS
from sublet.cli.table import COMMANDS, GROUPS, load
from sublet.client.address import Address
from tests.cases import case

HEAVY = ("typer", "rich", "click", "asyncio", "msgspec", "subprocess", "ssl", "http.client", "psutil", "sqlite3")


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sublet", *words]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sublet {__version__}\n"


def test_every_command_and_group_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It names the command, and says in words what it and each of its options is for."""
    for path in (*COMMANDS, *GROUPS, ""):
        with case(path):
            assert main([*path.split(), "--help"]) == 0
            said = capsys.readouterr().out
            assert f"Usage: sublet {path}".rstrip() in said
            assert "--embedded" not in said, "our own processes' options are not for people"


def test_the_help_of_the_whole_names_every_first_word_and_the_exit_statuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for word in {path.split()[0] for path in COMMANDS} | {"SUBLET_HOME", "SUBLET_TOKEN", "75", "76"}:
        assert word in said


@pytest.mark.parametrize("words", [[], ["lease"]])
def test_an_incomplete_command_shows_the_help_and_is_exit_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "Usage: sublet" in capsys.readouterr().out


def test_a_misspelt_command_or_option_is_told_with_what_may_be_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lease", "aquire"]) == 2
    assert capsys.readouterr().err == (
        "sublet: no such command 'aquire'. Did you mean 'acquire'?\n  See `sublet lease --help`.\n"
    )
    assert main(["status", "--jsn"]) == 2
    assert "--json" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_said_before_anything_is_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUBLET_HOME", str(tmp_path / "home"))
    assert main(["train", "--gpu", "1GiB", str(tmp_path / "none.py")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["train", sys.executable, "train.py"]) == 2
    assert "takes the script itself" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_with_json_a_usage_error_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lease", "acquire", "--gpu", "x", "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert json.loads(said.err)["error"]["kind"] == "UsageError"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "_SUBLET_COMPLETE" in capsys.readouterr().out
    assert "_SUBLET_COMPLETE" not in os.environ


@pytest.mark.parametrize(
    ("line", "offered"),
    [("sublet le", "lease"), ("sublet lease acq", "acquire"), ("sublet lease acquire --tier b", "batch")],
)
def test_completion_knows_commands_options_and_choices(line: str, offered: str) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_SUBLET_COMPLETE": "complete_bash"}
    assert run(**words).stdout.split() == [offered]


def test_elsewhere_than_on_linux_one_sentence_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("SUBLET_HOME", str(tmp_path / "home"))
    for words in (["up"], ["up", "--foreground"], ["lease", "acquire", "--cpu", "1"]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert "Linux" in said
        assert "SUBLET_URL" in said or "connect" in said


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sublet.cli.status.CommandOffice.reach", interrupted)
    assert main(["status"]) == 130
    assert "Traceback" not in capsys.readouterr().err


STATUS: dict[str, object] = {
    "pid": 7,
    "uptime": 65.4,
    "version": "1",
    "live": 1,
    "queued": 0,
    "quarantined": 1,
    "embedded": True,
    "home": "/home/zoë\x1b[2K",
    "nodes": [{"id": "local", "state": "draining"}],
    "devices": [
        {
            "id": "local/gpu0",
            "kind": "gpu",
            "model": "",
            "host": True,
            "capacity": 4 << 30,
            "free": 0,
            "state": "quarantined",
            "detail": "scrub failed",
            "leases": ["l-1"],
        },
        *(
            {
                "id": f"local/GPU-{number}",
                "kind": "gpu",
                "model": "H100",
                "host": False,
                "capacity": 4 << 30,
                "free": free << 30,
                "state": "free",
                "detail": f"{4 - free}GiB of GPU-{number} is used by process 9 (Xorg) of zoe",
                "leases": leases,
            }
            for number, free, leases in ((1, 0, []), (2, 3, []), (3, 1, ["l-2"]))
        ),
    ],
}


class FakeOffice:
    address = Address(url="https://gpu.example.org")

    def get(self, path: str) -> dict[str, object]:
        assert path == "/v1/status"
        return STATUS


def narrow_status(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What `sublet status` prints to a stream that knows ASCII only."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("sublet.cli.status.CommandOffice.reach", lambda start: FakeOffice())
    assert main(["status", *words]) == 0
    sys.stdout.flush()
    return raw.getvalue().decode("ascii")


def test_a_stream_that_cannot_show_a_letter_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The letter is replaced; a JSON document says it in full all the same."""
    said = narrow_status(monkeypatch)
    assert "/home/zo?" in said
    assert "\x1b" not in said
    assert json.loads(narrow_status(monkeypatch, "--json")) == STATUS | {"data_door": None}


def test_status_says_what_is_not_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    said = narrow_status(monkeypatch)
    for fact in ("for 1m 5s", "ten idle minutes", "host device, no GPU", "quarantined: scrub failed", "fence ls"):
        assert fact in said
    assert "Node local is draining." in said


def test_a_card_that_only_others_use_is_not_called_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "lent", or "partly lent", under no lease; who has it was told in the JSON document alone."""
    lines = {line.split()[0]: line for line in narrow_status(monkeypatch).splitlines() if line.startswith("local/GPU-")}
    assert "used by others: 4GiB of GPU-1 is used by process 9 (Xorg) of zoe" in lines["local/GPU-1"]
    assert "used by others: 1GiB of GPU-2 is used by process 9 (Xorg) of zoe" in lines["local/GPU-2"]
    assert "partly lent" in lines["local/GPU-3"]
    assert not any("lent" in lines[f"local/GPU-{number}"] for number in (1, 2))


@pytest.mark.parametrize("words", [["status"], ["lease", "ls"], ["lease", "show", "x"], ["--version"]])
def test_the_short_way_loads_nothing_heavy(words: list[str]) -> None:
    """`sublet status` is asked by prompts, many times a minute."""
    script = (
        "import sys; from sublet.cli import call, main\n"
        "call.CommandOffice.reach = classmethod(lambda cls, **_: (_ for _ in ()).throw(call.NoOffice('none')))\n"
        f"main({words!r})\nprint(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not [name for name in HEAVY if name in loaded]


@pytest.mark.parametrize(
    ("line", "says", "do"),
    [
        ("acquire --gpu 8GiB", "no such command 'acquire'", "Did you mean `sublet lease acquire`?"),
        ("aquire", "no such command 'aquire'", "Did you mean `sublet lease acquire`?"),
        ("stauts", "no such command 'stauts'", "Did you mean `sublet status`?"),
        ("rum x", "no such command 'rum'", "Did you mean `sublet run`?"),
        ("relase", "no such command 'relase'", "Did you mean `sublet lease release`?"),
        ("frobnicate", "no such command 'frobnicate'", "See `sublet --help`."),
        ("kill g-1", "no such command 'kill'", "`sublet stop GUEST` ends a command"),
        ("scancel 7", "no such command 'scancel'", "`sublet lease release LEASE`"),
        ("lease cancel l-1", "no such command 'lease cancel'", "`sublet lease release LEASE`"),
        ("lease list", "no such command 'lease list'", "Write `sublet lease ls`."),
        ("sinfo", "no such command 'sinfo'", "`sublet status`"),
        ("gpus", "no such command 'gpus'", "`sublet status`"),
        ("squeue", "no such command 'squeue'", "`sublet lease ls`"),
        ("sbatch job.sh", "no such command 'sbatch'", "`sublet run --gpu 8GiB -- COMMAND`"),
        ("salloc", "no such command 'salloc'", "`sublet lease acquire --gpu 8GiB`"),
        ("help", "no such command 'help'", "`sublet --help`"),
        ("run --time 5m -- true", "`run` has no option --time", "Did you mean --ttl?"),
        ("run --time=5m -- true", "`run` has no option --time", "Did you mean --ttl?"),
        ("run -g 8GiB -- true", "`run` has no option -g", "Did you mean --gpu?"),
        ("run -gpu 8GiB -- true", "`run` has no option -gpu", "Did you mean --gpu?"),
        ("run --mem 8GiB -- true", "`run` has no option --mem", "Did you mean --memory?"),
        ("nb run x.ipynb --time 5m", "`nb run` has no option --time", "Did you mean --ttl?"),
        ("run --gpus 1 -- true", "--gpus needs --gpu SIZE as well", "such as --gpus 2 --gpu 8GiB"),
        ("lease acquire --gpus 1", "--gpus needs --gpu SIZE as well", "--gpu 8GiB"),
        ("run --gpu 8 -- true", "--gpu: the size 8 has no unit", "Write 8GiB or 8MiB"),
        ("run --gpu 8 -- true", "--gpu: the size 8 has no unit", "For 8 devices add --gpus 8."),
        ("lease acquire --memory 512", "--memory: the size 512 has no unit", "Write 512GiB or 512MiB"),
    ],
)
def test_a_common_mistake_is_answered_with_the_right_command(
    line: str, says: str, do: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUBLET_HOME", str(tmp_path / "home"))
    assert main(line.split()) == 2
    what, hint = capsys.readouterr().err.splitlines()
    assert what == f"sublet: {says}"
    assert do in hint
    assert not (tmp_path / "home").exists(), "no office is started for a usage error"


def test_every_hint_names_commands_and_options_that_exist() -> None:
    for hint in ELSEWHERE.values():
        for line in re.findall(r"`sublet ([a-z ]+)", hint):
            words = line.split()
            assert words[0] in COMMANDS or " ".join(words[:2]) in COMMANDS, hint
    assert not ELSEWHERE.keys() & {path.split()[0] for path in COMMANDS}
    known = {
        flag
        for path in COMMANDS
        for param in load(path).params
        if isinstance(param.spec, Opt)
        for flag in param.spec.flags
    }
    assert {option for meant in SYNONYMS.values() for option in meant} <= known
