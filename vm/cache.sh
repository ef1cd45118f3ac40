# shellcheck shell=bash
# The cache: folders named for what they hold and for the kernel they belong
# to. A folder is made aside and renamed when it is complete, so what is there
# under its name can be used without a lock.

cache=${RDMANET_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rdmanet-vm}

# The tools of the superuser are often missing from a user's PATH.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

say() { echo "vm: $*" >&2; }

die() {
	say "$@"
	exit 125
}

# need PROGRAM...: fails with advice when one of the programs is missing.
need() {
	local program missing=()
	for program; do
		command -v "$program" >/dev/null || missing+=("$program")
	done
	((${#missing[@]} == 0)) || die "not installed: ${missing[*]}; run vm/install"
}

# sum_of FILE... prints a short checksum, for the names of what is made by these
# files: when they change, what they made before is not used again.
sum_of() { cat "$@" | sha256sum | head -c 12; }

# cached NAME COMMAND...: unless the cache has a folder NAME, runs COMMAND in a
# new folder, which becomes NAME. Whoever comes second waits for the first.
cached() {
	local name=$1 dir=$cache/$1
	shift
	[[ -d $dir ]] && return
	mkdir -p "$cache" || die "cannot make the cache folder $cache"
	(
		flock 9
		[[ -d $dir ]] && exit
		rm -rf "$cache/.making-$name".* # of a run that was killed
		making=$(mktemp -d "$cache/.making-$name.XXXXXX")
		trap 'rm -rf "$making"' EXIT
		trap 'exit 130' INT TERM HUP
		cd "$making" || exit
		"$@"
		chmod 755 .
		mv -T "$making" "$dir"
	) 9>>"$cache/lock"
}
