"""One number for one tenant, for good; and an environment with nothing of the office's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import SubletError, Unsupported
from sublet.node.sandbox.plan import SYSTEM_PATH, Ids, clean_env
from sublet.node.sandbox.uids import BLOCK, FIRST, Blocks, Uids, allot


def nobody(number: int) -> bool:
    return False


@pytest.mark.parametrize(
    ("taken", "tenant", "number"),
    [
        ({}, "ada", 100),
        ({"ada": 100}, "ada", 100),
        ({"ada": 100}, "bob", 101),
        ({"ada": 100, "bob": 102}, "eve", 101),
        ({"ada": 7}, "ada", 7),  # from a range declared earlier: it keeps its files
        ({"ada": 7}, "bob", 100),
    ],
)
def test_which_number_a_tenant_has(taken: dict[str, int], tenant: str, number: int) -> None:
    assert allot(taken, tenant, 100, 5, nobody) == number


def test_a_number_of_somebody_of_this_machine_is_left_out() -> None:
    assert allot({}, "ada", 100, 5, {100, 101}.__contains__) == 102


def test_a_full_range_is_said() -> None:
    with pytest.raises(Unsupported, match="all 2 user numbers"):
        allot({"ada": 100, "bob": 101}, "eve", 100, 2, nobody)


@given(st.lists(st.text(min_size=1), max_size=40))
def test_never_two_tenants_one_number(tenants: list[str]) -> None:
    taken: dict[str, int] = {}
    for tenant in tenants:
        number = allot(taken, tenant, 1000, 40, nobody)
        assert taken.setdefault(tenant, number) == number
    assert len(set(taken.values())) == len(taken) == len(set(tenants))


def test_numbers_survive_and_are_on_disk(tmp_path: Path) -> None:
    path = str(tmp_path / "uids")
    first = Uids(path, 1000, 10, is_foreign=nobody)
    assert [first.ids("ada"), first.ids("bob"), first.ids("ada")] == [Ids(1000, 1000), Ids(1001, 1001), Ids(1000, 1000)]
    assert Uids(path, 5000, 10, is_foreign=nobody).ids("bob") == Ids(1001, 1001)
    assert Uids(path, 5000, 10, is_foreign=nobody).ids("eve") == Ids(5000, 5000)
    assert json.loads(Path(path).read_text())["uids"] == {"ada": 1000, "bob": 1001, "eve": 5000}
    assert sorted(os.listdir(tmp_path)) == ["uids", "uids.lock"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        '{"version": 2, "uids": {}}',
        '{"version": 1, "uids": []}',
        '{"version": 1, "uids": {"ada": "7"}}',
        '{"version": 1, "uids": {"ada": 0}}',
        '{"version": 1, "uids": {"ada": true}}',
        '{"version": 1, "uids": {"ada": 7, "bob": 7}}',
        "\ufffe",
    ],
)
def test_a_damaged_file_is_not_begun_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "uids"
    path.write_text(text)
    with pytest.raises(SubletError, match="damaged"):
        Uids(str(path), 1000, 10, is_foreign=nobody).ids("ada")
    assert path.read_text() == text


@pytest.mark.parametrize(("first", "count"), [(0, 10), (-5, 10), (1000, 0), (2**31 - 5, 10)])
def test_a_range_that_is_none_is_refused(tmp_path: Path, first: int, count: int) -> None:
    with pytest.raises(ValueError, match="range"):
        Uids(str(tmp_path / "uids"), first, count)


def test_a_tenant_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without a name"):
        Uids(str(tmp_path / "uids")).ids("")


PROGRAM = """
import sys
from sublet.node.sandbox.uids import Uids
uids = Uids(sys.argv[1], 1000, 1000, is_foreign=lambda number: False)
print([uids.ids(f"{sys.argv[2]}{n}").uid for n in range(20)])
"""


@pytest.mark.slow
def test_two_processes_at_once_never_give_one_number_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "uids")]
    both = [subprocess.Popen([*command, name], stdout=subprocess.PIPE) for name in ("a", "b")]
    numbers = [number for one in both for number in json.loads(one.communicate(timeout=60)[0])]
    assert len(set(numbers)) == 40


def test_the_environment_is_new() -> None:
    assert clean_env("ada", home="/lease/home") == {
        "PATH": SYSTEM_PATH,
        "HOME": "/lease/home",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TMPDIR": "/tmp",
        "USER": "ada",
    }


def test_what_the_holder_asks_for_is_there_but_does_not_change_who_the_guest_is() -> None:
    asked = {"MODEL": "7b", "HOME": "/root", "USER": "root", "PATH": "/evil"}
    found = clean_env("ada", home="/h", path_first="/venv/bin", term="xterm", extra=asked)
    assert found["MODEL"] == "7b"
    assert (found["HOME"], found["USER"], found["TERM"]) == ("/h", "ada", "xterm")
    assert found["PATH"] == f"/venv/bin:{SYSTEM_PATH}"


def test_nothing_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "PYTHONPATH", "SUBLET_TOKEN", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "the office's")
    assert "the office's" not in clean_env("ada", home="/h").values()


def office(tmp_path: Path, name: str) -> Uids:
    """The numbers of one of several offices of a machine."""
    (tmp_path / name).mkdir(exist_ok=True)
    return Uids(str(tmp_path / name / "uids"), is_foreign=nobody, blocks=Blocks(str(tmp_path / "machine")))


def blocks_of(tmp_path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((tmp_path / "machine").read_bytes())["blocks"]
    return {first: Path(owner).name for first, owner in found.items()}


def test_two_offices_never_give_one_number(tmp_path: Path) -> None:
    first, second = office(tmp_path, "one"), office(tmp_path, "two")
    found = [one.ids(tenant).uid for tenant in ("ada", "bob") for one in (first, second)]
    assert found == [FIRST, FIRST + BLOCK, FIRST + 1, FIRST + BLOCK + 1]
    assert office(tmp_path, "two").ids("bob").uid == FIRST + BLOCK + 1
    assert blocks_of(tmp_path) == {str(FIRST): "one", str(FIRST + BLOCK): "two"}


def test_a_full_block_is_followed_by_another(tmp_path: Path) -> None:
    taken = {f"t{n}": FIRST + n for n in range(BLOCK)}
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "uids").write_text(json.dumps({"version": 1, "uids": taken}))
    assert office(tmp_path, "one").ids("new").uid == FIRST + BLOCK
    assert office(tmp_path, "one").ids("t0").uid == FIRST


def test_an_office_of_before_keeps_its_numbers_and_its_block(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "uids").write_text(json.dumps({"version": 1, "uids": {"ada": FIRST + 7}}))
    old = office(tmp_path, "old")
    assert old.ids("ada").uid == FIRST + 7
    assert blocks_of(tmp_path) == {str(FIRST): "old"}
    assert old.ids("bob").uid == FIRST
    assert office(tmp_path, "new").ids("eve").uid == FIRST + BLOCK


def test_a_copy_of_an_office_does_not_use_its_numbers_beside_it(tmp_path: Path) -> None:
    """Guests of the copy were the same user as those of the office it was made of."""
    office(tmp_path, "one").ids("ada")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    for tenant in ("ada", "bob"):
        with pytest.raises(SubletError, match="one is a copy of the other"):
            office(tmp_path, "copy").ids(tenant)
    assert blocks_of(tmp_path) == {str(FIRST): "one"}
    assert office(tmp_path, "one").ids("ada").uid == FIRST


def test_a_state_folder_that_was_moved_keeps_its_numbers(tmp_path: Path) -> None:
    office(tmp_path, "one").ids("ada")
    (tmp_path / "one").rename(tmp_path / "moved")
    assert office(tmp_path, "moved").ids("ada").uid == FIRST
    assert office(tmp_path, "moved").ids("bob").uid == FIRST + 1
    assert blocks_of(tmp_path) == {str(FIRST): "moved"}


def test_a_block_is_free_again_only_where_its_office_is_gone_for_good(tmp_path: Path) -> None:
    """A disk that is not mounted hides an office; nothing hides below /tmp."""
    told = {"version": 1, "blocks": {str(FIRST): "/tmp/sublet-gone", str(FIRST + BLOCK): "/scratch/gone"}}
    (tmp_path / "machine").write_text(json.dumps(told))
    assert office(tmp_path, "one").ids("ada").uid == FIRST
    assert office(tmp_path, "two").ids("ada").uid == FIRST + 2 * BLOCK


def test_a_block_whose_numbers_others_use_is_passed_over(tmp_path: Path) -> None:
    made = Uids(
        str(tmp_path / "uids"), is_foreign=lambda n: n < FIRST + BLOCK, blocks=Blocks(str(tmp_path / "machine"))
    )
    assert made.ids("ada").uid == FIRST + BLOCK


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"{}", b'{"version": 2, "blocks": {}}', b'{"version":1,"blocks":{"x":1}}']
)
def test_a_damaged_file_of_blocks_gives_no_number(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "machine").write_bytes(raw)
    with pytest.raises(SubletError, match="is damaged"):
        office(tmp_path, "one").ids("ada")
    assert (tmp_path / "machine").read_bytes() == raw
    assert not (tmp_path / "one" / "uids").exists()


def test_where_the_first_place_cannot_be_written_the_blocks_lie_in_the_second(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = Blocks.of_machine((str(tmp_path / "file" / "uids"), str(tmp_path / "run" / "uids")))
    assert found is not None
    assert Blocks.of_machine((str(tmp_path / "file" / "uids"),)) is None
