"""What a lease has on a machine, as far as files go: made for its guests, and taken away without keeping others."""

from __future__ import annotations

from pathlib import Path

from sublet.supervisor.cgroups import Groups
from sublet.supervisor.tenancy import AT_ONCE_MAX, Tenancy
from sublet.values import Epoch, LeaseId, TenantId


class NoGroups(Groups):
    """A machine without control groups."""

    def __init__(self) -> None:
        pass

    def group(self, *_: object) -> None:
        return None


def opened(place: Path) -> Tenancy:
    made = Tenancy(
        lease=LeaseId("l-1"), tenant=TenantId("t"), epoch=Epoch(1, 2), parts=(), deadline_ns=9, office="o", name=""
    )
    made.open(str(place), NoGroups(), 1, lambda _: ())
    return made


def test_its_folder_goes_with_it(tmp_path: Path) -> None:
    tenancy, aside = opened(tmp_path), list[str]()
    (tmp_path / "l-1.1.2/tmp/file").touch()
    assert tenancy.close(NoGroups(), aside.append) == []
    assert not any(tmp_path.iterdir())
    assert aside == []


def test_a_folder_that_nobody_can_wait_for_is_put_away(tmp_path: Path) -> None:
    tenancy, aside = opened(tmp_path), list[str]()
    folder = tmp_path / "l-1.1.2"
    for number in range(AT_ONCE_MAX + 100):
        (folder / f"tmp/{number}").touch()
    assert tenancy.close(NoGroups(), aside.append) == [str(folder)], "as long as it lies there it is in the way"
    assert aside == [str(folder)]
