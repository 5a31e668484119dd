"""An operator's token is not root's pen: what it can have written lies in one folder of the office's."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublet.errors import Unauthorized
from tests.security.conftest import Place


def test_an_operators_token_makes_backups_in_one_folder_and_no_other_file(place: Place, tmp_path: Path) -> None:
    """The office may be root's, and a file of root's anywhere is all the rights there are."""
    token = place.owner.request("POST", "/v1/tenants", {"id": "op", "operator": True}, shape=dict)["token"]
    folder, elsewhere = place.home.resolve() / "backups", "/etc/profile.d/sublet-backup.sh"
    names = (
        elsewhere,
        "/etc/passwd",
        str(tmp_path / "copy.db"),
        *(f"{folder}{end}" for end in ("", "/..", "x/copy.db")),
    )
    with place.connect(token) as operator:
        for name in (*names, f"{folder}/below/copy.db", f"{folder}/../copy.db"):
            with pytest.raises(Unauthorized, match=str(folder)) as told:
                operator.request("POST", "/v1/backup", {"path": name}, shape=dict)
            assert "exist" not in told.value.message, "nor is it told what exists"
        made = operator.request("POST", "/v1/backup", {"path": f"{folder}/copy.db"}, shape=dict)
        for given in ({"new_token": True}, {"quota": {"gpus": 0}}, {"weight": 2}):
            with pytest.raises(Unauthorized):  # with the owner's own token it could write anywhere after all
                operator.request("PATCH", "/v1/tenants/local", given, shape=dict)
    assert not Path(elsewhere).exists()
    assert made["bytes"] == (folder / "copy.db").stat().st_size
    assert folder.stat().st_mode & 0o777 == 0o700
