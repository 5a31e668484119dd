"""What a lease has on a machine, as far as files go: made for its guests, and taken away without keeping others."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sublet.supervisor.cgroups import Groups
from sublet.supervisor.tenancy import AT_ONCE_MAX, Tenancy
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.page import PageWriter


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


def test_without_its_page_no_guest_starts_and_the_next_one_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest that cannot see its lease must not run: the folder alone is not enough."""

    def full(*_: object, **__: object) -> PageWriter:
        raise OSError(errno.ENOSPC, "no space")

    tenancy = Tenancy(
        lease=LeaseId("l-1"), tenant=TenantId("t"), epoch=Epoch(1, 2), parts=(), deadline_ns=9, office="o", name=""
    )
    with monkeypatch.context() as patched:
        patched.setattr(PageWriter, "create", full)
        for _ in range(2):
            with pytest.raises(OSError, match="no space"):
                tenancy.open(str(tmp_path), NoGroups(), 1, lambda _: ())
    tenancy.open(str(tmp_path), NoGroups(), 1, lambda _: ())
    assert Path(tenancy.page_path).stat().st_size == 4096
    assert tenancy.close(NoGroups(), list[str]().append) == []
    assert not any(tmp_path.iterdir())
