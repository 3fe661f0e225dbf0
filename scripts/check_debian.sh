#!/usr/bin/env bash
# Both commands of the README in a fresh Debian 12: debootstrap, a clone of HEAD, `make demo`, `make test`. Needs root.
#
# Environment: ROOT_FOLDER (build/debian12) is made anew unless KEEP_ROOT=1. BIND: host folders, separated by
# spaces, that pip's configuration points to; they are shown read-only at the same place. COMMANDS: default
# "make demo;make test".
set -euo pipefail
cd "$(dirname "$0")/.."

root=${ROOT_FOLDER:-$PWD/build/debian12}
commands=${COMMANDS:-make demo;make test}
[ "$(id -u)" = 0 ] || { echo "check_debian.sh: needs root, for debootstrap and chroot" >&2; exit 1; }
command -v debootstrap >/dev/null || apt-get -qq install -y --no-install-recommends debootstrap

# In a mount namespace of its own, so that nothing stays mounted, however this ends.
if [ "${IN_NAMESPACE:-}" != 1 ]; then
  IN_NAMESPACE=1 exec unshare --mount --pid --fork scripts/check_debian.sh
fi

if [ "${KEEP_ROOT:-}" != 1 ] || [ ! -x "$root/usr/bin/apt-get" ]; then
  if [ -e "$root" ] && [ ! -e "$root.made" ]; then
    echo "check_debian.sh: $root exists, was not made here and would be removed; name another ROOT_FOLDER" >&2
    exit 1
  fi
  rm -rf --one-file-system "$root"
  mkdir -p "$root"
  touch "$root.made"
  debootstrap --variant=minbase bookworm "$root" ${MIRROR:+"$MIRROR"} > "$root.log"
fi
mount -t proc proc "$root/proc"
mount --rbind --make-rslave /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
# As an installed system has it; without it every look-up of the own name waits for a name server.
echo "127.0.0.1 localhost $(hostname)" > "$root/etc/hosts"

for folder in ${BIND:-}; do
  mkdir -p "$root$folder"
  mount --bind -o ro "$folder" "$root$folder"
done

rm -rf "$root/root/project"
git clone -q . "$root/root/project"

mapfile -t network < <(env | grep -iE '^(https?_proxy|no_proxy|pip_[a-z_]+)=')
inside() {
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
    "${network[@]}" chroot "$root" sh -c "$1"
}
inside 'apt-get -qq update && apt-get -qq install -y --no-install-recommends git make ca-certificates >/dev/null'
# How this machine reaches package archives; nothing else of it is seen inside.
for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
  if [ -f "$file" ]; then cp -L "$file" "$root$file"; fi
done
status=0
while IFS= read -r command; do
  echo "== $command"
  start=$SECONDS
  if inside "cd /root/project && $command"; then result=ok; else result=FAILED status=1; fi
  echo "== $command: $result after $((SECONDS - start)) s"
done < <(tr ';' '\n' <<< "$commands" | sed 's/^ *//')
exit $status
