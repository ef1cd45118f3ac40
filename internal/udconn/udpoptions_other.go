//go:build !linux

package udconn

import "syscall"

// dontFragment does nothing: a datagram that fits the interface leaves in one piece.
func dontFragment(string, syscall.RawConn) error { return nil }

// ownGroups does nothing: a socket receives only from the groups that it has joined.
func ownGroups(string, syscall.RawConn) error { return nil }
