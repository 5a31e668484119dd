"""One file per row; each has a ``ROW``, and its goals are stated there."""
