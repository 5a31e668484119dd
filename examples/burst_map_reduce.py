"""Map and reduce over files: words are counted for each file, then added up; a second run finds everything stored.

Run it: ``python examples/burst_map_reduce.py``
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from sublet import jobs

TEXTS = ("to be or not to be", "that is the question", "to sleep perchance to dream", "to dream or not")
GROUP = 2


def count_words(file: jobs.File) -> Counter[str]:
    """Map: one file. Its content counts for the chunk's id, its path does not."""
    return Counter(file.read().decode().split())


def add_up(counts: list[Counter[str]]) -> Counter[str]:
    """Reduce: some of the counts."""
    return sum(counts, Counter())


def groups(outputs: jobs.Outputs) -> list[jobs.Chunk]:
    """The chunks of the second phase are made of the outputs of the first."""
    counts = [jobs.load_result(data) for data in outputs]
    return [jobs.Chunk(add_up, (counts[at : at + GROUP],)) for at in range(0, len(counts), GROUP)]


def finish(outputs: jobs.Outputs) -> Counter[str]:
    """Finalize, in this program."""
    return add_up([jobs.load_result(data) for data in outputs])


def main() -> None:
    """The store is a folder here; `VolumeOutputStore(block_lease)` keeps it in a volume."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n, text in enumerate(TEXTS):
            (folder / f"{n}.txt").write_text(text)
        for run in ("first", "second"):
            store = jobs.VolumeOutputStore(folder / "results")
            files = [jobs.Chunk(count_words, (jobs.File(path),)) for path in sorted(folder.glob("*.txt"))]
            phases = [jobs.Phase(name="map", chunks=files), jobs.Phase(name="reduce", chunks=groups)]
            result = jobs.JobCoordinator(want=2, name="words").run_phases(phases, store, finish)
            store.close()
            print(f"{run} run: {result.chunks_succeeded} chunks executed, {result.chunks_skipped} were stored")
        print("most frequent:", result.aggregate.most_common(1))


if __name__ == "__main__":
    main()
