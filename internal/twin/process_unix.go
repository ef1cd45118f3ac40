//go:build unix && !aix && !netbsd

package twin

import (
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// processes reports whether an end can have a process of its own.
const processes = true

// stop stops a process, as a debugger or the freezer of a container does. resume has it go on.
func stop(p *os.Process) error   { return p.Signal(syscall.SIGSTOP) }
func resume(p *os.Process) error { return p.Signal(syscall.SIGCONT) }

// ownGroup has a process be the only one of its group. If this process is killed while that one is
// stopped, the kernel ends it then.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// monotonic returns the time of a clock that all processes of the machine share.
func monotonic() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err)
	}
	return time.Duration(t.Nano())
}
