"""The planner: a workload on the real ledger with a held clock, beside simple models of what others do.

``workload`` makes or reads sessions of cells; ``replay`` runs them through a ``Ledger`` as holders and agents would;
``peers`` runs them on whole-session reservation and on batch queues; ``results`` is what is reported of either;
``find`` looks for the number of GPUs that reaches a goal; ``plots`` draws. The ledger decides, and no formula of
queueing theory stands in for it.
"""
