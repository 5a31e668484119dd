#!/bin/sh
# Install the proxy of JupyterHub into .venv/hub for the tests: configurable-http-proxy from npm, as package-lock.json
# has it, each package checked against its hash, and no script of a package run. Without npm those tests say that they
# are left out. (JupyterHub has no other proxy of its own; the next best kept one is a program to be fetched as well.)
set -eu
cd "$(dirname "$0")/.."

PLACE=.venv/hub

if ! command -v npm >/dev/null; then
    echo "There is no npm, so the tests with a JupyterHub are left out; on Debian and Ubuntu: apt install nodejs npm" >&2
    exit 0
fi
mkdir -p $PLACE
cp tools/hub/package.json tools/hub/package-lock.json $PLACE/
npm ci --prefix $PLACE --ignore-scripts --omit=dev --no-audit --no-fund --no-update-notifier >.venv/hub.log 2>&1 || {
    tail -n 5 .venv/hub.log >&2
    echo "The proxy of JupyterHub could not be installed; mend what npm says above (or in .venv/hub.log)." >&2
    exit 1
}
: >$PLACE/.ready
