"""What ``--json`` prints is a contract with programs: keys and types, of every command, down to the last one.

``json_shapes.txt`` has a line for each command, and one for each type of the control API. The commands run here, in
this process, on one office with pretended hardware. What one prints that passes an answer of the office on is the type
of that answer, whole and nothing besides; what others print is written out in the list.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest

import sublet
from sublet.cli import doctor, guests, main, nb_show
from sublet.cli.table import COMMANDS, load
from sublet.client import fabric
from sublet.client.home import runtime_dir
from sublet.notebook.batch.job_states import JobRecord
from sublet.notebook.batch.jobs import JobSpec
from sublet.office.api.routes import ROUTES
from sublet.state.checkpoints import verifying
from sublet.studio.cell_bill import CellLine
from sublet.values import Epoch, GuestId, LeaseId, TenantId
from sublet.wire import http as wire
from sublet.wire import http_views
from sublet.wire.codec import dumps
from sublet.wire.guests import GuestView, Profile
from tests.unit.client.office_thread import OfficeThread, office_thread
from tests.unit.office.journal.making import Place

LIST: Final = Path(__file__).with_name("json_shapes.txt")

STRUCTS: Final = {
    frozenset(kind.__struct_encode_fields__): kind
    for kind in (*vars(wire).values(), *vars(http_views).values())
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and len(kind.__struct_encode_fields__) > 2
}
"""The types of the control API, by their fields."""

EMPTY: Final[Mapping[str, Any]] = {
    "bill": list[wire.BillLine],
    **dict.fromkeys(("fence ls", "fence clear"), list[wire.FenceView]),
    "policy apply": list[wire.LimitChange],
    "audit log": list[wire.AuditEntry],
}
"""What the office here has nothing of, and what its answer is made of."""

SAME: Final[Mapping[str, str]] = {
    **dict.fromkeys([f"session {verb}" for verb in ("rest", "resume", "accept", "decline", "end")], "session start"),
    **dict.fromkeys(("session show", "session explain"), "session start"),
    **dict.fromkeys(("person set", "person rm"), "person show"),
    "nb status": "nb submit",
}
"""Commands that print one document by the function by which another prints it; lists have one or many of them."""


def shape(values: Iterable[Any]) -> str:
    """The keys and types of documents that are alike."""
    found = list(values)
    kinds = {"null" if one is None else type(one).__name__ for one in found} - {"dict", "list"}
    for keys in {frozenset(one) for one in found if isinstance(one, dict)}:
        alike = [one for one in found if isinstance(one, dict) and one.keys() == keys]
        if (struct := STRUCTS.get(keys)) is not None:
            whole = [json.loads(msgspec.json.encode(msgspec.convert(one, struct))) for one in alike]
            assert whole == alike, struct
            kinds.add(struct.__name__)
        else:
            kinds.add(f"{{{', '.join(f'{key}: {shape(one[key] for one in alike)}' for key in sorted(keys))}}}")
    if lists := [one for one in found if isinstance(one, list)]:
        kinds.add(f"[{shape(one for several in lists for one in several)}]")
    return " | ".join(sorted(kinds))


def form(schema: Mapping[str, Any]) -> str:
    """The same of a type, by its JSON schema."""
    match schema:
        case {"$ref": str(where)}:
            return where.rpartition("/")[2]
        case {"anyOf": list(kinds)}:
            return " | ".join(sorted(form(one) for one in kinds))
        case {"enum": list(values)}:
            return " | ".join(sorted({"null" if one is None else "str" for one in values}))
        case {"type": "array", "prefixItems": list(items)}:
            return f"[{', '.join(form(one) for one in items)}]"
        case {"type": "array"}:
            return f"[{form(schema.get('items', {}))}]"
        case {"type": "object", "properties": dict(fields)}:
            return f"{{{', '.join(f'{key}: {form(fields[key])}' for key in sorted(fields))}}}"
        case {"type": "object"}:
            return f"{{str: {form(schema.get('additionalProperties') or {})}}}"
        case {"type": str(kind)}:
            return {"integer": "int", "number": "float", "string": "str", "boolean": "bool"}.get(kind, kind)
        case _:
            return "any"


def types() -> dict[str, str]:
    """Every type that the control API answers with, and those in it."""
    answered = [kind for route in ROUTES for kind in route.answers.values() if not isinstance(kind, str)]
    _, components = msgspec.json.schema_components(answered)
    return {name: form(schema) for name, schema in components.items()}


class Commands:
    """Runs commands, and notes what each printed."""

    def __init__(self) -> None:
        self.printed: dict[str, list[Any]] = {}

    def __call__(self, command: str, *words: str, as_: str = "", status: int = 0) -> Any:
        with redirect_stdout(StringIO()) as out:
            assert main([*command.split(), *words, "--json"]) == status, command
        document = json.loads(out.getvalue())
        self.printed.setdefault(as_ or command, []).append(document)
        return document


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        yield run_all(tmp_path_factory.mktemp("shapes"), patch)


def run_all(place: Path, patch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    home = place / "home"
    home.mkdir(mode=0o700)
    for name, value in (("SUBLET_HOME", home), ("XDG_STATE_HOME", place / "xdg"), ("XDG_RUNTIME_DIR", place)):
        patch.setenv(name, str(value))
    runtime = runtime_dir(home)
    shutil.rmtree(runtime, ignore_errors=True)
    runtime.mkdir(parents=True, mode=0o700)
    run = Commands()
    try:
        run("down")
        with office_thread(runtime, name="office.sock") as office:
            use_office(run, office, place)
        use_no_office(run, place, patch)
    finally:
        shutil.rmtree(runtime)  # root's lies in /run, and not in the folder of the test
    return run.printed


def use_office(run: Commands, office: OfficeThread, place: Path) -> None:
    run("status", status=1)  # since no supervisor answers
    for command in ("up", "bill", "fence ls", "policy show", "audit log", "audit verify"):
        run(command)
    run("bill", "--noisy", as_="bill --noisy")
    use_leases(run)
    use_volumes(run, office, place)
    use_tenants(run, place)
    use_sessions(run)
    run("drain", "n1")
    run("drain", "n1", "--undo")
    run("backup", str(place / "backup"))
    written = place / "home" / "policy.toml"
    written.write_text("[tenant]\nqueue = 7\n")
    run("policy check", str(written))


def use_leases(run: Commands) -> None:
    lease = run("lease acquire", "--gpu", "1GiB", "--name", "pi", "--label", "program=burst", "--label", "job=pi")["id"]
    run("lease ls")
    for verb in ("explain", "show", "renew"):
        run(f"lease {verb}", lease)
    run("top")
    run("burst", "ls", as_="burst ls")
    with pytest.MonkeyPatch.context() as within:
        within.setattr("sublet.cli.burst._count", lambda fabric, name: 7)
        run("burst", "show", "pi", as_="burst show")
    run("lease revoke", lease)


def use_volumes(run: Commands, office: OfficeThread, place: Path) -> None:
    made = run("lease acquire", "--block", "1GiB", "--name", "notes")
    office.touch(made["id"], Epoch(*made["epoch"]))
    run("volume ls")
    run("volume show", "notes")
    with pytest.MonkeyPatch.context() as within:
        within.setattr(sublet.Fabric, "copy_volume", lambda *words, **more: None)
        run("volume cp", "notes", "notes")
        with sublet.Durable([1], place / "saved") as state:
            state.checkpoint()
        with redirect_stdout(StringIO()) as said:
            verifying.main([str(place / "saved")])
        done = SimpleNamespace(returncode=0, stdout=said.getvalue(), stderr="")
        within.setattr(subprocess, "run", lambda *words, **more: done)
        run("volume verify", "notes")
    run("lease release", made["id"])
    office.left()  # and a moment passes, until it is torn down
    run("volume rm", "notes")


def use_tenants(run: Commands, place: Path) -> None:
    run("group add", "course", "--weight", "2")
    run("group set", "course", "--weight", "3")
    run("group ls")
    run("tenant add", "ana")
    run("tenant set", "ana", "--leases", "3")
    run("tenant set", "ana", "--new-token", as_="tenant set --new-token")
    for verb in ("disable", "enable"):
        run(f"tenant {verb}", "ana")
    run("tenant ls")
    run("reservation add", "lab", "2099-01-01 10:00-12:00", "--group", "course", "--gpus", "1", "--zone", "UTC")
    run("reservation ls")
    run("reservation rm", "lab")
    run("budget set", "100", "--tenant", "ana")
    run("budget credit", "5", "--tenant", "ana")
    run("budget ls")
    run("budget rm", "--tenant", "ana")
    run("person add", "zoe", "--tenant", "ana")
    (place / "course.csv").write_text("name\nyan\n")
    run("person enrol", str(place / "course.csv"), "--tenant", "ana")
    run("person set", "zoe", "--teacher", "course")
    run("person invite", "zoe")
    run("person token", "zoe", "--label", "laptop")
    run("person ls")
    run("person show", "zoe")
    run("person rm", "zoe")
    run("group rm", "course")
    run("tenant rm", "ana")


def use_sessions(run: Commands) -> None:
    """A command's process ends, and its connections with it; here they are closed after each."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as within:
        within.setattr(fabric, "connect", lambda: stack.enter_context(sublet.connect()))
        run("session start", "study", "--vram", "1GiB")
        run("session ls")
        for verb in ("show", "rest", "resume", "end"):
            run(f"session {verb}", "study")


def use_no_office(run: Commands, place: Path, patch: pytest.MonkeyPatch) -> None:
    run("config")
    run("simulate", "--gpus", "1", "--sessions", "2", "--days", "1")
    with pytest.MonkeyPatch.context() as within:
        within.setattr(doctor, "_checks", lambda: {"platform": doctor._check_platform})
        run("doctor")
    with (there := Place(place / "journal")).open() as journal:
        journal.backup(place / "journal-backup")
    patch.setenv("SUBLET_HOME", str(there.home))
    run("restore", str(place / "journal-backup"))
    spec = JobSpec(notebook="/n", folder="/", name="n", asked={"tier": "batch"}, parameters=("a=1",))
    record = JobRecord(unsaved=("x",), exit_code=0)
    job: Any = SimpleNamespace(id="1", folder="/f", runner=3, spec=lambda: spec, record=lambda: record)
    run.printed["nb submit"] = [nb_show.as_document(job)]
    outside = CellLine(session="s", name="n", lease="l", launch_errors=0, end="idle")
    cell = CellLine(session="s", name="n", lease="l", cell=1, at="2026", vram_leased=1, launches=1)
    run.printed["session bill"] = [[cell.document(), outside.document()]]
    guest = GuestView(
        id=GuestId("g"),
        lease=LeaseId("l"),
        epoch=Epoch(1, 1),
        tenant=TenantId("ana"),
        name="n",
        argv=("sleep",),
        profile=Profile.LOCAL,
        state="gone",
        pid=7,
        processes=0,
        started_at=1,
        ended_at=2,
        exit_code=0,
        reason="expired",
        cpu_ns=1,
        peak_bytes=1,
        log_bytes=1,
        log_dropped=0,
    )
    run.printed["stop"] = [guests._shown(json.loads(dumps(guest)))]
    run.printed["ps"] = [run.printed["stop"]]


def lines(printed: Mapping[str, list[Any]]) -> str:
    documents: dict[str, list[Any]] = {}
    for command, found in printed.items():
        documents.setdefault(SAME.get(command, command), []).extend(found)
    commands = {f"sublet {command}": shape(found) for command, found in documents.items()}
    commands |= {f"sublet {command}": form(msgspec.json.schema(kind)) for command, kind in EMPTY.items()}
    commands |= {f"sublet {command}": f"as sublet {other}" for command, other in SAME.items()}
    return "".join(f"{name}: {what}\n" for name, what in [*sorted(commands.items()), *sorted(types().items())])


def test_commands_print_the_keys_and_types_that_they_printed(printed: dict[str, list[Any]]) -> None:
    assert lines(printed) == LIST.read_text(encoding="utf-8")


def test_every_command_with_json_is_in_the_list() -> None:
    """Of `burst` it is the two that look; of others, each that has the option."""
    listed = {line.partition(": ")[0].removeprefix("sublet ") for line in LIST.read_text(encoding="utf-8").splitlines()}
    having = {path for path in COMMANDS if any("--json" in getattr(p.spec, "flags", ()) for p in load(path).params)}
    assert having - {"burst"} | {"burst ls", "burst show"} <= listed


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([{"a": 1}, {"a": None}], "{a: int | null}"),
        ([[{"a": 1}], []], "[{a: int}]"),
        ([{"a": 1}, {"a": 1, "b": "x"}], "{a: int, b: str} | {a: int}"),
        ([{"is": True, "in": [[1.5]]}], "{in: [[float]], is: bool}"),
    ],
)
def test_a_shape_has_every_key_and_type(documents: list[Any], said: str) -> None:
    """So that one that is gone, or of another type, is seen."""
    assert shape(documents) == said


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        LIST.write_text(lines(run_all(Path(folder), patch)), encoding="utf-8")
