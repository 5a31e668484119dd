"""State that survives a process: values as bytes and buffers, change detection, packs and manifests, ``Durable``.

A *value* is encoded (``codec``) into a head and the buffers it refers to, which stay where they are. The *change
finder* (``changes``) says which chunks of them differ from the last look. A *save* (``packs``) writes those chunks into
an immutable pack and a small manifest beside it; *publication* (``files``) makes both a checkpoint. ``loading`` is the
only place where bytes become objects again, and runs in a guest or in the holder's own process, nowhere else.

Importing this package loads none of that: import the module that is needed.
"""

from __future__ import annotations

__all__: list[str] = []
