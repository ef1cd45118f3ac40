package processor

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A thread that may run on one processor only is on that one.
func TestCurrent(t *testing.T) {
	if _, known := Current(); !known {
		if runtime.GOARCH == "amd64" {
			t.Log("this kernel has no segment for it")
		}
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	defer unix.SchedSetaffinity(0, &all)
	for i := range 1024 {
		if !all.IsSet(i) {
			continue
		}
		var one unix.CPUSet
		one.Set(i)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			t.Fatal(err)
		}
		for range 1000 {
			if n, known := Current(); !known || n != uint32(i) {
				t.Fatalf("on processor %d: %d, %v", i, n, known)
			}
		}
	}
}

func BenchmarkCurrent(b *testing.B) {
	for b.Loop() {
		Current()
	}
}
