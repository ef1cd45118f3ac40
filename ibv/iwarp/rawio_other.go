//go:build !linux && !darwin && !illumos && !openbsd

package iwarp

// haveRawIO is false: only calls of package net are used here.
const haveRawIO = false

func readv(uintptr, [][]byte) (int, bool, error)  { panic("iwarp: no raw descriptors on this system") }
func writev(uintptr, [][]byte) (int, bool, error) { panic("iwarp: no raw descriptors on this system") }
