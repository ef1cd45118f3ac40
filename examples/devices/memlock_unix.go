//go:build unix && !solaris && !illumos && !aix

package main

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// memlock is RLIMIT_MEMLOCK in words.
func memlock() string {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim); err != nil {
		return err.Error()
	}
	if lim.Cur == unix.RLIM_INFINITY {
		return "none"
	}
	const enough = 64 << 20
	if lim.Cur < enough {
		return fmt.Sprintf("%d KiB, which is little for RDMA devices that lock memory (ulimit -l unlimited)", lim.Cur>>10)
	}
	return fmt.Sprintf("%d KiB", lim.Cur>>10)
}
