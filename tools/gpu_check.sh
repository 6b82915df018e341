#!/usr/bin/env bash
# GPU check: on a machine with a GPU and no network, runs the tests marked gpu and the demo, and prints a summary.
#
#   bash tools/gpu_check.sh                  needs python3 with torch 2.11 or newer, and what .whl/ brings
#   bash tools/gpu_check.sh --fetch PYTHON   on a machine with network: fills .whl/ for Python 3.12 on x86-64 Linux
#
# WHEELS names another folder than .whl, FOR another Python than 3.12.
# Nothing is installed into the machine's Python: wheels and members go to a temporary folder on PYTHONPATH.
set -uo pipefail
cd "$(dirname "$0")/.."
wheels=${WHEELS:-.whl}

if [[ ${1:-} == --fetch ]]; then
    platforms=()
    for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
    mkdir -p "$wheels" && rm -f "$wheels"/*.whl
    "${2:-python3}" -m pip download -qq -d "$wheels" --only-binary=:all: --python-version "${FOR:-3.12}" \
        --implementation cp "${platforms[@]}" -r tools/gpu_wheels.txt || exit 1
    rm -f "$wheels"/{numpy,torch,setuptools,hf_xet,tzdata}-*.whl # the machine's own, or not needed
    du -sh "$wheels"
    exit 0
fi

python=${PYTHON:-python3}
"$python" -c 'import sys, torch; sys.exit(sys.version_info < (3, 10))' ||
    { echo "Error: $python has no torch, or is older than 3.10. Name another: PYTHON=..." >&2; exit 2; }
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$site" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
pip=("$python" -m pip install -qq --no-index --no-deps --no-compile --disable-pip-version-check --target "$site")
if compgen -G "$wheels/*.whl" >/dev/null; then "${pip[@]}" "$wheels"/*.whl || exit 1; fi
members=()
for project in core accelerators/* plugins/* csrc/* entrypoints; do
    [[ -f $project/pyproject.toml ]] && members+=("./$project")
done
"${pip[@]}" --no-build-isolation "${members[@]}" || exit 1
rm -rf "$site"/*/tests

"$python" -c 'import torch; print("torch", torch.__version__, "-", torch.accelerator.current_accelerator() or "no GPU")'
"$python" -m polyscale report --kind accelerator || exit 1

started=$SECONDS
"$python" -m pytest -q -m gpu -p no:cacheprovider --durations=5 accelerators/*/tests plugins/*/tests \
    csrc/*/tests core/tests tests
tests=$? tests_s=$((SECONDS - started))
((tests == 5)) && tests=0 # nothing is marked gpu

started=$SECONDS
timeout 200 "$python" tools/demo.py
demo=$? demo_s=$((SECONDS - started))

echo "=== summary"
printf '%-6s %5d s  %s\n' tests "$tests_s" "$([[ $tests == 0 ]] && echo ok || echo FAILED)"
printf '%-6s %5d s  %s\n' demo "$demo_s" "$([[ $demo == 0 ]] && echo ok || echo FAILED)"
((tests == 0 && demo == 0)) || exit 1
"$python" tools/record_verified.py --state --gpu
