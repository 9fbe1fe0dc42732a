# Sourced by run_train.sh and run_tests.sh, with bash. Finds the python to use, installing titan_moe
# into .venv where that is needed and allowed.
#
#   setup_env train|dev     sets the variable `python`; ends the script if there is none to use
#
# .venv bears a stamp once an installation has finished: a hash of what was asked for. The active
# environment comes first if it has what is needed; then a .venv whose stamp is current; then .venv
# is made. On several nodes or under a scheduler nothing is installed: many processes would write
# the same folder at once, often from machines without a network.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

say() { printf '%s\n' "$*" >&2; }

# Modules that must be there: titan_moe and its heaviest dependency, and for tests the tools.
needed_modules() {
    if [ "$1" = dev ]; then echo "titan_moe torch pytest ruff mypy"; else echo "titan_moe torch"; fi
}

# has PYTHON MODULE...: whether it finds all, not counting the current folder; imports none.
has() {
    local interpreter="$1"
    shift
    "$interpreter" -P -c '
import importlib.util, sys
sys.exit(not all(importlib.util.find_spec(name) for name in sys.argv[1:]))' "$@" 2>/dev/null
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The first Python >= 3.11: the active one if it will do.
find_python() {
    local name
    for name in python3 python python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && is_new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    return 1
}

# What an installation depends on: pins, dependencies and extras, the Python that runs it.
wanted_stamp() {
    {
        cat "$root/constraints.txt" "$root/pyproject.toml"
        "$venv/bin/python" -c 'import sys; print(sys.version_info[:2], sys.prefix)'
    } 2>/dev/null | cksum
}

# An installation for tests serves training too.
is_stamped() {
    local wanted file
    wanted="$(wanted_stamp)"
    for file in "$venv/stamp.dev" "$venv/stamp.$1"; do
        if [ -f "$file" ] && [ "$(cat "$file")" = "$wanted" ]; then return 0; fi
    done
    return 1
}

may_install() {
    [ "${NNODES:-1}" = 1 ] && [ -z "${SLURM_JOB_ID:-}${PBS_JOBID:-}${LSB_JOBID:-}" ] &&
        [ -z "${KUBERNETES_SERVICE_HOST:-}" ]
}

what_to_install() {
    local target=.
    if [ "$1" = dev ]; then target="'.[dev]'"; fi
    say "  cd '$root'"
    say "  python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e $target"
}

install_into_venv() {
    local target="$root"
    if [ "$1" = dev ]; then target="$root[dev]"; fi
    rm -f "$venv/stamp.$1"
    say "Setting up $venv (once; some minutes, most of them for PyTorch)"
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 && ! "$2" -m venv "$venv"; then
        say "$2 cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
        return 1
    fi
    "$venv/bin/python" -m pip install -c "$root/constraints.txt" -e "$target" >&2 || return 1
    wanted_stamp >"$venv/stamp.$1.new"
    mv "$venv/stamp.$1.new" "$venv/stamp.$1"
}

setup_env() {
    local base modules
    modules="$(needed_modules "$1")"
    base="$(find_python)" || base=""
    # shellcheck disable=SC2086  # a list of words
    if [ -n "$base" ] && has "$base" $modules; then
        python="$base"
        return
    fi
    python="$venv/bin/python"
    if is_stamped "$1"; then return; fi
    if ! may_install; then
        say "titan_moe is not installed, neither for ${base:-a Python on PATH} nor, complete and up to date,"
        say "in $venv. On several nodes or under a scheduler nothing is installed at launch."
        say "Do it once, where every node sees it:"
        what_to_install "$1"
        exit 1
    fi
    if [ -z "$base" ]; then
        say "titan-moe needs Python 3.11 or newer; found: $(python3 --version 2>&1 || echo none)"
        exit 1
    fi
    # A second launch waits for the first, and then finds its stamp.
    exec 9>"$root/.venv.lock"
    if command -v flock >/dev/null; then flock 9; fi
    if ! is_stamped "$1" && ! install_into_venv "$1" "$base"; then
        say "The installation did not finish; the next launch tries again."
        exit 1
    fi
    exec 9>&-
}
