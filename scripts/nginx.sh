#!/bin/sh
# Brings nginx, which the service is measured against, into a folder: nginx.sh <folder>.
# Nothing to do where it is installed. Debian's package is unpacked and not installed: no daemon is started, no root is
# needed, and nothing outside the folder changes. Where it cannot be had, one line says so, and that is no failure: only
# the benchmark that needs it fails, and says what to install.
set -eu
folder=$1

for found in nginx /usr/sbin/nginx "$folder/usr/sbin/nginx"; do
    if command -v "$found" >/dev/null; then exit 0; fi
done

without() { echo "going on without nginx ($1); the benchmark blob_get needs it" >&2; exit 0; }

if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then without "there is no apt-get here"; fi

echo "fetching nginx into $folder, and installing nothing ..."
own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
chmod 755 "$own"  # apt-get downloads as a user of its own
mkdir -p "$own/packages" "$own/state/lists/partial" "$own/cache/archives/partial"
# A new machine has no lists of packages, and those of this one are not ours to renew: ours are in a folder of our own.
apart="-o Dir::State=$own/state -o Dir::Cache=$own/cache -o Dir::State::status=/var/lib/dpkg/status"
# shellcheck disable=SC2086  # each option is a word of its own
fetch() { (cd "$own/packages" && timeout 120 apt-get -qq $1 download nginx >/dev/null 2>&1); }
if ! fetch ""; then
    # shellcheck disable=SC2086
    timeout 300 apt-get -qq $apart update >/dev/null 2>&1 || true
    fetch "$apart" || without "its package cannot be fetched"
fi
mkdir -p "$folder"
for package in "$own"/packages/nginx_*.deb; do dpkg -x "$package" "$folder"; done
