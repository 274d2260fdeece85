#!/bin/sh
# SPDX-License-Identifier: LGPL-2.1-or-later
# Build the Debian package from what is committed: its files are left in dist/.
# Needs debhelper, python3-venv, a C compiler, and the network for what msatools needs.
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' msatools/__init__.py)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/msatools-$version"
git archive HEAD | tar -x -C "$work/msatools-$version"
cd "$work/msatools-$version"
mv packaging/debian debian
dpkg-buildpackage --build=binary --no-sign
cd - >/dev/null
mkdir -p dist
cp "$work"/msatools_*.deb dist/
