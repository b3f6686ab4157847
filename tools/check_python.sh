#!/bin/sh
# Says in one line what is missing, before pip says it in forty.
python="$1"
command -v "$python" >/dev/null 2>&1 || { echo "loramux needs Python 3.11 or newer; '$python' was not found. Try: make PYTHON=/path/to/python3.12 demo"; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "loramux needs Python 3.11 or newer; '$python' is $("$python" --version). Try: make PYTHON=python3.12 demo"; exit 1; }
"$python" -c 'import venv, ensurepip' 2>/dev/null || { echo "loramux needs Python's venv module (on Debian: apt-get install python3-venv)"; exit 1; }
