#!/bin/bash
# Sets up what `make test`, `make demo` and `make bench` need on Debian 12: system packages, then .venv.
# Usage: tools/setup.sh [run|test]. Safe to call again; work is done only when its inputs changed.
set -euo pipefail

want=${1:-test}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=$root/.venv
stamp=$venv/.tierfs-setup

run_packages=(fuse3 libfuse3-dev pkg-config gcc python3-dev python3-venv)
test_packages=(fio rsync sqlite3 git xfsprogs e2fsprogs stress-ng attr)

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# The command or file that shows a package to be there, so that a system that got it otherwise is left alone.
present() {
  case $1 in
    fuse3) command -v fusermount3 ;;
    libfuse3-dev) pkg-config --exists fuse3 ;;
    pkg-config) command -v pkg-config ;;
    python3-dev) "$python" -c 'import os, sysconfig as s; raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))' ;;
    python3-venv) "$python" -c 'import ensurepip, venv' ;;
    xfsprogs) command -v mkfs.xfs || test -x /sbin/mkfs.xfs ;;
    e2fsprogs) command -v mkfs.ext4 || test -x /sbin/mkfs.ext4 ;;
    attr) command -v getfattr ;;
    *) command -v "$1" ;;
  esac >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

system_packages() {
  local missing=() package
  for package in "$@"; do present "$package" || missing+=("$package"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    die "missing: ${missing[*]}; as root: apt-get update && apt-get install ${missing[*]}"
  fi
  echo "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq </dev/null
  apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
}

# torch first, at its pinned version: a range would draw a build for other hardware.
install_torch() {
  "$venv/bin/pip" install --quiet "$(grep '^torch==' requirements/constraints.txt)"
}

python=$(find_python) || {
  python=/usr/bin/python3
  system_packages python3
  python=$(find_python) || die "needs Python 3.11 or newer"
}
packages=("${run_packages[@]}")
[ "$want" = test ] && packages+=("${test_packages[@]}")
system_packages "${packages[@]}"

hash=$(cat pyproject.toml requirements/constraints.txt tools/setup.sh | sha256sum | cut -c1-64)
[ "$(cat "$stamp" 2>/dev/null || true)" = "$hash $root" ] && exit 0

echo "setup: creating .venv (a few minutes the first time)"
[ -x "$venv/bin/pip" ] || "$python" -m venv --clear "$venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
install_torch
"$venv/bin/pip" install --quiet --constraint requirements/constraints.txt --editable '.[test,torch]'
"$venv/bin/pip" install --quiet --constraint requirements/constraints.txt transformers accelerate tensorboard ||
  echo "setup: transformers, accelerate or tensorboard did not install; the tests that use them are skipped" >&2
echo "$hash $root" >"$stamp"
