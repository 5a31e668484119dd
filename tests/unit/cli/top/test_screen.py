"""Whatever an office says and however large the terminal is: a screen fits, shows nothing that a terminal obeys, and
what is written to a terminal makes it show just that."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.cli.top.paint import Painting, changes, painting, simple, styled
from sublet.cli.top.rows import _by
from sublet.cli.top.screen import COLUMNS_MIN, ROWS_MIN, ScreenView, keys, screen, view_after_key, whole
from sublet.cli.top.snapshot import ENDED_SHOWN_S, EndedLease, OfficeSnapshot, apply_news, merged
from sublet.cli.top.text import Line, StyledSpan, age, bar, cells, clipped, fit, plain, size, width_of
from tests.examples import examples
from tests.transcripts.top import scenes

TEXT: Final = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["\x1b[2J", "深層学習" * 9, "e\u0301" * 20, "\u0301", "\u202e\u2066", "\ud800", "🦊" * 30, "\r\n\t", ""]
    ),
)
NUMBER: Final = st.one_of(st.integers(-10, 10**18), st.sampled_from([0, 1, 1 << 40]))
SECONDS: Final = st.floats(-1e9, 1e12) | st.just(0.0)
MAYBE_S: Final = st.none() | SECONDS
REASON: Final = st.fixed_dictionaries({"reason": TEXT, "at": TEXT, "detail": TEXT})
KIND: Final = st.sampled_from(["gpu", "cpu", "memory", "block", "tape"])
WANT: Final = st.fixed_dictionaries({"kind": KIND, "amount": NUMBER, "count": st.integers(1, 9)})
PART: Final = st.fixed_dictionaries(
    {"resource": TEXT, "kind": KIND, "amount": NUMBER, "model": TEXT, "host": st.booleans()}
)
LEASE: Final = st.builds(
    scenes.lease,
    st.integers(0, 20),
    tenant=TEXT,
    status=st.sampled_from(["queued", "granted", "active", "noticed", "ending", "ended"]) | TEXT,
    tier=TEXT | st.just("spot"),
    name=st.none() | TEXT,
    holder=TEXT,
    ttl=SECONDS,
    remaining=MAYBE_S,
    claim_within=MAYBE_S,
    idle=st.booleans(),
    wants=st.lists(WANT, max_size=3),
    parts=st.lists(PART, max_size=3),
    asked_at=TEXT | st.just(scenes.ASKED),
    notice=st.none() | st.builds(lambda reason, s: {**reason, "in_seconds": s}, REASON, SECONDS),
    end=st.none() | REASON,
)
GUEST: Final = st.builds(
    scenes.guest,
    st.integers(0, 99),
    st.integers(0, 25),
    argv=st.lists(TEXT, max_size=4),
    name=TEXT,
    state=TEXT | st.just("running"),
    pid=NUMBER,
    processes=NUMBER,
    started_at=st.none() | TEXT | st.just(scenes.ASKED),
    exit_code=st.none() | st.integers(0, 255),
    reason=st.none() | TEXT,
    cpu=SECONDS,
    peak_bytes=st.integers(0, 10**18),
)
DEVICE: Final = st.builds(
    scenes.device,
    TEXT,
    NUMBER,
    NUMBER,
    kind=KIND,
    model=TEXT,
    host=st.booleans(),
    state=st.sampled_from(["free", "quarantined", "lost", "draining"]) | TEXT,
    detail=TEXT,
    leases=st.lists(st.integers(0, 25).map(lambda n: f"l-{n:016x}"), max_size=4),
)
PLACE: Final = st.builds(scenes.place, st.integers(0, 20), st.integers(1, 99), TEXT, MAYBE_S, tenant=TEXT)
TENANT: Final = st.builds(scenes.tenant, TEXT, SECONDS, NUMBER, NUMBER, operator=st.booleans())
BILL: Final = st.builds(scenes.bill, TEXT, SECONDS, st.floats(-1e12, 1e12))
FENCE: Final = st.fixed_dictionaries({"resource": TEXT, "lease": st.none() | TEXT})


def some(of: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[Any]:
    return st.lists(of, max_size=most).map(tuple)


SNAPSHOT: Final = st.builds(
    scenes.snapshot,
    status=st.fixed_dictionaries(
        {"devices": some(DEVICE), "home": TEXT, "uptime": SECONDS, "pid": NUMBER, "quarantined": st.integers(0, 3)}
    ),
    leases=some(LEASE, 8),
    queue=some(PLACE),
    guests=st.none() | some(GUEST, 8),
    tenants=st.none() | some(TENANT),
    fences=st.none() | some(FENCE),
    bill=some(BILL),
    ended=some(st.builds(EndedLease, SECONDS, LEASE), 3),
    lost_s=st.none() | SECONDS,
    lost_why=TEXT,
)
LOOK: Final = st.builds(
    ScreenView, st.sampled_from(["devices", "leases", "queue", "tenants", "x"]), st.integers(0, 10**9)
)


@settings(max_examples=examples(20))
@given(SNAPSHOT, LOOK, st.integers(COLUMNS_MIN, 250), st.integers(ROWS_MIN, 70), SECONDS)
def test_any_snapshot_fits_any_terminal(
    known: OfficeSnapshot, look: ScreenView, columns: int, rows: int, now_s: float
) -> None:
    made = screen(known, look, columns, rows, now_s)
    assert len(made.lines) == rows
    assert made.look.at in made.parts
    for line in (*made.lines, *whole(known, columns, now_s)):
        assert sum(width_of(span.text) for span in line) <= columns
        assert_harmless("".join(span.text for span in line))


@settings(max_examples=examples(10))
@given(SNAPSHOT, LOOK, st.integers(1, 39), st.integers(1, 12))
def test_a_terminal_that_is_far_too_small_gets_what_fits(
    known: OfficeSnapshot, look: ScreenView, columns: int, rows: int
) -> None:
    made = screen(known, look, columns, rows, 0.0)
    assert len(made.lines) == rows
    assert all(sum(width_of(span.text) for span in line) <= columns for line in made.lines)


@settings(max_examples=examples(20))
@given(SNAPSHOT, SNAPSHOT, st.integers(40, 120), st.integers(10, 30), st.booleans())
def test_what_is_written_makes_the_terminal_show_it(
    one: OfficeSnapshot, other: OfficeSnapshot, columns: int, rows: int, colour: bool
) -> None:
    """From nothing, from another screen, and from itself (which takes not a byte)."""
    terminal = Terminal(rows, columns)
    shown: Painting | None = None
    for known in (one, other, other):
        now = painting(screen(known, ScreenView(), columns, rows, 0.0).lines, colour=colour)
        said = changes(shown, now)
        assert shown != now or not said
        terminal.write(said)
        assert terminal.grid == padded(now, columns)
        shown = now


def test_a_second_of_an_ordinary_afternoon_costs_few_bytes() -> None:
    frames = [painting(screen(scenes.three(), ScreenView(), 200, 24, 100.0 + s).lines, colour=True) for s in (3, 4)]
    assert 0 < len(changes(*frames)) < 300
    assert len(changes(None, frames[0])) > 1500


def assert_harmless(text: str) -> None:
    assert not [letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")], text


class Terminal:
    """As much of one as is used here; what it does not know is an error."""

    def __init__(self, rows: int, columns: int) -> None:
        self.grid = [[(" ", "")] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._style = ""

    def write(self, text: str) -> None:
        for code, letter in re.findall(r"\x1b\[([0-9;]*[A-Za-z])|([^\x1b])", text):
            if letter:
                self._put(letter)
            elif code[-1] == "H":
                row, column = code[:-1].split(";")
                self._row, self._column = int(row) - 1, int(column) - 1
            elif code == "K":
                line = self.grid[self._row]
                line[self._column :] = [(" ", "")] * (len(line) - self._column)
            elif code == "2J":
                self.grid = [[(" ", "")] * len(line) for line in self.grid]
            else:
                assert code[-1] == "m", code
                self._style = "" if code == "0m" else code[:-1]

    def _put(self, letter: str) -> None:
        line = self.grid[self._row]
        for at, cell in enumerate(cells("x" + letter)[1:] or [letter]):
            if cell and unicodedata.category(cell[0]) in ("Mn", "Me"):
                before = self._column - (2 if line[self._column - 1][0] == "" else 1)
                line[before] = (line[before][0] + cell, line[before][1])
                return
            line[self._column] = (cell, self._style)
            self._column += 1
            assert self._column <= len(line) + at


def padded(lines: Painting, columns: int) -> list[list[tuple[str, str]]]:
    codes = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
    found = []
    for line in lines:
        made = [(letter, ";".join(codes[word] for word in style.split())) for letter, style in line]
        found.append(made + [(" ", "")] * (columns - len(made)))
    return found


# ---- pieces ----


@given(TEXT, st.integers(0, 40), st.booleans())
def test_a_fitted_text_has_exactly_that_width(text: str, width: int, right: bool) -> None:
    assert width_of(fit(text, width, right=right)) == width
    assert width_of(clipped(text, width)) <= width
    assert len(cells(text)) == width_of(clipped(text, 10_000))


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("hello", 5, "hello"),
        ("hello", 4, "hel…"),
        ("hello", 0, ""),
        ("深層", 4, "深層"),
        ("深層", 3, "深…"),
        ("深層", 2, " …"),
        ("cafe\u0301s", 4, "caf…"),
        ("cafe\u0301", 4, "cafe\u0301"),
        ("a\x1b[2J", 9, "a·[2J"),
        ("\u0301x", 9, "·x"),
        ("z\u0335\u0321\u0322\u0327", 9, "z\u0335\u0321"),
        ("深\u0301", 9, "深\u0301"),
    ],
)
def test_text_is_cut_between_letters(text: str, width: int, shown: str) -> None:
    assert clipped(text, width) == shown


@pytest.mark.parametrize(
    ("amount", "said"),
    [(0, "0B"), (999, "999B"), (1000, "1KiB"), (1 << 30, "1GiB"), (1300 << 20, "1.3GiB"), (139 << 30, "139GiB")],
)
def test_sizes_are_short(amount: int, said: str) -> None:
    assert size(amount) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(None, "-"), (-3.0, "0s"), (0.4, "0s"), (9.9, "9s"), (250.0, "4m 10s"), (86400.0 * 3, "3d")]
)
def test_ages_are_whole_seconds(seconds: float | None, said: str) -> None:
    assert age(seconds) == said


@pytest.mark.parametrize(
    ("part", "shown"),
    [(0, "░░░░"), (0.01, "█░░░"), (0.5, "██░░"), (0.99, "███░"), (1, "████"), (7, "████"), (-1, "░░░░")],
)
def test_a_bar_is_never_full_or_empty_by_rounding(part: float, shown: str) -> None:
    assert plain(bar(part, 4)) == shown


def test_a_bar_of_what_is_no_number_is_drawn_all_the_same() -> None:
    assert len(plain(bar(math.inf, 4))) == 4


def test_what_a_terminal_cannot_show_is_replaced() -> None:
    assert simple("██░ … ×2 ↑", "ascii") == "##. ~ x2 ^"
    assert simple("深", "ascii") == "?"
    assert simple("█", "utf-8") == "█"


def test_without_colour_a_line_is_plain_text() -> None:
    line: Line = (StyledSpan("a", "bold red"), StyledSpan(" b "))
    assert styled(line, colour=False) == "a b"
    assert styled(line, colour=True) == "\x1b[1;31ma\x1b[0m b"


# ---- looking around ----


def test_what_is_lost_is_grey_but_for_the_head_and_the_foot() -> None:
    lines = screen(scenes.lost(), ScreenView(), 120, 30, 130.0).lines
    assert {span.style for line in lines[1:-1] for span in line} == {"dim"}
    assert "No answer for 18s" in plain(lines[0])
    assert "bold red" in {span.style for span in lines[0]}


def test_scrolling_reaches_every_lease_and_the_end_stays() -> None:
    seen: set[str] = set()
    known, look, ends = scenes.crowd(), ScreenView(), False
    while not ends:
        made = screen(known, look, 80, 24, 100.0)
        seen |= {found for line in made.lines for found in re.findall(r"^l-\w{16}", plain(line))}
        ends = made.look.scroll < look.scroll
        assert view_after_key(made, "top") == ScreenView()
        look = view_after_key(made, "page down")
    assert len(seen) == 103


def test_tab_goes_round_all_parts() -> None:
    made = screen(scenes.three(), ScreenView(), 80, 24, 100.0)
    seen = []
    for _ in range(5):
        seen.append(made.look.at)
        made = screen(scenes.three(), view_after_key(made, "next"), 80, 24, 100.0)
    assert seen == ["leases", "queue", "tenants", "devices", "leases"]
    assert view_after_key(made, "previous").at == "leases"


def test_the_leases_of_a_burst_are_one_line_unless_there_is_more_to_say_of_one() -> None:
    labels = {"program": "burst", "job": "pi"}
    part = {"resource": "local/cpu", "kind": "cpu", "amount": 1, "model": "", "host": True}
    burst = [
        scenes.lease(n, labels=labels, tier="batch", parts=[part], remaining=remaining)
        for n, remaining in ((1, 90.0), (2, 60.0), (3, 100.0))
    ]
    notice = {"reason": "preempted", "detail": "", "in_seconds": 9.0}
    taken = scenes.lease(4, labels=labels, tier="batch", parts=[part], status="noticed", notice=notice)
    guests = [scenes.guest(n, n) for n in (1, 2, 3, 4)]
    known = scenes.snapshot(leases=[*burst, taken, scenes.lease(5, name="mine")], guests=guests)
    lines = [plain(line) for line in screen(known, ScreenView(), 160, 40, 100.0).lines]
    (one,) = [line for line in lines if "3 leases  " in line]
    assert "3 cores of local/cpu" in one
    assert "1m" in one
    assert "burst pi" in one
    assert sum("burst pi" in line for line in lines) == 2
    assert any("NOTICE" in line and "burst pi" in line for line in lines)
    assert any("LEASES (5)" in line for line in lines)
    assert sum("└" in line for line in lines) == 1, "the workers of the burst are not listed"


def test_ten_thousand_leases_are_counted_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    from sublet.cli.top import rows

    drawn = []
    real = rows._lease

    def counted(*asked: Any, **more: Any) -> Any:
        drawn.append(asked)
        return real(*asked, **more)

    monkeypatch.setattr(rows, "_lease", counted)
    known = scenes.snapshot(leases=[scenes.lease(n) for n in range(10_000)])
    lines = screen(known, ScreenView(), 80, 24, 100.0).lines
    assert len(drawn) < 100
    assert any("more leases" in plain(line) for line in lines)


@pytest.mark.parametrize(
    ("typed", "meant", "rest"),
    [
        (b"q", ["quit"], b""),
        (b"\x03", ["interrupt"], b""),
        (b"jjk", ["down", "down", "up"], b""),
        (b"\x1b[A\x1b[B", ["up", "down"], b""),
        (b"\x1bOA\x1b[5~\x1b[6~", ["up", "page up", "page down"], b""),
        (b"\x1b[Z\t", ["previous", "next"], b""),
        (b"\x1b", [], b"\x1b"),
        (b"\x1b[", [], b"\x1b["),
        (b"\x1b[5", [], b"\x1b[5"),
        (b"\x1bq", ["quit"], b""),
        (b"\x1b[1;5A", [], b""),
        (b"ABHFZ5~xyz\xff\xc3\xa9", [], b""),
        (b"\x1b[" + b"1" * 99, [], b""),
        (b"\x1b[200~q\x1b[201~", ["quit"], b""),
        (b"", [], b""),
    ],
)
def test_keys_are_understood_also_in_pieces(typed: bytes, meant: list[str], rest: bytes) -> None:
    assert keys(typed) == (meant, rest)


@given(st.binary(max_size=60), st.integers(0, 60))
def test_keys_mean_the_same_however_they_are_cut(data: bytes, at: int) -> None:
    first, rest = keys(data[:at])
    second, left = keys(rest + data[at:])
    assert len(left) <= 32
    if not rest or len(rest + data[at:]) <= 32:
        assert (first + second, left) == keys(data)


# ---- news ----


def test_news_count_from_when_they_came() -> None:
    """A snapshot of moment 100; at 104 a lease is granted for 300 s, so at 110 there are 294 left."""
    known = apply_news(scenes.snapshot(), "active", {"lease": scenes.lease(1, remaining=300.0)}, 104.0)
    assert "4m 54s" in "".join(plain(line) for line in screen(known, ScreenView(), 80, 24, 110.0).lines)


def test_an_end_is_shown_for_a_while_with_its_reason() -> None:
    end = {"reason": "fair_share", "at": scenes.ASKED, "detail": ""}
    known = scenes.snapshot(leases=[scenes.lease(1)])
    known = apply_news(known, "ended", {"lease": scenes.lease(1, status="ended", remaining=None, end=end)}, 101.0)
    assert known.leases == ()
    fresh = scenes.snapshot(at_s=102.0)
    known = merged(known, fresh)
    assert "ended: fair_share" in "".join(plain(line) for line in whole(known, 80, 102.0))
    later = merged(known, fresh._replace(at_s=101.0 + ENDED_SHOWN_S))
    assert later.ended == ()


def test_what_is_not_read_every_time_is_kept() -> None:
    known = scenes.three()
    kept = merged(known, known._replace(bill=(), tenants=None, fences=None, at_s=102.0))
    assert (kept.bill, kept.tenants, kept.at_s) == (known.bill, known.tenants, 102.0)


@settings(max_examples=examples(20))
@given(SNAPSHOT, st.sampled_from(["place", "active", "ended", "notice", "lagged", "node", "weather"]), LEASE, PLACE)
def test_any_news_can_be_heard(known: OfficeSnapshot, what: str, lease: dict[str, Any], place: dict[str, Any]) -> None:
    news = place if what == "place" else {"lease": lease}
    after = apply_news(known, what, news, 3.0)
    screen(after, ScreenView(), 80, 24, 4.0)
    if what in ("lagged", "node", "weather"):
        assert after == known


def test_what_no_lease_explains_is_somebody_elses_or_kept() -> None:
    """A disk keeps volumes that are under no lease."""
    device = {"kind": "gpu", "leases": [], "state": "free", "free": 1, "capacity": 2, "detail": ""}
    assert _by(device, {}) == "others"
    assert _by({**device, "kind": "block"}, {}) == "volumes"
    assert _by({**device, "leases": ["l-1", "l-2", "l-3"]}, {"l-1": "ana", "l-2": "ana"}) == "?, ana ×2"
