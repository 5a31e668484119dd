"""The settings that notebook and device keep equal: each setting, and how its library reads and sets it.

One row for each setting. A row names the module it belongs to: nothing is read or set before that is imported. What a
row reads is plain data or something that can be pickled; what it writes goes through the library's own setter. The
rows of docs/notebook.md are compared with these by a test.

Libraries add rows of their own through the entry-point group ``sublet.settings``. The entry point's object has
``settings`` and ``generators``, or one of them: each maps a key to a pair of functions, one that returns the present
value and one that sets it. They are looked for when this module is imported, which warm interpreters have done.
"""

from __future__ import annotations

from sublet.notebook.settings.process import own_paths
from sublet.notebook.settings.setting import Setting, SettingKind
from sublet.notebook.settings.table import documented, library_settings, table, written

__all__ = ["Setting", "SettingKind", "documented", "library_settings", "own_paths", "table", "written"]
