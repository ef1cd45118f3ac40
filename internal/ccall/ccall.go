// Package ccall calls C functions that return at once.
//
// A call by cgo first tells the scheduler that this thread may not return for long. In a
// process that has slept this wakes the runtime's monitor thread. That thread then runs
// every 20 µs, on a processor that the program could use. For a program that waits for a
// message, answers and waits again, this costs more than everything else. [Call] does not
// tell the scheduler. It keeps the processor, like a call of a Go function without a loop.
// [Cgo] is the call by cgo, for C functions that may enter the kernel.
package ccall

// The second half of a call by cgo is runtime.asmcgocall, which runs C on the thread's own
// stack. The runtime uses it alone for the C functions that it needs itself. Call does the
// same, with these consequences:
//
//   - Nothing preempts the goroutine in C. Garbage collections wait until it is back, so its stack is
//     not scanned meanwhile, nor moved.
//   - C has as much stack as with cgo, and takes no memory for it.
//   - A fault in C, the overflow of its stack included, ends the process as with cgo: with the signal,
//     its address, and the stacks of all goroutines, the caller's first.
//   - The profiler finds no Go function at the PC and accounts the time to code outside Go.
//
// asmcgocall is reached by linkname. The linker permits that because the runtime's Go code
// calls the same function, but Go does not guarantee it. So Call works in this way only in
// versions of Go that have passed the tests. In a newer version Call uses cgo, until the
// version is raised in direct.go and fallback.go.
//
// Call also uses cgo with the sanitizers, which do not know such calls. It does with the
// race detector, which must know that C may order what goroutines do. And it does on other
// processors, which were not tried.
