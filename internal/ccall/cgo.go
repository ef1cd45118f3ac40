//go:build linux && cgo && ((!amd64 && !arm64) || race || asan || msan || rdmanet_cgocall || go1.27)

package ccall

/*
static int call(int (*fn)(void *), void *arg) { return fn(arg); }
#cgo noescape call
#cgo nocallback call
*/
import "C"

import "unsafe"

// Call calls fn, a C function int fn(void *arg), and returns what it returns. The function must not
// wait, nor call Go; it must not keep arg, which may be on the goroutine's stack and may point to
// Go memory. Call may be used by several goroutines at once.
func Call(fn, arg unsafe.Pointer) int32 { return int32(C.call((*[0]byte)(fn), arg)) }
