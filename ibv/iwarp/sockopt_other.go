//go:build !linux

package iwarp

// notSent is how many bytes the socket holds that were not sent yet, which these systems
// do not tell.
func notSent(uintptr) int { return 0 }

// cork does nothing on these systems: what is written is sent at once.
func cork(uintptr) {}
