//go:build linux && cgo && (amd64 || arm64) && !race && !asan && !msan && !rdmanet_cgocall

package ccall

import (
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"unsafe"
)

// stackSize is far more than the verbs of any library take; only what is used becomes memory.
const stackSize = 256 << 10

// stack is one for C, which grows down. Below it is a page that cannot be written: who needs more dies there.
type stack struct{ mem []byte }

// As many are in use as goroutines run, which is what a sync.Pool is made for.
var stacks = sync.Pool{New: func() any { return newStack() }}

func newStack() *stack {
	guard := syscall.Getpagesize()
	mem, err := syscall.Mmap(-1, 0, guard+stackSize, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANONYMOUS|syscall.MAP_NORESERVE|syscall.MAP_STACK)
	if err == nil {
		err = syscall.Mprotect(mem[:guard], syscall.PROT_NONE)
	}
	if err != nil {
		panic(fmt.Sprintf("ccall: no memory for a stack of %d bytes: %v", stackSize, err))
	}
	s := &stack{mem}
	runtime.AddCleanup(s, func(mem []byte) { syscall.Munmap(mem) }, mem)
	return s
}

// Call calls fn, a C function int fn(void *arg), and returns what it returns. The function must not
// wait, nor call Go; it must not keep arg, which may be on the goroutine's stack and may point to
// Go memory. It has 256 KiB of stack. Call may be used by several goroutines at once.
func Call(fn, arg unsafe.Pointer) int32 {
	s := stacks.Get().(*stack)
	rc := call(fn, arg, uintptr(unsafe.Pointer(&s.mem[0]))+uintptr(len(s.mem)))
	stacks.Put(s)
	return rc
}

// call is written in assembler.
//
//go:noescape
func call(fn, arg unsafe.Pointer, top uintptr) int32
