package regmem

import (
	"fmt"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// Advice has the names of the settings that an error recommends to lower when a device
// registers no more memory.
type Advice struct {
	Buffers   string // Buffers names the setting for the number of buffers.
	Transfers string // Transfers names the setting for the memory of transfers.
}

// noMemory returns the error for bytes that a device did not register because of err. It
// matches errno.ENOBUFS and err. setting is a field of Advice.
func noMemory(dev ibv.Device, bytes int, setting string, err error) error {
	return fmt.Errorf("%w: %d bytes of registered memory on %s: %w (raise the limit on locked memory, ulimit -l, or lower %s)",
		errno.ENOBUFS, bytes, dev.Name(), err, setting)
}
