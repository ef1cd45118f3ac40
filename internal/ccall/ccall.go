// Package ccall calls C functions that return at once.
//
// A call by cgo first tells the scheduler that this thread may not come back for long. Where a process
// has slept that wakes the runtime's monitor thread, which then looks around every 20 µs on a
// processor that the program could use: for a program that waits for a message, answers and waits
// again, more than all the rest takes. [Call] does nothing of the kind. It keeps the processor, as a
// call of a Go function does that has no loop.
package ccall

// The second half of a call by cgo is runtime.asmcgocall, which runs C on the thread's own stack. Package
// runtime uses it alone for the C functions that it needs itself, and so does Call. What follows from it:
//
//   - Nothing preempts the goroutine in C. Garbage collections wait until it is back, so its stack is
//     not scanned meanwhile, nor moved.
//   - C has as much stack as with cgo, and takes no memory for it.
//   - A fault in C, the overflow of its stack included, ends the process as with cgo: with the signal,
//     its address, and the stacks of all goroutines, the caller's first.
//   - The profiler finds no Go function at the PC and accounts the time to code outside Go.
//
// The name is reached by linkname. The linker permits that because the runtime's Go code calls the same
// function, but Go does not promise it. So only the versions of Go that the tests have passed with are built
// this way; a newer one calls by cgo until its number is raised in direct.go and cgo.go.
//
// The sanitizers know nothing of such calls, the race detector has to be told that C may order what
// goroutines do, and other processors were not tried: there it is a call by cgo as well. The
// build tag rdmanet_cgocall asks for that everywhere.
