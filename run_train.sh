#!/usr/bin/env bash
# Train: ./run_train.sh [CONFIG] [--section.key=value ...], with --help for every key.
# Environment: CONFIG_FILE, NGPU (processes on this node), LOG_RANK, NNODES; see README.md.
set -euo pipefail
script="${BASH_SOURCE[0]}"
while [ -L "$script" ]; do # by hand, since readlink -f is not everywhere
    link="$(readlink "$script")"
    case "$link" in /*) script="$link" ;; *) script="$(dirname "$script")/$link" ;; esac
done
source "$(dirname "$script")/scripts/setup_env.sh"

setup_env train
exec "$python" -m titan_moe.cli.main train "$@"
