"""Packs, manifests and stores, and ``Durable``, the value that is saved in them.

A *save* (``writer``) writes the chunks that changed into an immutable pack and a small manifest beside it;
*publication* (``store``) makes both a checkpoint, which a ``reader`` opens.

Importing this package loads none of that: import the module that is needed.
"""
