#!/usr/bin/env bash
# Train: ./run_train.sh [CONFIG] [--section.key=value ...], with --help for every key.
# Environment: CONFIG_FILE, NGPU (processes on this node), LOG_RANK, NNODES; see README.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup_env.sh"

setup_env train
exec "$python" -m titan_moe.cli.main train "$@"
