#!/usr/bin/env bash
# All checks, as CI runs them: ./run_tests.sh [--nightly] [arguments of pytest ...]
set -euo pipefail
script="${BASH_SOURCE[0]}"
while [ -L "$script" ]; do # by hand, since readlink -f is not everywhere
    link="$(readlink "$script")"
    case "$link" in /*) script="$link" ;; *) script="$(dirname "$script")/$link" ;; esac
done
source "$(dirname "$script")/scripts/setup_env.sh"

selection=(-m "not nightly")
if [ "${1:-}" = --nightly ]; then
    selection=()
    shift
fi

setup_env dev
cd "$root"
"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
exec "$python" -m pytest ${selection[@]+"${selection[@]}"} "$@"
