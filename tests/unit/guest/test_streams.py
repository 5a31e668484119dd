"""What a function says: whole lines at once, in order, to the holder and to the log."""

from __future__ import annotations

import io
import logging
import threading

from sublet.guest.streams import Speech, SpokenRecords, WorkerStream
from sublet.wire.log_records import load_log_record
from tests.traces import PATIENCE_S


class Heard:
    def __init__(self) -> None:
        self.said: list[tuple[int, str]] = []
        self.log = io.StringIO()
        self.speech = Speech()
        self.out, self.err = WorkerStream(1, self.log, self.speech), WorkerStream(2, self.log, self.speech)

    def send(self, stream: int, text: bytes) -> None:
        self.said.append((stream, text.decode()))


def test_lines_go_at_once_and_in_order() -> None:
    heard = Heard()
    heard.speech.to(heard.send)
    print("one", file=heard.out)
    print("a", end="", file=heard.out)
    print("two", file=heard.err)
    print("b", file=heard.out)
    print("rest", end="", file=heard.out)
    assert heard.said == [(1, "one\n"), (1, "a"), (2, "two\n"), (1, "b\n")]
    heard.speech.to(None)
    assert heard.said[-1] == (1, "rest")
    assert heard.log.getvalue() == "one\natwo\nb\nrest"


def test_outside_of_calls_there_is_the_log_alone() -> None:
    heard = Heard()
    print("nobody hears it", file=heard.out)
    assert heard.log.getvalue() == "nobody hears it\n"
    heard.speech.to(heard.send)
    assert heard.said == []


def test_progress_bars_and_large_texts() -> None:
    heard = Heard()
    heard.speech.to(heard.send)
    heard.err.write("\r50%")
    assert heard.said == [(2, "\r50%")]
    heard.out.write("x" * 200_000)
    heard.out.flush()
    assert "".join(text for stream, text in heard.said if stream == 1) == "x" * 200_000
    assert max(len(text) for _, text in heard.said) <= 64 * 1024


def test_it_is_a_stream_like_another() -> None:
    heard = Heard()
    heard.speech.to(heard.send)
    heard.out.writelines(["a\n", "b\n"])
    heard.out.buffer.write(b"c\n")
    assert not heard.out.isatty()
    assert heard.out.writable()
    heard.out.close()
    print("still", file=heard.out)
    assert "".join(text for _, text in heard.said) == "a\nb\nc\nstill\n"


def test_records_are_put_together_where_they_were_made() -> None:
    log = io.StringIO()
    sent: list[bytes] = []
    records = SpokenRecords(log)
    records.send = sent.append
    logger = logging.getLogger("of.theirs")
    logger.addHandler(records)
    logger.propagate = False
    logger.warning("careful: %s", "x", extra={"lock": threading.Lock()})
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        logger.exception("it failed")
    logger.removeHandler(records)
    first, second = (logging.makeLogRecord(load_log_record(one)) for one in sent)
    assert (first.name, first.getMessage(), first.levelno) == ("of.theirs", "careful: x", logging.WARNING)
    assert "lock" in first.__dict__["lock"], "what is no plain value is told in words"
    assert "ZeroDivisionError" in (second.exc_text or "")
    assert "WARNING:of.theirs:careful: x" in log.getvalue()


def test_in_a_fork_nothing_is_sent_any_more() -> None:
    heard = Heard()
    heard.speech.to(heard.send)
    print("half a line", end="", file=heard.out)
    heard.speech._lock.acquire()  # as another thread of the parent has it
    heard.speech.forget()
    teller = threading.Thread(target=lambda: print("from the fork", file=heard.out), daemon=True)
    teller.start()
    teller.join(PATIENCE_S)
    assert not teller.is_alive()
    assert heard.said == []
    assert heard.log.getvalue() == "half a linefrom the fork\n"
