// Package processor says on which processor the caller runs.
package processor

// Current returns the number of the processor that runs the caller at this moment. The
// caller may be on another one when it looks at the number. known is false on systems where
// a program cannot find out in less time than a system call takes.
func Current() (n uint32, known bool) { return current() }
