#!/bin/sh
# Run one part of the suite. pytest calls "nothing selected" an error (exit status 5); for a part that has no test yet
# it is an answer.
set -u
cd "$(dirname "$0")/.."

.venv/bin/python -m pytest "$@"
status=$?
[ $status -ne 5 ] || { echo "There is no test in this part yet."; exit 0; }
exit $status
