package rdmanet_test

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// placeProcess has this process run on one processor, or does nothing if it is negative. restore
// has it run where it ran before.
func placeProcess(processor int) (restore func() error, err error) {
	if processor < 0 {
		return func() error { return nil }, nil
	}
	var before, set unix.CPUSet
	if err := unix.SchedGetaffinity(os.Getpid(), &before); err != nil {
		return nil, os.NewSyscallError("sched_getaffinity", err)
	}
	set.Set(processor)
	if err := setAffinity(&set); err != nil {
		return nil, fmt.Errorf("processor %d: %w", processor, err)
	}
	return func() error { return setAffinity(&before) }, nil
}

// setAffinity sets the affinity of all threads of the process. A thread has that of the one that
// has created it, so all have it when no new one has appeared meanwhile.
func setAffinity(set *unix.CPUSet) error {
	done := make(map[int]bool)
	for {
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return err
		}
		added := false
		for _, t := range threads {
			tid, err := strconv.Atoi(t.Name())
			if err != nil || done[tid] {
				continue
			}
			// A thread may have ended.
			if err := unix.SchedSetaffinity(tid, set); err != nil && !errors.Is(err, unix.ESRCH) {
				return os.NewSyscallError("sched_setaffinity", err)
			}
			done[tid], added = true, true
		}
		if !added {
			return nil
		}
	}
}

// processorTime is what this process has used, in user and in kernel mode.
func processorTime() (time.Duration, error) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0, os.NewSyscallError("getrusage", err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}
