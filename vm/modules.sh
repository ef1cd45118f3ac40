# shellcheck shell=bash
# The modules that Debian's kernel lacks, built from Debian's source of it:
# siw (Soft-iWARP), and ksmbd and cifs with SMB Direct. In siw one fault is mended:
# whoever connects and closes before siw has accepted closes the listener, and the
# kernel may crash when its program ends.

# modules_get sets modules to a folder whose lib/modules has these too, building
# them when the cache lacks them.
modules_get() {
	local name
	name=modules-$release-$(sum_of "$vm/modules.sh" "$vm/siw-listener.patch")
	cached "$name" modules_build
	modules=$cache/$name
}

# modules_build makes lib/modules in the current folder: the kernel's, and in
# updates, which go before, our own.
modules_build() {
	need gcc make patch xz dpkg-deb
	local version updates
	version=$(apt-cache show "linux-headers-$release" | awk '/^Version: / && !found++ { print $2 }')
	say "building siw, ksmbd and cifs for Linux $release (170 MB to fetch, some minutes, once)"
	download "linux-headers-$release" "linux-headers-${release%-*}-common" "linux-kbuild-${release%-*}" \
		"linux-source-${release%.*}=$version"
	cp -al "$cache/kernel-$release/lib" lib
	updates=lib/modules/$release/updates
	mkdir "$updates"
	headers_unpack
	source_unpack

	# The switches for SMB Direct are not in the kernel's configuration, so the
	# compiler must be told of them too.
	module_build drivers/infiniband/sw/siw CONFIG_RDMA_SIW=m
	module_build fs/smb/server CONFIG_SMB_SERVER=m \
		CONFIG_SMB_SERVER_SMBDIRECT=y KCFLAGS=-DCONFIG_SMB_SERVER_SMBDIRECT=1
	module_build fs/smb/client CONFIG_CIFS=m \
		CONFIG_CIFS_SMB_DIRECT=y KCFLAGS=-DCONFIG_CIFS_SMB_DIRECT=1
	rm -rf headers source build.log ./*.deb
	depmod -b . "$release"
}

# headers_unpack makes headers, and the paths in them point to where they are.
headers_unpack() {
	local package
	for package in ./linux-headers-*.deb ./linux-kbuild-*.deb; do
		dpkg -x "$package" headers
	done
	# It is there for debugging data, which would take one more program to make.
	rm "headers/usr/src/linux-headers-$release/vmlinux"
	sed -i "s,/usr/src/,$PWD/headers/usr/src/," "headers/usr/src/linux-headers-$release/Makefile"
}

# source_unpack makes source, with the few folders of the kernel's that are
# needed, and in it what the kernel's own build would generate.
source_unpack() {
	local top=linux-source-${release%.*} spec
	mkdir source
	dpkg-deb --fsys-tarfile ./linux-source-*.deb | tar -xO "./usr/src/$top.tar.xz" | xz -dc |
		tar -x -C source --strip-components=1 \
			"$top/drivers/infiniband/sw/siw" "$top/fs/smb" "$top/fs/nls" \
			"$top/scripts/asn1_compiler.c" "$top/include/linux/asn1.h" "$top/include/linux/asn1_ber_bytecode.h"
	patch -s -p1 -d source <"$vm/siw-listener.patch" || die "siw-listener.patch does not fit Linux $release"
	gcc -O1 -w -I source/include -o source/asn1_compiler source/scripts/asn1_compiler.c
	for spec in source/fs/smb/*/*.asn1; do
		source/asn1_compiler "$spec" "$spec.c" "$spec.h"
	done
}

# module_build FOLDER SETTING... builds the one module of a folder.
module_build() {
	local folder=source/$1
	shift
	make -j2 -C "headers/usr/src/linux-headers-$release" M="$PWD/$folder" "$@" modules >build.log 2>&1 || {
		tail -n 30 build.log >&2
		die "cannot build $folder: are gcc-12 and libelf1 installed? run vm/install"
	}
	strip --strip-debug "$folder"/*.ko # nine tenths, which the guest would read
	mv "$folder"/*.ko "$updates"
}
