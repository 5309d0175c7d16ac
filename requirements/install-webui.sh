#!/usr/bin/env bash
# Make the environment of `make test-webui`: install-webui.sh DIRECTORY BASE
# DIRECTORY sees all packages of BASE (the environment of `make test`), and adds gradio and a driver for the browser. BASE stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: install-webui.sh DIRECTORY BASE}
base=${2:?usage: install-webui.sh DIRECTORY BASE}

wanted=$(cat requirements/webui.txt requirements/webui-test.txt requirements/install-webui.sh setup.cfg setup.py swift_megatron_grpo_autoload.pth \
    | sha256sum | cut -c1-16)
stamp=$venv/.made-from-$wanted
[ -f "$stamp" ] && exit 0

echo "env: making $venv over $base (about 200 MB, a minute, once)"
"$base/bin/python" -m venv --clear --without-pip "$venv"
packages=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# pip, too, is the one of BASE; --ignore-installed keeps it from looking at BASE's packages as ones to replace.
echo "$packages" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_shared.pth"
export PIP_DISABLE_PIP_VERSION_CHECK=1
pip() { "$venv/bin/python" -m pip install --quiet --no-input --progress-bar off "$@"; }
pip --no-deps --ignore-installed -r requirements/webui.txt
pip -r requirements/webui-test.txt
pip --no-deps --no-build-isolation --ignore-installed -e .
# ms-swift's command, for this interpreter.
printf '#!%s\nimport sys\nfrom swift.cli.main import cli_main\nif __name__ == "__main__":\n    sys.exit(cli_main())\n' \
    "$(cd "$venv" && pwd)/bin/python" >"$venv/bin/swift"
chmod +x "$venv/bin/swift"
touch "$stamp"
echo "env: $venv is ready"
