"""The supervisor stays when everything else goes, so it is small: under 20 MB with 200 guests (which are started in
``tests/integration/test_supervisor_bounds.py``), and without what makes it big."""

from __future__ import annotations

import subprocess
import sys

from sublet.agent.starting import package_folder

MOST_BYTES = 18_000_000
"""Before the first guest."""
BIG = (
    "ast",  # a megabyte, by way of ``inspect``
    "asyncio",
    "concurrent",
    "dis",
    "hashlib",  # a megabyte of names, and libcrypto
    "http",
    "logging",
    "msgspec",
    "random",
    "secrets",
    "selectors",
    "ssl",
    "subprocess",
    "tempfile",
    "tokenize",
    "urllib",
    "weakref",
)
LOOK = """
import sys
sys.path.insert(0, sys.argv[1])
import sublet.supervisor.__main__, sublet.supervisor.service
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("VmRSS")), *sys.modules)
"""


def test_what_it_loads_is_small() -> None:
    """As it is started, without ``site``. The first to load a new checkout compiles it as well, which takes memory."""
    look = [sys.executable, "-I", "-S", "-c", LOOK, package_folder()]
    subprocess.run(look, capture_output=True, check=True, timeout=60)
    words = subprocess.run(look, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    loaded = {name.partition(".")[0] for name in words[1:]}
    assert not loaded.intersection(BIG)
    assert int(words[0]) * 1024 < MOST_BYTES


NAMES = """
import re, sys
sys.path.insert(0, sys.argv[1])
import sublet.supervisor.__main__, sublet.supervisor.service
from sublet.supervisor.stand_in import StandIn
in_place = {name for name, module in sys.modules.items() if isinstance(module, StandIn)}
for module in [module for name, module in sys.modules.items() if name.startswith("sublet.")]:
    with open(module.__file__) as file:
        for name, of in re.findall(r"\\b(copy|inspect|socket|typing)[.]([A-Za-z_]+)", file.read()):
            getattr(sys.modules[name], of)
assert in_place == {"copy", "inspect", "socket", "typing"}, in_place
left = {name for name, module in sys.modules.items() if isinstance(module, StandIn)}
assert left == in_place, f"somebody needed more of {in_place - left}"
"""


def test_nobody_in_the_supervisor_needs_more_of_a_module_than_stands_in_its_place() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", NAMES, package_folder()], check=True, timeout=60)


PLAIN = """
import sys
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "lean":
    import sublet.supervisor.lean
import dataclasses, typing

__name__ = "sublet.plain"  # only our own are lean
sys.modules[__name__] = sys.modules["__main__"]

Name = typing.NewType("Name", str)

@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    name: Name
    number: int = 3
    aside: int = dataclasses.field(default=0, compare=False)
    secret: str = dataclasses.field(default="s", repr=False)

@dataclasses.dataclass
class Open:
    parts: tuple[Name | None, ...] = ()

class Pair(typing.NamedTuple):
    first: int
    second: int = 2

    def both(self): return self.first + self.second

one = Plain(name=Name("a"))
print(one, one == Plain(name="a", aside=4), one == Plain(name="b"), one != "a", one in {Plain(name="a")})
print(Open() == Open(), Open(), Open.__hash__, Pair(1), Pair(1).both(), Pair(1) == (1, 2))
for change in (lambda: setattr(one, "name", "b"), lambda: delattr(one, "name"), lambda: setattr(one, "new", 1)):
    try:
        change()
    except (dataclasses.FrozenInstanceError, TypeError) as error:
        print("refused")
print(dataclasses.replace(one, number=4), dataclasses.fields(one)[1].name, Open.__match_args__)
print({name: str(typing.get_origin(of)) for name, of in typing.get_type_hints(Open).items()})
"""


def test_lean_classes_are_like_any_other() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"from __future__ import annotations\n{PLAIN}", package_folder(), how],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for how in ("lean", "plain")
    ]
    assert said[0] == said[1]
    assert said[0].count("refused") == 3


MORE = """
import sys
sys.path.insert(0, sys.argv[1])
import sublet.supervisor.__main__, sublet.supervisor.service
import dataclasses, inspect

@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    number: int = 3

assert dataclasses.replace(Plain(), number=4).number == 4
assert "tokenize" not in sys.modules
assert inspect.isfunction(len) is False
assert list(inspect.signature(lambda one: one).parameters) == ["one"]
import inspect
assert inspect.getmodulename("/a/b.py") == "b"
"""


def test_whoever_needs_more_of_a_lean_module_gets_all_of_it() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", MORE, package_folder()], check=True, timeout=60)
