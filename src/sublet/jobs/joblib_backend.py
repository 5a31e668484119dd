"""joblib on leases: ``with joblib.parallel_backend("sublet"): …``, and so scikit-learn's ``n_jobs``.

A parallel call inside a chunk runs in that chunk's own process, one after the other: the lease has the cores it was
asked for, and a lease of a lease there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sublet.compute.posting import check_is_holder
from sublet.errors import InvalidRequest, Unsupported
from sublet.jobs.executor import Executor

if TYPE_CHECKING:
    from concurrent.futures import Future

NAME: Final = "sublet"
WANT: Final = 64


def register() -> None:
    """Make the backend known to joblib under the name ``"sublet"``. Harmless twice."""
    joblib = _joblib()
    joblib.register_parallel_backend(NAME, _backend_class(joblib))


def _joblib() -> Any:
    try:
        import joblib  # type: ignore[import-untyped]
    except ImportError:
        raise Unsupported("joblib is not installed", do="Install it: `pip install joblib`.") from None
    return joblib


def _backend_class(joblib: Any) -> Any:
    """The class is made here, so that joblib is loaded only where it is used."""
    base: Any = joblib.parallel.ParallelBackendBase
    batching: Any = joblib.parallel.AutoBatchingMixin
    sequential: Any = joblib.parallel.SequentialBackend
    fallback: Any = joblib.parallel.FallbackToBackend

    class SubletBackend(batching, base):  # type: ignore[misc]  # joblib has no types
        """joblib hands over batches of calls; each is one chunk."""

        supports_retrieve_callback = True
        supports_inner_max_num_threads = False
        supports_timeout = True
        uses_threads = False
        supports_sharedmem = False
        default_n_jobs = -1

        def __init__(self, want: int | None = None, **terms: Any) -> None:
            own = {key: terms.pop(key) for key in ("nesting_level", "inner_max_num_threads") if key in terms}
            super().__init__(**own)
            self._want = want
            self._terms = terms
            self._executor: Executor | None = None

        def effective_n_jobs(self, n_jobs: int | None) -> int:
            """Leases to ask for at most. ``-1``: as many as there are, up to ``want``."""
            if n_jobs == 0:
                raise ValueError("n_jobs == 0 in Parallel has no meaning")
            most: int = self._want or WANT
            return most if n_jobs is None or n_jobs < 0 else n_jobs

        def configure(self, n_jobs: int = 1, parallel: Any = None, **kwargs: Any) -> int:
            """Called before the first batch of a parallel call."""
            count = self.effective_n_jobs(n_jobs)
            try:
                check_is_holder()
            except InvalidRequest:  # a chunk that asks for this backend by name
                raise fallback(self.get_nested_backend()[0]) from None
            self.parallel = parallel
            self._executor = Executor(count, **self._terms)
            return count

        def submit(self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None) -> Future[Any]:
            """One batch of calls."""
            assert self._executor is not None
            future = self._executor.submit(func)
            if callback is not None:
                future.add_done_callback(callback)
            return future

        def apply_async(self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None) -> Future[Any]:
            """The older name of it."""
            return self.submit(func, callback)

        def retrieve_result_callback(self, out: Any) -> Any:
            """What the batch came to; raises what it raised."""
            return out.result()

        def abort_everything(self, ensure_ready: bool = True) -> None:
            """A call failed: what was not begun is dropped."""
            executor, self._executor = self._executor, None
            if executor is not None:
                executor.shutdown(cancel_futures=True)
            if ensure_ready:
                self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)

        def terminate(self) -> None:
            """The parallel call is over: all leases are given back."""
            executor, self._executor = self._executor, None
            if executor is not None:
                executor.shutdown()
            self.reset_batch_stats()

        def get_nested_backend(self) -> tuple[Any, int | None]:
            """What parallel calls inside a chunk use."""
            return sequential(nesting_level=(self.nesting_level or 0) + 1), None

    return SubletBackend
