# shellcheck shell=bash
# Debian's kernel for the guests, unpacked into the cache. The host needs none
# of it installed.

# kernel_choose sets release to the kernel to boot: $RDMANET_VM_KERNEL, or the
# newest in the cache, or the newest that the package lists offer with headers
# to build modules for it.
kernel_choose() {
	release=${RDMANET_VM_KERNEL:-}
	[[ -z $release ]] || return 0
	release=$(printf '%s\n' "$cache"/kernel-[0-9]*/ | sed -n 's,.*/kernel-\([0-9][^*]*\)/$,\1,p' | sort -V | tail -n 1)
	[[ -z $release ]] || return 0

	need apt-cache
	release=$(apt-cache pkgnames linux- | awk '
		sub(/^linux-image-/, "") && /^6\.12\.[0-9]+\+deb[0-9]+-amd64$/ { image[$0] }
		sub(/^linux-headers-/, "") { headers[$0] }
		END { for (r in image) if (r in headers) print r }' | sort -V | tail -n 1)
	[[ -n $release ]] || die "the package lists offer no linux-image-6.12.*+deb*-amd64 with its headers:" \
		"run apt-get update; on Debian 12 the kernel is in bookworm-security"
}

# download PACKAGE[=VERSION]... puts packages into the current folder.
download() {
	need apt-get dpkg
	apt-get download -qq -o APT::Sandbox::User=root "$@" ||
		die "cannot download $*: run apt-get update, and see that the network reaches Debian's packages"
}

# kernel_unpack makes vmlinuz and lib/modules in the current folder.
kernel_unpack() {
	need depmod
	say "fetching Linux $release (110 MB, once)"
	download "linux-image-$release"
	dpkg -x ./linux-image-*.deb unpacked
	mv "unpacked/boot/vmlinuz-$release" vmlinuz
	mkdir lib
	mv unpacked/lib/modules lib
	depmod -b . "$release"
	rm -rf unpacked ./*.deb
}

# initramfs_make makes the file initramfs in the current folder: busybox,
# vm/init, and the modules that give init the host's files.
initramfs_make() {
	local busybox module order=0
	need cpio modprobe xz
	busybox=$(command -v busybox) || die "not installed: busybox-static; run vm/install"
	mkdir -p tree/bin tree/modules
	cp "$busybox" tree/bin/busybox
	cp "$vm/init" tree/init
	modprobe -a -d "$cache/kernel-$release" -S "$release" --show-depends virtio_pci 9pnet_virtio 9p overlay |
		awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >modules
	while read -r module; do
		local name=${module##*/}
		printf -v name 'tree/modules/%02d-%s' "$((order++))" "${name%.xz}"
		if [[ $module == *.xz ]]; then xz -dc "$module"; else cat "$module"; fi >"$name"
	done <modules
	(cd tree && find . | cpio --quiet -o -H newc) >initramfs
	rm -rf tree modules
}

# kernel_get sets release and the paths kernel, initramfs and modules (which
# holds lib/modules), fetching and making what the cache lacks.
kernel_get() {
	kernel_choose
	cached "kernel-$release" kernel_unpack
	kernel=$cache/kernel-$release/vmlinuz
	modules=$cache/kernel-$release

	local name
	name=initramfs-$release-$(sum_of "$vm/init" "$vm/kernel.sh")
	cached "$name" initramfs_make
	initramfs=$cache/$name/initramfs
}
