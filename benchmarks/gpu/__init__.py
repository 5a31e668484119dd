"""Figures that need a real GPU: ``python -m benchmarks.gpu`` measures all of them, each beside its peer in one run.

It needs a driver, cuda-bindings, torch and numpy; no office. The results are written to ``benchmarks/results/gpu.json``
and ``gpu.md``. With ``SUBLET_GPU_MIB=16`` it is a short form, to see that all of it runs: nothing is written.
"""
