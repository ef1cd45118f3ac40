// Package ccall calls C functions that return at once.
//
// A call by cgo first tells the scheduler that this thread may not come back for long. Where a process
// has slept that wakes the runtime's monitor thread, which then looks around every 20 µs on a
// processor that the program could use: for a program that waits for a message, answers and waits
// again, more than all the rest takes. [Call] does nothing of the kind. It keeps the processor, as a
// call of a Go function does that has no loop.
package ccall

// The runtime's own way for this (asmcgocall) cannot be reached from outside. So C gets a stack of ours,
// as a goroutine's is too small. What makes that sound:
//
//   - Nothing preempts the goroutine in C: the runtime takes a place for safe only in Go
//     code. Garbage collections wait until it is back, so its stack is not scanned meanwhile, nor moved.
//   - Signal handlers run on a stack of their own; the profiler's finds no Go function at the PC
//     and accounts the time to code outside Go.
//   - The C ABI leaves alone what the runtime keeps in registers and thread-local memory.
//
// A fault in C, which cgo would have turned into a fatal error, ends the process here too.
// The sanitizers know nothing of such stacks, the race detector has to be told that C may order what
// goroutines do, and other processors have no code for it here: there it is a call by cgo. The
// build tag rdmanet_cgocall asks for that everywhere.
