//go:build !linux

package rdmanet

import "errors"

func smallPages([]byte) {}

const dropsPages = false

// dropPages is not known to do what it says on this system, so it does nothing.
func dropPages([]byte) error { return errors.ErrUnsupported }
