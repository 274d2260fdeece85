#!/bin/sh
# SPDX-License-Identifier: LGPL-2.1-or-later
#
# Start a Dask cluster for msa-fleet by SSH: HEAD has the scheduler, each HOST as many
# workers as it has cores for. All of them need msatools[fleet] in VENV, and the dumps
# under the same paths. It runs until Ctrl-C.
#
#   packaging/fleet/ssh.sh HEAD HOST...
#   msa-fleet run /nfs/crash -o results --scheduler tcp://HEAD:8786
#
# Whoever reaches the scheduler can run programs as its user: use a network of your own,
# or TLS (docs/commands/fleet.md).
set -eu

DASK=${VENV:-/opt/msatools}/bin/dask
PORT=${PORT:-8786}
[ $# -ge 2 ] || { echo "usage: $0 HEAD HOST..." >&2; exit 2; }
head=$1
shift

# What runs there ends with its terminal.
trap 'trap - INT TERM EXIT; kill 0' INT TERM EXIT
${SSH:-ssh -tt} "$head" "$DASK scheduler --no-dashboard --port $PORT" </dev/null &
for host; do
    worker="$DASK worker tcp://$head:$PORT --nworkers auto --no-dashboard"
    ${SSH:-ssh -tt} "$host" "$worker" </dev/null &
done
wait
