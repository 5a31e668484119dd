"""The pretended socket between an office and its supervisor: in order, whole, and over with its ends."""

from __future__ import annotations

from tests.simulation.link import LocalLink
from tests.simulation.process import Process
from tests.simulation.world import World

_S = 1_000_000_000


class Stage:
    """Two processes and their connection, in a world in which nothing else happens."""

    def __init__(self) -> None:
        self.world = World(0)
        self.office = Process(self.world, "office", self.world.office_clock)
        self.supervisor = Process(self.world, "supervisor", self.world.office_clock)
        self.office.begin()
        self.supervisor.begin()
        self.read: list[int | str] = []
        self.link = LocalLink(
            self.world,
            self.office,
            self.supervisor,
            office_hears_end=lambda _link, _error: self.read.append("office: end"),
            supervisor_hears_end=lambda _link: self.read.append("supervisor: end"),
        )

    def write(self, numbers: range) -> None:
        for number in numbers:
            self.link.to_supervisor(self.read.append, number)

    def pass_time(self) -> None:
        self.world.run_until(self.world.now + 10 * _S)


def test_it_is_read_in_order_also_by_somebody_who_stood_still() -> None:
    stage = Stage()
    stage.write(range(50))
    stage.supervisor.pause(stage.world.now + _S)
    stage.write(range(50, 100))
    stage.pass_time()
    assert stage.read == list(range(100))


def test_what_a_dead_office_wrote_is_read_up_to_some_point_and_then_comes_the_end() -> None:
    lengths = set()
    stage = Stage()
    for _ in range(30):
        stage.read = []
        stage.link = LocalLink(
            stage.world,
            stage.office,
            stage.supervisor,
            office_hears_end=lambda _link, _error: None,
            supervisor_hears_end=lambda _link: stage.read.append("end"),
        )
        stage.write(range(4))
        stage.link.office_ends()
        stage.write(range(4))
        stage.pass_time()
        assert stage.read[-1] == "end"
        assert stage.read[:-1] == list(range(len(stage.read) - 1))
        lengths.add(len(stage.read) - 1)
    assert lengths == {0, 1, 2, 3, 4}


def test_nothing_is_read_by_whoever_let_go() -> None:
    stage = Stage()
    stage.link.to_office(stage.read.append, "to the office")
    stage.link.office_ends()
    stage.pass_time()
    assert stage.read == ["supervisor: end"]


def test_a_broken_link_is_over_at_both_ends() -> None:
    stage = Stage()
    stage.link.break_()
    stage.pass_time()
    assert sorted(map(str, stage.read)) == ["office: end", "supervisor: end"]
