#!/bin/sh
# Tests on a machine as most people have one and this one may not be: control groups of version 2 alone, systemd, and an
# ext4 with quotas of projects (in /quota, where pytest keeps its folders).
#
#   sh tools/vm.sh [TEST...]      as root, on Debian, after: apt-get install mmdebstrap user-mode-linux e2fsprogs
#
# It is Linux as a program (user-mode-linux): no KVM, no network, nothing left behind but VM, the folder it is built in.
# A processor with AMX will not do: its registers are more than user-mode-linux knows, and the first program there dies.
# It has one processor, neither Landlock nor cpusets, and is several times slower than this machine: a test that waits
# for seconds may fail there for that alone. What is committed is what runs. `sublet doctor` and `sublet run` are shown
# as root, and as a user who lingers; then the tests, as root. LIMIT: seconds for all of it.
set -eu

VM=${VM:-/var/tmp/sublet-vm} LIMIT=${LIMIT:-3000}
cd "$(dirname "$0")/.."
here=$PWD
[ $# -gt 0 ] || set -- tests/unit/node/storage/test_project_quota.py tests/integration/test_trees.py \
    tests/integration/test_supervisor_life.py

die() { echo "tools/vm.sh: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "only root can build a machine"
for program in mmdebstrap linux.uml mkfs.ext4 git; do
    command -v $program > /dev/null || die "no $program here: apt-get install mmdebstrap user-mode-linux e2fsprogs git"
done
! grep -qw amx_tile /proc/cpuinfo || die "this processor's state (AMX) is larger than user-mode-linux can hold: use another"
[ -x .venv/bin/python ] || die "no .venv here: make setup"
mkdir -p "$VM/share" "$VM/uml"

# ---- its packages, once, from where this machine has its own

packages=systemd-sysv,dbus-user-session,libpam-systemd,udev,git,make,strace,e2fsprogs,util-linux,iproute2,procps,python3
packages=$packages,kmod,gcc,libc6-dev,libsqlite3-0,libssl3,libffi8,libbz2-1.0,liblzma5,libreadline8,libncursesw6,sudo
sources=/etc/apt/sources.list.d/debian.sources
[ -f $sources ] || sources=/etc/apt/sources.list
if [ ! -f "$VM/root.tar" ]; then
    . /etc/os-release
    mmdebstrap --variant=apt --aptopt='Apt::Install-Recommends "false"' --include=$packages \
        "$VERSION_CODENAME" "$VM/new.tar" $sources
    mv "$VM/new.tar" "$VM/root.tar"
fi

# ---- its disk: the packages, our interpreter with what is installed for the project, users, what it does once it is up

build_disk() {
    root=$VM/root
    rm -rf "$root"
    mkdir -p "$root"
    tar -C "$root" -xf "$VM/root.tar"
    prefix=$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')
    if [ "$prefix" != /usr ]; then
        tar -cf - --exclude='*.a' --exclude=site-packages --exclude=lib/python3.*/test -C / "${prefix#/}" | tar -C "$root" -xf -
        mkdir -p "$(echo "$root$prefix"/lib/python3.*)/site-packages"
    fi
    big='torch nvidia warp playwright functorch triton pyarrow'  # no test of this machine's kind needs them
    set -- $(for name in $big; do echo "--exclude=site-packages/$name"; done)
    tar -cf - "$@" -C / "${here#/}/.venv" | tar -C "$root" -xf -
    at=$root$prefix
    while [ "$at" != "$root" ]; do chmod a+rx "$at"; at=$(dirname "$at"); done  # other users run it as well
    mkdir -p "$root/lib/modules" "$root/quota" "$root/var/lib/systemd/linger"
    cp -r /usr/lib/uml/modules/* "$root/lib/modules/"
    for release in "$root"/lib/modules/*; do chroot "$root" depmod "$(basename "$release")"; done
    printf 'quota_v2\nloop\n' > "$root/etc/modules"
    printf '/dev/ubda / ext4 noatime 0 1\n/dev/ubdb /quota ext4 prjquota,noatime 0 0\n' > "$root/etc/fstab"
    chroot "$root" useradd -m -s /bin/bash ada
    : > "$root/var/lib/systemd/linger/ada"
    cat > "$root/etc/systemd/system/tests.service" <<UNIT
[Unit]
After=systemd-user-sessions.service systemd-logind.service
[Service]
Environment=HOME=/root LANG=C.UTF-8
ExecStartPre=mount -t hostfs none /mnt -o $VM/share
ExecStart=/bin/bash /mnt/tests.sh
ExecStopPost=systemctl poweroff
UNIT
    ln -s ../tests.service "$root/etc/systemd/system/multi-user.target.wants/tests.service"
    rm -f "$VM/root.img"
    truncate -s 8G "$VM/root.img"
    mkfs.ext4 -q -d "$root" "$VM/root.img"
    rm -rf "$root"
    touch "$VM/built"
}
[ "$VM/built" -nt requirements.lock ] && [ "$VM/built" -nt tools/vm.sh ] || build_disk
rm -f "$VM/quota.img"
truncate -s 4G "$VM/quota.img"
mkfs.ext4 -q -O quota,project -E quotatype=prjquota "$VM/quota.img"

# ---- what it does

git archive HEAD > "$VM/share/project.tar"
rm -f "$VM/share/rc" "$VM/share/out"
cat > "$VM/share/tests.sh" <<DO
exec > /mnt/out 2>&1
mkdir -p $here && cd $here && find . -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +  # of the run before
tar -xf /mnt/project.tar --no-same-owner
chmod 755 $here
shown='$here/.venv/bin/sublet doctor | grep -E "platform|guests|leases|tenants"
    $here/.venv/bin/sublet run --memory 200MiB -- sh -c "cat /proc/self/cgroup"
    $here/.venv/bin/sublet down > /dev/null'
uname -rsv; stat -fc 'control groups: %T' /sys/fs/cgroup; systemctl --version | head -1; grep /quota /proc/mounts
echo; echo "as root"; bash -c "\$shown"
echo; echo "as a user who lingers"; su - ada -c "\$shown"
echo
$here/.venv/bin/python -m pytest -q -rfEs -p no:cacheprovider --timeout=600 --basetemp=/quota/t $*
echo \$? > /mnt/rc
DO
echo "the machine starts; what it says is in $VM/share/out"
TMPDIR=/dev/shm timeout -k 10 "$LIMIT" linux.uml mem=6144M ubd0="$VM/root.img" ubd1="$VM/quota.img" root=/dev/ubda rw \
    uml_dir="$VM/uml" con=null con0=null,fd:1 ssl=null quiet < /dev/null > "$VM/console" 2>&1 || true
cat "$VM/share/out"
[ -f "$VM/share/rc" ] || die "it did not come to an end within $LIMIT s; its console is in $VM/console"
exit "$(cat "$VM/share/rc")"
