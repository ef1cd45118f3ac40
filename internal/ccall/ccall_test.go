//go:build linux && cgo

package ccall

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/pprof"
	"runtime/trace"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/ccall/ccalltest"
)

// ways are the two ways to call C.
var ways = map[string]func(fn, arg unsafe.Pointer) int32{"direct": Call, "cgo": Cgo}

func TestCall(t *testing.T) {
	for name, call := range ways {
		t.Run(name, func(t *testing.T) {
			s := ccalltest.NewSum(40, 2)
			require.EqualValues(t, -7, call(ccalltest.AddUp, unsafe.Pointer(&s)))
			sum, aligned := ccalltest.Result(&s)
			require.EqualValues(t, 42, sum)
			require.True(t, aligned, "C's stack is aligned as the ABI wants it")
		})
	}
}

func TestCallDeep(t *testing.T) {
	n := uintptr(254 << 10) // more than a goroutine's stack begins with
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
		Cgo(ccalltest.AddUp, unsafe.Pointer(&s))
	}))
}

// BenchmarkCall compares the two ways, for a function that returns at once.
func BenchmarkCall(b *testing.B) {
	b.Run("direct", func(b *testing.B) {
		s := ccalltest.NewSum(1, 2)
		for b.Loop() {
			Call(ccalltest.AddUp, unsafe.Pointer(&s))
		}
	})
	b.Run("cgo", func(b *testing.B) {
		s := ccalltest.NewSum(1, 2)
		for b.Loop() {
			Cgo(ccalltest.AddUp, unsafe.Pointer(&s))
		}
	})
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

// childEnv names what a test is to do as the child process that it has started.
const childEnv = "CCALL_CHILD"

// child runs the test once more, in a process that calls do and ends. It returns what that process has printed.
func child(t *testing.T, do func()) (string, error) {
	if os.Getenv(childEnv) == t.Name() {
		do()
		os.Exit(0)
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+strings.ReplaceAll(t.Name(), "/", "$/^")+"$")
	cmd.Env = append(os.Environ(), childEnv+"="+t.Name(), "GOTRACEBACK=single")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// A fault in C, and a stack that is used up, end the process: no recover goes on with memory that
// C has left half changed. What the process prints names the signal and shows who has called C, and
// where the other goroutines are. Of a stack that is used up it names the signal at least: Go's
// runtime prints the stack's memory first, as it does for cgo, and on threads other than the first
// one it may meet the guard page there.
func TestCallFaultIsFatal(t *testing.T) {
	null, nowhere := uintptr(8), uintptr(0x10_0000_1238)
	for name, fault := range map[string]func(){
		"null":     func() { Call(ccalltest.Crash, unsafe.Pointer(&null)) },
		"address":  func() { Call(ccalltest.Crash, unsafe.Pointer(&nowhere)) },
		"below":    func() { Call(ccalltest.CrashBelow, unsafe.Pointer(&null)) },
		"function": func() { Call(nil, nil) },
		"stack":    func() { Call(ccalltest.Overflow, unsafe.Pointer(&null)) },
	} {
		t.Run(name, func(t *testing.T) {
			out, err := child(t, func() {
				idle := make(chan int)
				go func() { idle <- 0; bystander(idle) }()
				<-idle
				defer func() {
					recover()
					os.Exit(0)
				}()
				fault()
			})
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, "%s", out)
			require.Contains(t, out, "SIGSEGV: segmentation violation")
			if name == "stack" {
				return
			}
			require.Contains(t, out, "internal/ccall.TestCallFaultIsFatal", "the caller's stack")
			require.Contains(t, out, "internal/ccall.bystander", "another goroutine's stack")
			if name == "address" {
				require.Contains(t, out, "addr=0x1000001238")
			}
		})
	}
}

func bystander(idle chan int) { idle <- 1 }

// Where no memory can be mapped any more C is called all the same.
func TestCallWithoutMemory(t *testing.T) {
	out, err := child(t, func() {
		s := ccalltest.NewSum(40, 2)
		// The process has more than that already, so every mapping is refused from here on.
		if err := syscall.Setrlimit(syscall.RLIMIT_AS, &syscall.Rlimit{Cur: 1, Max: 1}); err != nil {
			fmt.Println("setrlimit:", err)
			os.Exit(1)
		}
		Call(ccalltest.AddUp, unsafe.Pointer(&s))
		sum, _ := ccalltest.Result(&s)
		os.Stdout.WriteString([]string{"wrong", "right"}[sum/42])
	})
	require.NoError(t, err, "%s", out)
	require.Equal(t, "right", out)
}
