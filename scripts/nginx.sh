#!/bin/sh
# Brings nginx, which the service is measured against, into a folder: nginx.sh <folder>.
# Nothing to do where it is installed. Debian's package is unpacked and not installed, so that no daemon is started and
# no root is needed; where that cannot be done, the benchmark says what to install.
set -eu
folder=$1

for found in nginx /usr/sbin/nginx "$folder/usr/sbin/nginx"; do
    if command -v "$found" >/dev/null; then exit 0; fi
done
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then exit 0; fi

echo "fetching nginx into $folder ..."
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
fetch() { (cd "$packages" && timeout 120 apt-get -qq download nginx >/dev/null 2>&1); }
if ! fetch && [ "$(id -u)" = 0 ]; then
    timeout 300 apt-get -qq update >/dev/null 2>&1 || true  # a new machine has no lists of packages
    fetch || true
fi
for package in "$packages"/nginx_*.deb; do
    if [ -e "$package" ]; then mkdir -p "$folder" && dpkg -x "$package" "$folder"; fi
done
