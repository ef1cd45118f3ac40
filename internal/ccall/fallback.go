//go:build linux && cgo && ((!amd64 && !arm64) || race || asan || msan || go1.27)

package ccall

import "unsafe"

// Direct reports whether [Call] goes around cgo in this build.
const Direct = false

// Call calls fn, a C function int fn(void *arg), and returns its result. The function must
// not wait, must not call Go, and must not keep arg. arg may be on the goroutine's stack,
// and may point to Go memory. Several goroutines may use Call at once.
func Call(fn, arg unsafe.Pointer) int32 { return Cgo(fn, arg) }
