#!/bin/sh
# What people install is the wheel: build it, install it in a fresh environment without the dev extra (so a dependency
# that only `dev` brings is noticed), and run it from an empty folder where the source cannot be imported.
set -eu
cd "$(dirname "$0")/.."
source=$PWD

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' INT TERM

"$source/.venv/bin/python" -m pip wheel -qq --disable-pip-version-check --no-build-isolation --no-deps \
    --wheel-dir "$scratch/dist" .
wheel=$(echo "$scratch"/dist/sublet-*.whl)
echo "built ${wheel##*/}"

# The locked versions, without their hashes: pip asks for a hash of every file or of none, and our wheel has none.
sed -n 's/^\([a-z0-9][^ ]*==[^\\]*[^ \\]\) *\\$/\1/p' requirements.lock >"$scratch/constraints.txt"

"$source/.venv/bin/python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input --no-user \
    --constraint "$scratch/constraints.txt" "$wheel"

mkdir "$scratch/empty" "$scratch/home"
cd "$scratch/empty"
# An environment with nothing of ours in it: no PYTHONPATH, no SUBLET_HOME, no virtual environment.
alone() { env -i PATH="$scratch/venv/bin:/usr/bin:/bin" HOME="$scratch/home" LANG=C.UTF-8 "$@"; }

alone python -W error - "$scratch/venv" <<'END'
import importlib.resources
import sys

import sublet

assert sublet.__file__.startswith(sys.argv[1]), f"sublet comes from {sublet.__file__}, not from the wheel"
assert importlib.resources.files("sublet").joinpath("py.typed").is_file(), "the wheel lacks py.typed"
example = importlib.resources.files("sublet.notebook").joinpath("five-minute-gpu.ipynb")
assert example.is_file(), "the wheel lacks the example notebook"
END
alone sublet --version
alone sublet demo
echo "the wheel works alone"
sh "$source/tools/check_install.sh" "$wheel"
