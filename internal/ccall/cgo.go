//go:build linux && cgo && ((!amd64 && !arm64) || race || asan || msan || rdmanet_cgocall || go1.27)

package ccall

/*
static int call(int (*fn)(void *), void *arg) { return fn(arg); }
#cgo noescape call
#cgo nocallback call
*/
import "C"

import "unsafe"

// Call calls fn, a C function int fn(void *arg), and returns its result. The function must
// not wait, must not call Go, and must not keep arg. arg may be on the goroutine's stack,
// and may point to Go memory. Several goroutines may use Call at once.
func Call(fn, arg unsafe.Pointer) int32 { return int32(C.call((*[0]byte)(fn), arg)) }
