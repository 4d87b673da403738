#!/bin/bash
# Unpacks a CRIU that works on new kernels, from a newer Debian suite, into a directory of its own:
#     tests/install-criu.sh DIRECTORY [SUITE]
# DIRECTORY/criu is then the command. Nothing is installed: apt has lists of its own here, and the
# command runs through the unpacked libc, so that the system's stays as it is.
# Where it cannot: says why; fatal in CI, where nothing may be skipped.
set -u
place=${1:?usage: install-criu.sh DIRECTORY [SUITE]}
suite=${2:-trixie}

give_up() {
    echo "criu: $1" >&2
    [ "${CI-}" = true ] && exit 1
    echo "going on without: the tests that need it are skipped, by name" >&2
    exit 0
}

works() { "$1" --version >/dev/null 2>&1; }

works "$place/criu" && exit 0
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
    give_up "its tests take it from Debian's packages, and apt-get is not here"

# The mirror that this machine is configured with, whichever it is.
# shellcheck source=/dev/null
running=$(. /etc/os-release && echo "${VERSION_CODENAME-}")
mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' 'Component: main' |
    awk -v release="$running" '$2 == release { print $1; exit }')
[ -n "$mirror" ] || give_up "no Debian mirror is configured for '$running'"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keyring" ] || give_up "$keyring is not here: its packages could not be checked"

mkdir -p "$(dirname "$place")" && work=$(mktemp -d "$place.XXXXXX") || give_up "cannot write $place"
trap 'rm -rf "$work"' EXIT
work=$(cd "$work" && pwd)
mkdir -p "$work"/apt/{lists/partial,archives/partial,none} "$work/new/root"
: >"$work/apt/status"
echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/apt/sources.list"
private() {
    apt-get -qq -o Dir::State::lists="$work/apt/lists" -o Dir::State::status="$work/apt/status" \
        -o Dir::Cache="$work/apt" -o Dir::Etc::sourcelist="$work/apt/sources.list" \
        -o Dir::Etc::sourceparts="$work/apt/none" -o Dir::Etc::preferences="$work/apt/none/none" \
        -o Dir::Etc::preferencesparts="$work/apt/none" -o Dir::State::extended_states="$work/apt/none/none" \
        -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" "$@"
}

echo "unpacking: criu of $suite"
private update || give_up "the package lists of $suite could not be read"
private --no-install-recommends --download-only -y install criu >/dev/null ||
    give_up "the packages of $suite could not be had"
for package in "$work"/apt/archives/*.deb; do
    dpkg-deb -x "$package" "$work/new/root" || give_up "$package could not be unpacked"
done

cat >"$work/new/criu" <<'WRAPPER'
#!/bin/bash
# CRIU with the libraries it was unpacked with, whatever the system has.
here=$(dirname "$(readlink -f "$0")")/root
loader=$(echo "$here"/usr/lib*/ld-linux*.so.*)
libraries=$(printf '%s:' "$here"/usr/lib "$here"/usr/lib/*-linux-gnu*)
exec "$loader" --library-path "${libraries%:}" "$here/usr/sbin/criu" "$@"
WRAPPER
chmod +x "$work/new/criu"
works "$work/new/criu" || give_up "what was unpacked does not run: $("$work/new/criu" --version 2>&1 | tail -1)"
rm -rf "$place" && mv "$work/new" "$place" && "$place/criu" --version | head -1
