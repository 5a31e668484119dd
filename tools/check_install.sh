#!/bin/sh
# Run the blocks of docs/install.md as they stand, each in an empty folder with an empty home: from a clone with pip,
# from a wheel, and with uv as a tool. CHECKOUT and WHEEL are filled in; the locked versions are taken, from the caches.
# The wheel is the argument, or is built.
set -eu
cd "$(dirname "$0")/.."
source=$PWD
bin=$source/.venv/bin

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' INT TERM

wheel=${1:-}
if [ -z "$wheel" ]; then
    "$bin/python" -m pip wheel -qq --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$scratch" .
    wheel=$(echo "$scratch"/sublet-*.whl)
fi
# The locked versions, without their hashes: a hash is asked for of every file or of none, and our own has none.
sed -n 's/^\([a-z0-9][^ ]*==[^\\]*[^ \\]\) *\\$/\1/p' requirements.lock >"$scratch/constraints.txt"

# What the page shows may use what a fresh machine has, and uv.
mkdir "$scratch/tools"
ln -s "$bin/uv" "$scratch/tools/uv"
export PIP_CACHE_DIR="${PIP_CACHE_DIR:-$("$bin/python" -m pip cache dir)}" UV_CACHE_DIR="${UV_CACHE_DIR:-$("$bin/uv" cache dir)}"
[ ! -f "${HOME:-}/.config/pip/pip.conf" ] || export PIP_CONFIG_FILE="$HOME/.config/pip/pip.conf"
export PIP_CONSTRAINT="$scratch/constraints.txt" UV_CONSTRAINT="$scratch/constraints.txt"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_QUIET=1 UV_QUIET=1 UV_NO_PROGRESS=1
# python3 is the one of the set-up: the one on the PATH may be out of range.
ln -s "$("$bin/python" -c 'import os, sys; print(os.path.realpath(sys.executable))')" "$scratch/tools/python3"

for way in checkout wheel uv; do
    mkdir "$scratch/$way" "$scratch/$way-home"
    awk -v fence="\`\`\`sh $way" '$0 == fence {on = 1; next} /^```/ {on = 0} on' docs/install.md |
        sed "s#CHECKOUT#$source#; s#WHEEL#$wheel#" >"$scratch/$way.sh"
    [ -s "$scratch/$way.sh" ] || { echo "docs/install.md has no block 'sh $way'" >&2; exit 1; }
    echo "installing as docs/install.md says: $way"
    (
        cd "$scratch/$way"
        unset VIRTUAL_ENV PYTHONPATH PYTHONHOME SUBLET_HOME SUBLET_URL SUBLET_TOKEN XDG_STATE_HOME XDG_DATA_HOME XDG_BIN_HOME
        export HOME="$scratch/$way-home" PATH="$scratch/$way-home/.local/bin:$scratch/tools:/usr/bin:/bin"
        sh -eux "$scratch/$way.sh" >"$scratch/$way.out" 2>"$scratch/$way.err" || {
            cat "$scratch/$way.err" "$scratch/$way.out" >&2
            exit 1
        }
        sublet=$(command -v "$PWD/.venv/bin/sublet" || command -v sublet)
        if [ $way = wheel ]; then    # without the extra: the command that is printed brings it
            echo '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}' >empty.ipynb
            "$sublet" nb run empty.ipynb 2>"$scratch/needs.err" && { echo "the extra is there already" >&2; exit 1; }
            sh -eu -c "$(sed -n 's/.*`\(.*\)`.*/\1/p' "$scratch/needs.err")" || { cat "$scratch/needs.err" >&2; exit 1; }
            .venv/bin/python -c 'import ipykernel, nbclient, nbconvert'
        fi
        "$sublet" down --now >/dev/null
    )
    expected="sublet $(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/sublet/__init__.py)"
    [ "$(sed -n 1p "$scratch/$way.out")" = "$expected" ] || { cat "$scratch/$way.out" >&2; exit 1; }
    [ "$(sed -n '$p' "$scratch/$way.out")" = "on a leased device" ] || { cat "$scratch/$way.out" >&2; exit 1; }
done
echo "docs/install.md installs: checkout, wheel, uv"
