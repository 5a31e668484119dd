#!/bin/sh
# A lock file says what, never where from: an address in it belongs to one person's machine.
set -eu
cd "$(dirname "$0")/.."

for lock in requirements*.lock; do
    if found=$(grep -nE '://|file:|--(extra-)?index-url|--find-links|--trusted-host' "$lock"); then
        echo "$lock names an address; remake it with \`make lock\`:" >&2
        echo "$found" >&2
        exit 1
    fi
    echo "$lock: $(grep -c '^[a-z0-9].*==' "$lock") packages, each with its hashes and no address"
done
