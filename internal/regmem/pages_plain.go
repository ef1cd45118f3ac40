//go:build !linux

package regmem

import "errors"

func smallPages([]byte) {}

const dropsPages = false

// dropPages does nothing: no call of this system is known to give pages back as it should.
func dropPages([]byte) error { return errors.ErrUnsupported }
