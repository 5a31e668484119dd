"""A person's defaults: what the file may say, where it is wrong, and that what is changed keeps the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublet.client.config import KEYS, config_path, read_config, set_config, unset_config
from sublet.errors import InvalidRequest
from sublet.notebook.options import configured, parse_line
from sublet.values import GIB, NS_PER_S, Tier


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUBLET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write(home: Path, text: str) -> Path:
    home.mkdir(mode=0o700, exist_ok=True)
    path = home / "config.toml"
    path.write_text(text)
    return path


def test_without_a_file_nothing_is_set_and_reading_makes_none(home: Path) -> None:
    assert read_config() == {}
    assert str(configured()) == "a device"
    assert not home.exists()


def test_what_is_set_is_what_a_cell_gets_that_says_nothing() -> None:
    for key, value in (
        ("vram", "8G"),
        ("ttl", "10m"),
        ("tier", "spot"),
        ("wait", "1h"),
        ("shared", "true"),
        ("python", "~/env/bin/python"),
    ):
        set_config(key, value)
    mine = configured()
    assert (mine.vram_bytes, mine.ttl_ns, mine.tier, mine.shared) == (8 * GIB, 600 * NS_PER_S, Tier.SPOT, True)
    assert mine.python.endswith("/env/bin/python")
    assert "~" not in mine.python
    kernelspec = parse_line("--tier batch --vram 2GiB", mine)
    cell = parse_line("--vram 1GiB --exclusive", kernelspec)
    assert (cell.vram_bytes, cell.tier, cell.shared, cell.ttl_ns) == (GIB, Tier.BATCH, False, 600 * NS_PER_S)


def test_each_value_knows_its_line_and_a_changed_file_is_read_again(home: Path) -> None:
    write(home, '# mine\n\nvram = "8GiB"   # the small card\nttl = "10m"\n')
    assert {name: one.line for name, one in read_config().items()} == {"vram": 3, "ttl": 4}
    set_config("vram", "16GiB")
    set_config("shared", "true")
    assert Path(config_path()).read_text() == '# mine\n\nvram = "16GiB"\nttl = "10m"\nshared = true\n'
    assert read_config()["vram"].value == "16GiB"
    assert unset_config("ttl")
    assert not unset_config("ttl")
    assert set(read_config()) == {"vram", "shared"}
    assert [path.name for path in home.iterdir()] == ["config.toml"]
    assert home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("text", "says", "do"),
    [
        ('ttl = "5m"\nvran = "8GiB"', ":2: there is no setting 'vran'; did you mean vram?", "There are vram, ttl"),
        ("vram = 8", ":1: the vram 8 has no unit", "Write 8GiB or 8MiB"),
        ('vram = ["8GiB"]', ":1: vram = ['8GiB'] is not a text", 'vram = "..."'),
        ("ttl = true", ":1: ttl = True is not a text", "ttl"),
        ('\n\ntier = "gold"', ":3: there is no tier 'gold'", "interactive, batch, spot"),
        ('shared = "perhaps"', ":1: shared = 'perhaps' is neither true nor false", "true or false"),
        ('python = "python3"', ":1: python = 'python3' is not a whole path", "from / on"),
        ('# x\n[gpu]\nvram = "8GiB"', ":2: there is no setting 'gpu'", "There are"),
        ('gpu.vram = "8GiB"', ":1: there is no setting 'gpu'", "There are"),
        ("vram = 8GiB", " is not TOML: ", 'vram = "8GiB"'),
        ('vram = "1GiB"\nvram = "2GiB"', " is not TOML: ", "lines such as"),
    ],
)
def test_a_mistake_is_refused_with_file_and_line(home: Path, text: str, says: str, do: str) -> None:
    path = write(home, text)
    for ask in (read_config, configured, lambda: set_config("ttl", "1m")):
        with pytest.raises(InvalidRequest) as caught:
            ask()
        assert caught.value.message.startswith(f"{path}{says}")
        assert do in caught.value.do
    assert path.read_text() == text


def test_a_mistake_can_be_unset(home: Path) -> None:
    path = write(home, 'vran = "8GiB"\nttl = "5m"\n')
    assert unset_config("vran")
    assert path.read_text() == 'ttl = "5m"\n'


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vram", "8"),
        ("vram", ""),
        ("ttl", "soon"),
        ("tier", "gold"),
        ("shared", "yes"),
        ("python", "python"),
        ("colour", "red"),
    ],
)
def test_what_makes_no_sense_is_not_written(home: Path, key: str, value: str) -> None:
    with pytest.raises(InvalidRequest):
        set_config(key, value)
    assert not home.exists()


def test_any_path_comes_back_as_it_was_set() -> None:
    path = '/env "of" \\ mine\t/ü/python'
    set_config("python", path)
    assert read_config()["python"].value == path


def test_a_file_that_cannot_be_text_is_refused(home: Path) -> None:
    write(home, "").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_config()
    write(home, "#" * (1 << 17))
    with pytest.raises(InvalidRequest, match="more than 65536 bytes"):
        read_config()


def test_every_setting_is_the_default_of_an_option_of_cells() -> None:
    samples = {"vram": "1GiB", "ttl": "1m", "tier": "spot", "wait": "1m", "python": "/x"}
    for key in KEYS.values():
        parse_line(f"{key.flag} {samples.get(key.name, '')}")
