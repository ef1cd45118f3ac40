package rdmacore

import "os"

// Present reports whether the kernel has an RDMA device, without loading a
// library. It is always false on systems other than Linux.
func Present() bool {
	devices, err := os.ReadDir("/sys/class/infiniband")
	return err == nil && len(devices) > 0
}
