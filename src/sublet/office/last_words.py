"""The line that an office prints when it ends itself: what happened, and what to do."""

from __future__ import annotations

from sublet.errors import JournalFailed


def of_journal(error: Exception) -> str:
    """What was decided could not be made durable."""
    what = error.message if isinstance(error, JournalFailed) else f"its journal could not be written ({error})"
    return f"the office stopped: {what}; nothing was answered on it\n  {JournalFailed.default_do}"


def of_ledger(error: Exception) -> str:
    """A command was not decided, and the state may be half-way through a change."""
    return f"the office stopped: the ledger failed on a command ({type(error).__name__}: {error})"


def of_agent(error: Exception) -> str:
    """What was decided could not be ordered."""
    return f"the office stopped: its agent failed ({type(error).__name__}: {error})"
