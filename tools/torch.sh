#!/bin/sh
# Install PyTorch into .venv for the tests: the version this project is tested with, in whichever build the configured
# package index has (TORCH_INDEX=URL names another: PyTorch's own has small builds without CUDA). TORCH=skip leaves it
# out; the tests that need it then say so.
set -eu
cd "$(dirname "$0")/.."

VERSION=2.13.0
PY=.venv/bin/python

if [ "${TORCH:-}" = skip ]; then
    echo "PyTorch is left out (TORCH=skip); the tests that need it will say so." >&2
    exit 0
fi
if ! "$PY" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').partition('+')[0] != '$VERSION')" 2>/dev/null; then
    echo "Installing PyTorch $VERSION, once (TORCH=skip goes without)." >&2
    "$PY" -m pip install --quiet --no-input --disable-pip-version-check --progress-bar off \
        ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$VERSION" 2>.venv/torch.log || {
        tail -n 5 .venv/torch.log >&2
        echo "PyTorch could not be installed; mend what pip says above, or go without: TORCH=skip make test" >&2
        exit 1
    }
fi
: >.venv/.torch
