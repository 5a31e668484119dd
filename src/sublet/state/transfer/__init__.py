"""Python values as bytes and buffers, and back; what of them changed; shared memory; what cannot travel, and why.

A *value* is encoded (``codec``) into a head and the buffers it refers to, which stay where they are. The *change
finder* (``changes``) says which chunks of them differ from the last look. ``loading`` is the only place where bytes
become objects again, and runs in a guest or in the holder's own process, nowhere else.

Importing this package loads none of that: import the module that is needed.
"""
