"""A scikit-learn sweep over leased cores: joblib's backend "sublet" does the rest.

Run it: ``python examples/burst_sklearn.py``. It needs scikit-learn.
"""

from __future__ import annotations

import sys

import joblib
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.tree import DecisionTreeClassifier

from sublet import jobs

CORES = int(sys.argv[1]) if len(sys.argv) > 1 else 4


def main() -> None:
    """Twelve fits, each on a lease; nested parallel calls stay in their chunk."""
    jobs.register_joblib()
    data, target = load_iris(return_X_y=True)
    search = GridSearchCV(DecisionTreeClassifier(random_state=0), {"max_depth": [1, 2, 3, 4]}, cv=3, n_jobs=CORES)
    with joblib.parallel_backend("sublet"):
        search.fit(data, target)
    print(f"best depth {search.best_params_['max_depth']}, score {search.best_score_:.3f}")


if __name__ == "__main__":
    main()
