//go:build linux && cgo

package ccall

/*
static int call(int (*fn)(void *), void *arg) { return fn(arg); }
#cgo noescape call
#cgo nocallback call
*/
import "C"

import "unsafe"

// Cgo is like [Call], but it tells the scheduler. So fn may wait, or enter the kernel for
// long.
func Cgo(fn, arg unsafe.Pointer) int32 { return int32(C.call((*[0]byte)(fn), arg)) }
