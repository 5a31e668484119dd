#!/bin/sh
# Remake requirements.lock from pyproject.toml: every Python version we support, every package with its hashes, and no
# address. Pins that still fit are kept; `make lock UPGRADE=1` takes the newest. (uv.lock and pylock.toml would record
# the address of every file, so they are not what we keep.) requirements-demo.lock is the part of it that `make demo`
# installs: what the notebook extra needs, and what builds an editable install.
set -eu
cd "$(dirname "$0")/.."

# Which uv is in the lock as well, so that two people get the same file.
.venv/bin/uv pip compile --quiet --universal --generate-hashes --extra dev --extra kernels --extra gpu --extra notebook --extra s3 --extra studio --extra wasm \
    --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
    ${UPGRADE:+--upgrade} --output-file requirements.lock pyproject.toml
printf 'hatchling\neditables\n' | .venv/bin/uv pip compile --quiet --universal --generate-hashes --extra notebook \
    --constraint requirements.lock --no-annotate --no-emit-index-url --no-emit-find-links \
    --custom-compile-command "make lock" --upgrade --output-file requirements-demo.lock pyproject.toml -
sh tools/check_lock.sh
