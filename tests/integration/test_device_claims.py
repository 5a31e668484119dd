"""Two offices, one declared namespace: what one has the other shows as taken, and takes up when it is free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sublet.node.agent.inventory import machine_inventory, parse_host_gpus
from sublet.node.supervisor.locks import PREFIX, Claims, DeviceLocks
from sublet.values import GIB, ResourceId
from sublet.wire.orders import Foreign, Inventory

Make = Callable[[str], Claims]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda home: Claims(DeviceLocks(home, folder=str(tmp_path), roots=None))


def declared(folder: Path, text: str) -> Inventory:
    return machine_inventory(folder, parse_host_gpus(text))


def told(reports: list[Foreign]) -> dict[str, str]:
    return {report.resource: report.detail for report in reports}


def test_the_second_office_shows_what_the_first_has_and_lends_the_rest(tmp_path: Path, make: Make) -> None:
    first, second = make("/srv/ada"), make("/srv/ben")
    assert set(told(first.configure(declared(tmp_path, "1x1GiB@lab"))).values()) == {""}
    reports = second.configure(declared(tmp_path, "2x4GiB@lab"))
    taken, free = reports
    assert (taken.resource, taken.amount, taken.blocks) == ("local/lab-gpu0", 4 * GIB, True)
    assert taken.detail.startswith("host-lab-0 is lent by the office of ")
    assert "/srv/ada" in taken.detail
    assert (free.resource, free.amount, free.blocks) == ("local/lab-gpu1", 0, False)
    assert second.again() == [], "nothing changed"
    first.close()
    assert told(second.again()) == {"local/lab-gpu0": ""}
    second.close()


def test_devices_of_the_office_alone_need_no_lock(tmp_path: Path, make: Make) -> None:
    claims = make("/srv/ada")
    assert claims.configure(declared(tmp_path, "2x4GiB")) == []
    assert claims.again() == []
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_without_an_office_only_what_is_not_clean_yet_is_kept_from_others(tmp_path: Path, make: Make) -> None:
    """A supervisor that waits for one card in quarantine kept all of them, for an office that had ended."""
    first, second = make("/srv/ada"), make("/srv/ben")
    first.configure(declared(tmp_path, "2x4GiB@lab"))
    first.keep_only({ResourceId("local/lab-gpu0")})
    assert first.again() == []
    kept, free = second.configure(declared(tmp_path, "2x4GiB@lab"))
    assert ("/srv/ada" in kept.detail, free.detail) == (True, "")
    _, others = first.configure(declared(tmp_path, "2x4GiB@lab"))
    assert "/srv/ben" in others.detail, "the next office hears who has it"
    first.keep_only(set())
    assert told(second.again()) == {"local/lab-gpu0": ""}
    assert first.again() == [], "nor does it wait for what others have"
    first.close()
    second.close()


def test_what_is_no_longer_in_the_inventory_is_let_go(tmp_path: Path, make: Make) -> None:
    first, second = make("/srv/ada"), make("/srv/ben")
    first.configure(declared(tmp_path, "2x4GiB@lab"))
    first.configure(declared(tmp_path, "1x4GiB@lab"))
    assert list(told(second.configure(declared(tmp_path, "2x4GiB@lab"))).values())[1] == ""
    first.close()
    second.close()


def test_a_lock_that_was_lost_is_said_and_what_cannot_be_locked_is_not_lent(tmp_path: Path, make: Make) -> None:
    first, second = make("/srv/ada"), make("/srv/ben")
    first.configure(declared(tmp_path, "1x4GiB@lab"))
    [file] = tmp_path.glob(f"{PREFIX}*")
    file.unlink()
    second.configure(declared(tmp_path, "1x4GiB@lab"))
    assert "/srv/ben" in told(first.again())["local/lab-gpu0"]
    second.close()
    assert told(first.again()) == {"local/lab-gpu0": ""}
    file.unlink()
    file.symlink_to("/dev/null")
    assert "cannot be opened" in told(first.again())["local/lab-gpu0"]
    first.close()
