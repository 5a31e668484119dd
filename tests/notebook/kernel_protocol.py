"""``python -m tests.notebook.kernel_protocol KERNEL...``: the protocol's own test of kernels, and which tests failed.

The samples are the same for every kernel, so that two can be compared. Written as a line of JSON for each: test, last
line of why.
"""

from __future__ import annotations

import functools
import json
import sys
import unittest
from collections.abc import Callable
from typing import Any, Final

import jupyter_kernel_test  # type: ignore[import-untyped]

__all__ = ["Samples"]


PATIENCE_S: Final = 60.0


def _patiently(get: Callable[..., Any], timeout: float | None = None) -> Any:
    """It waits a tenth of a second for a message that must come, which on a busy machine takes longer."""
    return get(timeout=PATIENCE_S)


class Samples(jupyter_kernel_test.KernelTests):  # type: ignore[misc]
    """Code for each of its tests."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        for channel in (cls.kc.shell_channel, cls.kc.iopub_channel):
            channel.get_msg = functools.partial(_patiently, channel.get_msg)

    def flush_channels(self) -> None:
        """What is asked now is answered after all that was on its way."""
        asked = self.kc.kernel_info()
        while self.kc.get_shell_msg()["parent_header"].get("msg_id") != asked:
            pass
        while True:
            message = self.kc.get_iopub_msg()
            if message["parent_header"].get("msg_id") == asked and message["content"].get("execution_state") == "idle":
                return

    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys\nprint('a warning', file=sys.stderr)"
    completion_samples = ({"text": "zi", "matches": {"zip"}},)
    complete_code_samples = ("1", "print('hello')", "def f(x):\n    return x * 2\n\n")
    incomplete_code_samples = ("print('''hello", "def f(x):\n    x * 2")
    invalid_code_samples = ("import = 7q",)
    code_page_something = "zip?"
    code_generate_error = "raise ValueError('as asked')"
    code_execute_result = (
        {"code": "1 + 2 + 3", "result": "6"},
        {"code": "[n * n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    )
    code_display_data = (
        {"code": "from IPython.display import HTML, display\ndisplay(HTML('<b>x</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display\ndisplay(Math('x^2'))", "mime": "text/latex"},
    )
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search", "range")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output\nclear_output()"


def main(kernels: list[str]) -> int:
    for kernel in kernels:
        print(json.dumps(outcome_of(kernel)))
    return 0


def outcome_of(kernel: str) -> dict[str, object]:
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(type("Tests", (Samples,), {"kernel_name": kernel}))
    outcome = unittest.TestResult()
    suite.run(outcome)
    found = [*outcome.failures, *outcome.errors]
    failed = {str(test.id()).rpartition(".")[2]: why.strip().splitlines()[-1] for test, why in found}
    skipped = {str(test.id()).rpartition(".")[2]: why for test, why in outcome.skipped}
    return {"ran": outcome.testsRun, "failed": failed, "skipped": skipped}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
