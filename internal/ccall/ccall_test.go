//go:build linux && cgo

package ccall

import (
	"bytes"
	"os"
	"os/exec"
	"runtime"
	"runtime/pprof"
	"runtime/trace"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/ccall/ccalltest"
)

func TestCall(t *testing.T) {
	s := ccalltest.NewSum(40, 2)
	require.EqualValues(t, -7, Call(ccalltest.AddUp, unsafe.Pointer(&s)))
	sum, aligned := ccalltest.Result(&s)
	require.EqualValues(t, 42, sum)
	require.True(t, aligned, "C's stack is aligned as the ABI wants it")
}

func TestCallDeep(t *testing.T) {
	n := uintptr(254 << 10) // as much as it says it has, but for what the call itself takes
	require.EqualValues(t, 1, Call(ccalltest.Deep, unsafe.Pointer(&n)))
}

func TestCallErrno(t *testing.T) {
	clock := int32(12345)
	require.EqualValues(t, -int32(syscall.EINVAL), Call(ccalltest.Errno, unsafe.Pointer(&clock)))
}

func TestCallAllocatesNothing(t *testing.T) {
	require.Zero(t, testing.AllocsPerRun(100, func() {
		s := ccalltest.NewSum(1, 2)
		Call(ccalltest.AddUp, unsafe.Pointer(&s))
	}))
}

// What Go keeps in registers is there again.
func TestCallRegisters(t *testing.T) {
	for range 1000 {
		a, b := 1.5, 2.5
		var zero [64]byte
		Call(ccalltest.Registers, nil)
		var again [64]byte
		require.Equal(t, 4.0, a+b)
		require.Equal(t, zero, again)
	}
}

// What went before one call the race detector takes as done before what comes after
// another: C may have told, and so may the device that it drives.
func TestCallOrders(t *testing.T) {
	for range 100 {
		flag, said := new(int32), 0
		go func() {
			said = 42
			Call(ccalltest.Tell, unsafe.Pointer(flag))
		}()
		for Call(ccalltest.Told, unsafe.Pointer(flag)) == 0 {
			runtime.Gosched()
		}
		require.Equal(t, 42, said)
	}
}

// Garbage collections, stacks that move, preemption, the profiler's and the
// tracer's signals: whatever interrupts a goroutine may do so in C.
func TestCallInterrupted(t *testing.T) {
	require.NoError(t, pprof.StartCPUProfile(new(bytes.Buffer)))
	defer pprof.StopCPUProfile()
	require.NoError(t, trace.Start(new(bytes.Buffer)))
	defer trace.Stop()

	stop := make(chan struct{})
	var wg sync.WaitGroup
	for g := range int64(4) {
		wg.Go(func() {
			for i := int64(0); ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if sum := onNewStack(g, i); sum != g+i {
					t.Errorf("%d+%d = %d", g, i, sum)
					return
				}
			}
		})
	}
	for range 10 {
		runtime.GC()
		spin := int64(500 * time.Microsecond)
		Call(ccalltest.Spin, unsafe.Pointer(&spin))
		pprof.Lookup("goroutine").WriteTo(new(bytes.Buffer), 2) // stops the world and walks stacks
	}
	close(stop)
	wg.Wait()
}

// onNewStack calls C from a goroutine whose stack grows at various depths.
func onNewStack(a, b int64) int64 {
	c := make(chan int64)
	go func() { c <- grow(int(b%64), a, b) }()
	return <-c
}

//go:noinline
func grow(depth int, a, b int64) int64 {
	var frame [256]byte
	if depth > 0 {
		frame[depth] = byte(b)
		sum := grow(depth-1, a, b)
		return sum + int64(frame[depth]) - int64(byte(b))
	}
	spin := int64(20 * time.Microsecond)
	Call(ccalltest.Spin, unsafe.Pointer(&spin))
	s := ccalltest.NewSum(a, b)
	Call(ccalltest.AddUp, unsafe.Pointer(&s))
	sum, _ := ccalltest.Result(&s)
	return sum
}

// A fault in C, and a stack that is used up, end the process: no recover goes on
// with memory that C has left half changed.
func TestCallFaultIsFatal(t *testing.T) {
	for name, fault := range map[string]func(){
		"address": func() {
			var nowhere uintptr = 8
			Call(ccalltest.Crash, unsafe.Pointer(&nowhere))
		},
		"stack": func() {
			n := uintptr(16 << 20)
			Call(ccalltest.Deep, unsafe.Pointer(&n))
		},
	} {
		t.Run(name, func(t *testing.T) {
			if os.Getenv("CCALL_FAULT") == name {
				defer func() {
					recover()
					os.Exit(0)
				}()
				fault()
				os.Exit(0)
			}
			cmd := exec.Command(os.Args[0], "-test.run", t.Name())
			cmd.Env = append(os.Environ(), "CCALL_FAULT="+name)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, "%s", out)
		})
	}
}
