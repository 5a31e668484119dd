"""A plugin of pytest with which ``tests/gpu`` runs on pretended cards: ``pytest -p tests.rig.gpu_suite tests/gpu``.

What needs a true driver or kernel is left out, by name and with its reason.
"""

from __future__ import annotations

from typing import Final

import pytest

__all__ = ["ROWS_LEFT_OUT", "TESTS_LEFT_OUT"]

OF_WARP: Final = "Warp's own library asks a driver for much that the rig has not, and shows no CUDA device"
OF_TORCH: Final = "PyTorch's CUDA libraries ask the driver for private tables of NVIDIA's"
TESTS_LEFT_OUT: Final = {
    "TestCudaDeviceWithWarp": OF_WARP,
    "test_what_is_no_module_is_refused": OF_WARP,
    "test_a_computation_of_torch_does_not_notice": OF_TORCH,
    "test_torch_refuses_more_than_the_leases_share": OF_TORCH,
}
"""By a class or function of ``tests/gpu``, or one that it inherits."""
ROWS_LEFT_OUT: Final = {"written": OF_TORCH, "scrubbed": OF_TORCH}
"""By a row of ``benchmarks/gpu``."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test has its GPU; those of which it is known why they cannot run are left out."""
    for plugin in config.pluginmanager.get_plugins():
        if "gpu" in (known := getattr(plugin, "CAPABILITIES", {})):
            known["gpu"] = lambda: True
    left_out = [item for item in items if TESTS_LEFT_OUT.keys() & set(item.nodeid.split("::"))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
