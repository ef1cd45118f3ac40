# shellcheck shell=bash
# patiently COMMAND... tries again what fails: others may hold apt's locks, and
# mirrors have bad moments.
patiently() {
	local pause
	for pause in 10 20 40; do
		"$@" && return
		sleep "$pause"
	done
	"$@"
}
