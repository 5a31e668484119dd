"""Sessions: a person's GPU work that outlives its leases; and the studio, which serves them to many people.

``sublet session`` and ``SUBLET_SESSION`` stand on this; it uses the public API of the office and no other way in.
"""

# General layout: states (the table) · records (values and their fold) · store (records on disk) · remote (records that
# a studio keeps) · sessions (what is done with them, step by step) · office (the public API, as sessions use it) ·
# views (sessions as documents) · cell_bill (a line for each cell) · session_bill (as a document, some lines at a time)
# · drawing (the table in the docs). For many people: people (who, and their tokens) · right (the studio's own, at the
# office) · roster (a list of them) · service (the sessions of each) · look (the office, read once for all open pages) ·
# open_pages (which of them have changed) · overview (the office, for operators) · presence (who is connected) · api
# (what programs ask) · web (the API and the pages over HTTP) · page, overview_page and course_page (the pages as text)
# · plan (what the planner found for a course) · config (its settings) · metrics (its numbers). With a JupyterHub: hub
# (for the hub's own configuration) · hub_api (what is asked of the hub) · hub_people (its users here, and their
# servers). A program behind HTTP: serving (the table and the rules) · serve (its driver).

from __future__ import annotations

from sublet.studio.office import VARIABLE, FabricOffice, NotebookSession, are_recorded, is_of_session, open_sessions
from sublet.studio.records import CellRecord, LeaseRecord, Session, Terms
from sublet.studio.sessions import Seen, Sessions
from sublet.studio.states import SessionEnd, SessionState

__all__ = [
    "VARIABLE",
    "CellRecord",
    "FabricOffice",
    "LeaseRecord",
    "NotebookSession",
    "Seen",
    "Session",
    "SessionEnd",
    "SessionState",
    "Sessions",
    "Terms",
    "are_recorded",
    "is_of_session",
    "open_sessions",
]
