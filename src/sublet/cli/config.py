"""``sublet config``: shows a person's defaults with their sources, and changes them."""

from __future__ import annotations

from typing import Annotated

from sublet.cli.declare import Arg, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson
from sublet.cli.show import document, table, visible
from sublet.client.config import KEYS, config_path, read_config, set_config, unset_config

ACTIONS = ("show", "set", "unset", "path")


def config(
    *,
    action: Annotated[
        str | None, Arg("ACTION", choices=ACTIONS, help="show, set, unset or path (default: show).")
    ] = None,
    key: Annotated[str | None, Arg("KEY", help="Name of a setting, as `sublet config` lists it.")] = None,
    value: Annotated[str | None, Arg("VALUE", help="New value, such as 8GiB, 10m or true.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show or change your defaults for `%%gpu` and `sublet run`.

    `sublet config` lists all settings with their values and where each is from. `sublet config set KEY VALUE` sets one,
    `sublet config unset KEY` removes it, `sublet config path` prints the file: config.toml in the state folder.

    An option of a command or a cell overrides the kernelspec's, and that overrides these. Programs (`fabric.gpu()`) do
    not use them. No office is needed.
    """
    match action, key, value:
        case None | "show", _, None:
            _show(key, as_json=as_json)
        case "path", None, None:
            print(config_path())
        case "set", str(), str():
            path = set_config(key, value)
            print(f"{key} is {visible(read_config()[key].shown)} now, in {visible(path)}.")
        case "unset", str(), None:
            was_set = unset_config(key)
            default = f": the default is {KEYS[key].default}" if key in KEYS else ""
            print(f"{visible(key)} is {'not set any more' if was_set else 'not set'}{default}.")
        case "set", _, _:
            raise UsageError("`config set` needs a key and a value", do="Write `sublet config set vram 8GiB`.")
        case "unset", _, _:
            raise UsageError("`config unset` needs a key and nothing else", do="Write `sublet config unset vram`.")
        case _:
            raise UsageError(f"`config {action}` takes fewer words", do="See `sublet config --help`.")
    return DONE


def _show(only: str | None, *, as_json: bool) -> None:
    if only is not None and only not in KEYS:
        raise UsageError(f"there is no setting {only!r}", do=f"There are {', '.join(KEYS)}.")
    path, found = config_path(), read_config()
    keys = [key for key in KEYS.values() if only in (None, key.name)]
    if as_json:
        document(
            [
                {
                    "key": key.name,
                    "value": found[key.name].value if key.name in found else None,
                    "default": key.default,
                    "source": f"{path}:{found[key.name].line}" if key.name in found else "default",
                }
                for key in keys
            ]
        )
        return
    rows = []
    for key in keys:
        setting = found.get(key.name)
        value = key.default if setting is None else setting.shown
        rows.append([key.name, value, "default" if setting is None else f"{path}:{setting.line}", key.says])
    print(table(["KEY", "VALUE", "FROM", "MEANING"], rows))
