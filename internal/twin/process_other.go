//go:build !unix || aix || netbsd

package twin

import (
	"errors"
	"os"
	"syscall"
	"time"
)

const processes = false

func stop(*os.Process) error         { return errors.ErrUnsupported }
func resume(*os.Process) error       { return errors.ErrUnsupported }
func ownGroup() *syscall.SysProcAttr { return nil }
func monotonic() time.Duration       { return 0 }
