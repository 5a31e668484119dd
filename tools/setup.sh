#!/bin/sh
# Make the local environment .venv: Sublet, editable, with everything in requirements.lock, each file checked against
# its hash. `make` calls it when the lock, pyproject.toml or this file is newer than the last success. With the argument
# "demo" it installs only what `make demo` needs (requirements-demo.lock); without it, later, the rest is added.
#
# It needs a Python and nothing else. What is missing is said in one sentence, with the command that mends it.
# PYTHON=... names the interpreter; otherwise the first one that can be used of python3, python3.13, python3.12, python3.11.
set -eu
cd "$(dirname "$0")/.."

OLDEST=11 NEWEST=13    # Python 3.OLDEST to 3.NEWEST, as requires-python in pyproject.toml
VENV=.venv
LOG=$VENV/setup.log
READY=$VENV/.ready     # written last: it exists only beside a whole environment
DEMO_READY=$VENV/.demo # the same for the part that the demo needs; a whole environment has it too

say() { printf '%s\n' "$*" >&2; }
give_up() { say "$@"; exit 1; }

# "3.11.7", or nothing if it does not run at all (a launcher on the PATH may only pretend to be a Python).
version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true; }

in_range() {
    case $1 in
    3.*) minor=${1#3.}; minor=${minor%%.*}; [ "$minor" -ge $OLDEST ] && [ "$minor" -le $NEWEST ] ;;
    *) false ;;
    esac
}

can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

RANGE="Python 3.$OLDEST to 3.$NEWEST"

choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        version=$(version_of "$PYTHON")
        [ -n "$version" ] || give_up "PYTHON=$PYTHON does not run as a Python; name one that does, for example: make PYTHON=python3.12"
        in_range "$version" || give_up "Sublet needs $RANGE, and PYTHON=$PYTHON is $version; name another, for example: make PYTHON=python3.12"
        can_make_venv "$PYTHON" || give_up "PYTHON=$PYTHON ($version) has no venv module; on Debian and Ubuntu: apt install python${version%.*}-venv"
        python=$PYTHON
        return
    fi
    out_of_range= without_venv=
    for candidate in python3 python3.13 python3.12 python3.11; do
        version=$(version_of $candidate)
        [ -n "$version" ] || continue
        if ! in_range "$version"; then
            out_of_range=${out_of_range:-$candidate is $version}
        elif ! can_make_venv $candidate; then
            without_venv=${without_venv:-$version}
        else
            python=$candidate
            return
        fi
    done
    if [ -n "$without_venv" ]; then
        give_up "Python $without_venv has no venv module, which Sublet's set-up needs; on Debian and Ubuntu: apt install python${without_venv%.*}-venv"
    fi
    give_up "Sublet needs $RANGE, and ${out_of_range:-no python3 was found}; install one (on Debian and Ubuntu: apt install python3.$OLDEST python3.$OLDEST-venv) or name one: make PYTHON=/path/to/python3.12"
}

# pip's own words go to the log; a person sees how far it is.
install() {
    packages=$1; shift
    tty=; [ -t 2 ] && tty=1
    {
        if "$VENV/bin/python" -m pip install --no-compile --no-user --no-input --disable-pip-version-check --progress-bar off "$@" 2>&1
        then echo "(done)"; else echo "(failed)"; fi
    } | {
        seen=0 outcome=
        while IFS= read -r line; do
            printf '%s\n' "$line" >>"$LOG"
            case $line in
            Collecting\ * | Processing\ * | Requirement\ already\ satisfied:*)
                seen=$((seen + 1)); [ $seen -le "$packages" ] || continue
                if [ -n "$tty" ]; then printf '\r      fetched %d of %d' $seen "$packages" >&2
                elif [ $((seen % 20)) -eq 0 ]; then say "      fetched $seen of $packages"; fi ;;
            Installing\ collected\ packages:*)
                [ -n "$tty" ] && printf '\n' >&2
                say "      unpacking" ;;
            "(done)" | "(failed)") outcome=$line ;;
            esac
        done
        [ "$outcome" = "(done)" ]
    } && return
    [ -n "$tty" ] && say ""
    tail -n 12 "$LOG" >&2
    give_up "The packages could not be installed; what was fetched is kept, so mend what pip says above (or in $LOG) and run the same command again."
}

main() {
    part=${1:-}
    started=$(date +%s)
    choose_python
    say "Setting up Sublet in $VENV${part:+ (only what the $part needs)}."
    say "[1/4] Python $version ($python)"

    say "[2/4] an environment of its own"
    if [ "$(version_of $VENV/bin/python)" = "$version" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        say "      the one that is there"
    else
        "$python" -m venv --clear "$VENV" || give_up "The environment could not be made in $PWD/$VENV; see above."
    fi
    lock=requirements.lock ready="$READY $DEMO_READY" options=
    if [ "$part" = demo ]; then
        lock=requirements-demo.lock ready=$DEMO_READY options=--no-deps
    fi
    rm -f $ready; : >"$LOG"

    packages=$(grep -c '^[a-z0-9].*==' $lock)
    say "[3/4] the packages in $lock, each checked against its hash"
    install "$packages" $options --require-hashes -r $lock
    # Not for the demo: it imports a third of these files, and those are compiled as they are imported. Some packages have
    # files that are for another Python, or templates; pip leaves those out as well.
    if [ "$part" != demo ]; then
        say "      compiling"
        "$VENV/bin/python" -m compileall -q -j 0 "$VENV"/lib/python3.*/site-packages >/dev/null 2>&1 || true
    fi

    say "[4/4] Sublet itself, from this folder"
    install 1 --no-build-isolation --no-deps --editable .

    for mark in $ready; do : >"$mark"; done
    say "Ready after $(($(date +%s) - started)) s."
}

main "$@"
