#!/bin/sh
# The main job, from nothing: install, build all-MiniLM-L6-v2 for eight shapes, verify,
# and compare a start with eager and with cold torch.compile. PYTHON picks the
# interpreter (3.11 or 3.12), VENV the environment (default .venv).
set -eu
cd "$(dirname "$0")/../.."
venv="${VENV:-.venv}"
[ -x "$venv/bin/compilekit" ] || scripts/install "$venv"

"$venv/bin/compilekit" build examples/minilm/compilekit.toml -o examples/minilm/artifact
"$venv/bin/compilekit" bench startup examples/minilm/compilekit.toml \
    --artifact examples/minilm/artifact --rows compilekit,cold,eager --repeat 1
