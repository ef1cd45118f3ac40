//go:build !linux

package rdmanet

import "syscall"

// dontFragment leaves it to the limit: what fits the interface leaves it in one piece.
func dontFragment(string, syscall.RawConn) error { return nil }

// ownGroups has nothing to do: a socket hears what it has joined.
func ownGroups(string, syscall.RawConn) error { return nil }
