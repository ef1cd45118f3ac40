//go:build !linux || !cgo

package rdmacore

import (
	"fmt"
	"runtime"

	"github.com/rdmanet/rdmanet/ibv"
)

// New reports that there are no devices in this build. The error matches
// errors.ErrUnsupported.
func New(Config) (ibv.Provider, error) {
	if runtime.GOOS != "linux" {
		return nil, ibv.Unsupported(Name, "rdma-core is for Linux, this is "+runtime.GOOS)
	}
	return nil, fmt.Errorf("%w; build it with CGO_ENABLED=1 and a C compiler", ibv.Unsupported(Name, "this program was built without cgo"))
}
