#!/bin/sh
# Fetches what the end-to-end tests drive the gateway with: a Python environment and a Node
# package, both below the folder given (default: target). Needs python3, npm and a network.
# Prometheus comes from the system: apt-get install prometheus.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
into=${1:-"$here/../../target"}
mkdir -p "$into/e2e-node"
[ -x "$into/e2e-venv/bin/python" ] || python3 -m venv "$into/e2e-venv"
"$into/e2e-venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
cp "$here/package.json" "$into/e2e-node/"
npm install --prefix "$into/e2e-node" --no-audit --no-fund --silent
echo "the parts of the end-to-end tests are in $into"
