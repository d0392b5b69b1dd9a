#!/bin/sh
# Installs Firebrick on Linux or macOS: downloads the archive of a release for this machine, checks its SHA-256, unpacks it, and
# links the program. Needs curl or wget, tar, and sha256sum or shasum; no root. A release has a copy that knows its repository.
#
#   FIREBRICK_VERSION     the release, such as 0.1.0; the newest if it is not set
#   FIREBRICK_HOME        where archives are unpacked; ~/.firebrick if it is not set
#   FIREBRICK_BIN         where the program is linked; ~/.local/bin if it is not set
#   FIREBRICK_REPOSITORY  OWNER/NAME on GitHub, for a copy of this file that is not from a release
#   FIREBRICK_DOWNLOAD    an address or a folder that has SHA256SUMS and the archives, instead of GitHub
#
# Trade-off: no shell profile is edited, and versions that were installed earlier stay in FIREBRICK_HOME.
set -eu

# The release workflow puts its repository after the `:-`.
repository=${FIREBRICK_REPOSITORY:-}

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

# The target triple whose archive runs here.
target() {
    case "$(uname -s)/$(uname -m)" in
        Linux/x86_64 | Linux/amd64) echo x86_64-unknown-linux-gnu ;;
        Linux/aarch64 | Linux/arm64) echo aarch64-unknown-linux-gnu ;;
        Darwin/arm64) echo aarch64-apple-darwin ;;
        *) fail "there is no archive for $(uname -s) on $(uname -m): build from the sources, as README.md says" ;;
    esac
}

# Refuses a Linux whose C library is not glibc 2.28 or newer.
check_glibc() {
    # A system without getconf may have glibc all the same; the program says then whether it is new enough.
    if ! libc=$(getconf GNU_LIBC_VERSION 2>/dev/null); then
        [ -e /lib64/ld-linux-x86-64.so.2 ] || [ -e /lib/ld-linux-aarch64.so.1 ] ||
            fail "the archives need glibc, which this system does not have"
        return 0
    fi
    version=${libc#glibc }
    major=${version%%.*} minor=${version#*.}
    minor=${minor%%[!0-9]*}
    [ "$major" -gt 2 ] || [ "$minor" -ge 28 ] || fail "glibc 2.28 or newer is needed, and this system has $version"
}

# Where the files of the requested release are.
download_address() {
    if [ -n "${FIREBRICK_DOWNLOAD:-}" ]; then
        echo "$FIREBRICK_DOWNLOAD"
    elif [ -z "$repository" ]; then
        fail "which repository? Set FIREBRICK_REPOSITORY=OWNER/NAME, or take the install.sh of a release"
    elif [ -n "${FIREBRICK_VERSION:-}" ]; then
        echo "https://github.com/$repository/releases/download/v${FIREBRICK_VERSION#v}"
    else
        echo "https://github.com/$repository/releases/latest/download"
    fi
}

# fetch FROM TO: an address, or a file.
fetch() {
    case "$1" in
        http://* | https://*)
            if command -v curl >/dev/null; then
                curl --proto '=http,https' --fail --location --silent --show-error --output "$2" "$1"
            elif command -v wget >/dev/null; then
                wget --quiet --output-document="$2" "$1"
            else
                fail "curl or wget is needed"
            fi
            ;;
        *) cp "$1" "$2" ;;
    esac || fail "could not get $1"
}

sha256() {
    if command -v sha256sum >/dev/null; then
        sha256sum "$1"
    elif command -v shasum >/dev/null; then
        shasum -a 256 "$1"
    else
        fail "sha256sum or shasum is needed"
    fi | cut -d ' ' -f 1
}

# Everything is in functions, so that a script that was cut off on its way does nothing.
main() {
    home=${FIREBRICK_HOME:-$HOME/.firebrick}
    bin=${FIREBRICK_BIN:-$HOME/.local/bin}
    target=$(target)
    case "$target" in *linux*) check_glibc ;; esac
    from=$(download_address)

    [ -L "$bin/firebrick" ] || [ ! -e "$bin/firebrick" ] ||
        fail "$bin/firebrick is there and was not linked by this script: remove it, or set FIREBRICK_BIN"
    mkdir -p "$home" "$bin"
    work=$(mktemp -d "$home/.install-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM

    # The list of checksums says what the archive is called, version included.
    fetch "$from/SHA256SUMS" "$work/SHA256SUMS"
    version=${FIREBRICK_VERSION:-}
    line=$(grep -E "^[0-9a-f]{64} [ *]firebrick-[0-9][^ /]*-$target\.tar\.gz\$" "$work/SHA256SUMS") ||
        fail "the release at $from has no archive for $target"
    [ -z "$version" ] || line=$(printf '%s\n' "$line" | grep -F "firebrick-${version#v}-$target.tar.gz") ||
        fail "$from has no archive of version $version"
    [ "$(printf '%s\n' "$line" | wc -l)" -eq 1 ] || fail "$from has several versions: set FIREBRICK_VERSION"
    expected=${line%% *}
    archive=${line#* ?}
    name=${archive%.tar.gz}

    echo "getting $archive"
    fetch "$from/$archive" "$work/$archive"
    found=$(sha256 "$work/$archive")
    [ "$found" = "$expected" ] || fail "$archive is damaged or not the one that was published: SHA-256 $found, expected $expected"

    tar -xzf "$work/$archive" -C "$work"
    [ -x "$work/$name/firebrick" ] || fail "$archive has no program $name/firebrick"
    rm -rf "${home:?}/$name"
    mv "$work/$name" "$home/$name"
    ln -sf "$home/$name/firebrick" "$bin/firebrick"

    version=${name#firebrick-}
    echo "firebrick ${version%-"$target"} is in $home/$name and linked as $bin/firebrick"
    program=firebrick
    case ":$PATH:" in
        *":$bin:"*) ;;
        *)
            program=$bin/firebrick
            echo "$bin is not in PATH. To add it, put this line into the profile of your shell:"
            echo "  export PATH=\"$bin:\$PATH\""
            ;;
    esac
    echo "next:"
    echo "  $program doctor                   # what is there: driver, libraries, GPU, disk, Hub"
    echo "  $program train quickstart.toml    # a whole run, with nothing to download"
}

main
