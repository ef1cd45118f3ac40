# shellcheck shell=bash
# Starts the guests, follows them, and ends them. Each has a control folder,
# $temp/1 or $temp/2, by which vm/run and vm/guest talk:
#
#	guest, settings, command, environment, directory  what to do
#	ready             the guest is about to run the command, and for how many seconds it is up
#	go                with two guests: both are ready
#	stdout, stderr    what the command prints
#	status            the exit status; the guest may be ended
#	console           what the kernel prints

pids=()    # of the timeout commands that QEMU runs under
readers=() # what copies the guests' output

# settings NAME... prints variables as lines that any shell can read.
settings() {
	local name
	for name; do
		echo "$name='${!name//\'/\'\\\'\'}'"
	done
}

# control ROLE makes the control folder of a guest.
control() {
	local dir=$temp/$1 role=$1
	rm -rf "$dir"
	mkdir "$dir"
	cp "$vm/guest" "$dir/guest"
	chmod +x "$dir/guest"
	touch "$dir"/{stdout,stderr,console}
	settings device guests role memlock leaks smb results modules release >"$dir/settings"
	printf '%s\0' "${command[@]}" >"$dir/command"
	printf '%s\0' "${environment[@]}" >"$dir/environment"
	printf %s "$PWD" >"$dir/directory"
}

# share PATH TAG FLAGS... adds a folder to the arguments of QEMU.
share() {
	local path=${1//,/,,} tag=$2
	shift 2
	arguments+=(-virtfs "local,path=$path,mount_tag=$tag,security_model=none,multidevs=remap$*")
}

# tsc_option prints the kernel's option for the frequency of the processor's counter, which a
# guest has from the host. So its kernel need not measure it, which may go wrong on a busy
# machine: clocks that ran many times too fast were seen. The loops per second that the host
# prints are worked out from the frequency of a constant counter.
tsc_option() {
	awk '/^bogomips/ { loops = $3 } / constant_tsc / { constant = 1 }
		END { if (constant && loops > 0) printf "tsc_early_khz=%d", loops * 500 }' /proc/cpuinfo
}

# guest_start ROLE starts a guest.
guest_start() {
	local role=$1 dir=$temp/$1
	local arguments=(
		-machine q35 -cpu max -smp "$cpus" -m "$mem"
		-display none -monitor none -nodefaults -no-user-config -no-reboot
		-serial "file:${dir//,/,,}/console"
		-kernel "$kernel" -initrd "$initramfs"
		-append "console=ttyS0 quiet panic=-1 oops=panic tsc=reliable mitigations=off maxcpus=1 lpj=8000000 $(tsc_option)"
	)
	arguments+=(-accel "tcg,thread=multi")
	share / host ,readonly=on
	share "$dir" control
	[[ -z $results ]] || share "$results" results
	if ((guests == 2)); then
		# A stream loses no frame: what is lost, tc netem has dropped.
		local server=off
		((role == 1)) && server=on
		arguments+=(
			-netdev "stream,id=net,server=$server,addr.type=unix,addr.path=${temp//,/,,}/wire"
			-device "virtio-net-pci,netdev=net,mac=52:54:00:77:01:0$role"
		)
	fi
	# QEMU dies with this script, even when that is killed without warning.
	setpriv --pdeathsig TERM timeout -k 5 "$timeout" \
		qemu-system-x86_64 "${arguments[@]}" </dev/null >"$dir/qemu" 2>&1 &
	pids[role]=$!
}

# follow ROLE NAME prints what is added to a file of the guest until it ends.
follow() {
	local file=$temp/$1/$2 pid=${pids[$1]}
	if ((guests == 1)); then
		tail -c +1 -s 0.1 -f --pid="$pid" "$file" 2>/dev/null
	else
		tail -c +1 -s 0.1 -f --pid="$pid" "$file" 2>/dev/null | stdbuf -oL sed "s/^/$1: /"
	fi
}

start() {
	local role
	pids=() readers=()
	rm -f "$temp/wire" # of a guest that died: nobody listens there
	for ((role = 1; role <= guests; role++)); do
		control "$role"
		guest_start "$role"
		((role == guests)) || until [[ -S $temp/wire ]] || ! kill -0 "${pids[role]}" 2>/dev/null; do sleep 0.05; done
		follow "$role" stdout &
		readers+=($!)
		follow "$role" stderr >&2 &
		readers+=($!)
		[[ -z $verbose ]] || {
			follow "$role" console >&2 &
			readers+=($!)
		}
	done
}

# stop ends the guests that still run, and waits for what they print.
stop() {
	((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true
	wait "${pids[@]}" "${readers[@]}" 2>/dev/null || true
	pids=() readers=()
}

alive() { kill -0 "${pids[$1]}" 2>/dev/null; }

# wait_until_ready waits until all guests are about to run the command. It
# fails when one died or hung on the way, or its clock is far too fast, which
# booting again may cure, and ends the run when that would not help.
wait_until_ready() {
	local role begin=$SECONDS patience=$((SECONDS + 180))
	for ((role = 1; role <= guests; role++)); do
		until [[ -e $temp/$role/ready ]]; do
			if [[ -e $temp/$role/status ]]; then
				exit 125 # and the guest has said why
			fi
			if ! alive "$role"; then
				! timed_out "$role" || exit 124
				[[ ! -s $temp/$role/qemu ]] || die "QEMU failed: $(cat "$temp/$role/qemu")"
				return 1
			fi
			((SECONDS < patience)) || return
			sleep 0.1
		done
		# No guest has been up for longer than QEMU has, unless its clock is wrong.
		(($(cat "$temp/$role/ready") <= SECONDS - begin + 5)) || return
	done
	for ((role = 1; role <= guests; role++)); do
		: >"$temp/$role/go"
	done
}

# wait_until_done waits until all guests are done or one has died, ends them,
# and sets status: the first that is not zero.
wait_until_done() {
	local role running outcome=()
	status=0
	while ((${#outcome[@]} < guests)); do
		for ((role = 1; role <= guests; role++)); do
			[[ -z ${outcome[role]-} ]] || continue
			running=yes
			alive "$role" || running=
			if [[ -s $temp/$role/status ]]; then
				outcome[role]=$(cat "$temp/$role/status")
				((status)) || status=${outcome[role]}
			elif [[ -z $running ]]; then
				guest_died "$role"
				break 2
			fi
		done
		sleep 0.05
	done
	stop
}

# guest_died ROLE tells of a guest that died while it ran the command, and sets
# status.
guest_died() {
	local result=124
	timed_out "$1" || {
		show_death "$1"
		result=125
	}
	((status)) || status=$result
}

# timed_out ROLE tells whether a guest that has ended did so for the timeout.
timed_out() {
	local ended=0
	wait "${pids[$1]}" || ended=$?
	unset "pids[$1]"
	((ended == 124 || ended == 137)) || return
	say "guest $1 was ended after $timeout"
}

# show_death ROLE tells what the kernel of a dead guest printed last.
show_death() {
	say "guest $1 died:"
	cat "$temp/$1/qemu" >&2
	if grep -q 'Oops\|BUG\|panic' "$temp/$1/console"; then
		sed -n '/Oops\|BUG\|panic/,$p' "$temp/$1/console" >&2
	else
		tail -n 20 "$temp/$1/console" >&2
	fi
}
