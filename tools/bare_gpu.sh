#!/bin/sh
# What needs a GPU, on a machine that has nothing but an NVIDIA driver, Python 3.11 to 3.13, torch, cuda-core and numpy: its
# tests, then its figures. Such a machine may have no network, so what is missing there is fetched beforehand: a few small
# wheels of pure Python, the same for all these versions. This folder, with .gpu/, is all that has to be carried there:
#
#   sh tools/bare_gpu.sh carry    where there is a network: fetch them into .gpu/, which goes along with this folder
#   sh tools/bare_gpu.sh          on the machine (PYTHON names the interpreter that has torch; else python3)
#
# Figures go to benchmarks/results/gpu.json and gpu.md. Where Warp is missing, what needs it is named as left out.
set -eu
cd "$(dirname "$0")/.."

WHEELS="pytest pluggy iniconfig packaging pygments nvidia-ml-py"
HERE=.gpu

if [ "${1:-}" = carry ]; then
    rm -rf $HERE && mkdir $HERE
    for name in $WHEELS; do
        sed -n "s/^\($name==[^ ;]*\).*/\1/p" requirements.lock
    done >$HERE/wanted
    python=.venv/bin/python
    [ -x $python ] || python=${PYTHON:-python3}
    $python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest $HERE -r $HERE/wanted
    for wheel in $HERE/*-none-any.whl; do
        $python -m zipfile -e "$wheel" $HERE/site
    done
    echo "carried along in $HERE: $(ls $HERE | grep -c 'whl$') wheels"
    exit 0
fi

python=${PYTHON:-python3}
[ -d $HERE/site ] || { echo "There is no $HERE/site. Where there is a network, run: sh tools/bare_gpu.sh carry" >&2; exit 1; }
export PYTHONPATH="$PWD/$HERE/site:$PWD/src:$PWD" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
# Warnings of whatever else is installed there are no errors of ours.
$python -m pytest tests/gpu -W default -p no:cacheprovider --basetemp="$(mktemp -d)/tests"
$python -m benchmarks.gpu
