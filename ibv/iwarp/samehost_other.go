//go:build !linux || !(amd64 || arm64)

package iwarp

import (
	"errors"
	"net"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// meeting is where peers on this host come, which this system does not have.
type meeting struct{}

func (*meeting) hold()                                   {}
func (*meeting) release()                                {}
func (*meeting) prepare(*iwarpwire.SameHostAnswer) error { return errSharedSystem }

var errSharedSystem = errors.New("this system has no shared memory for it: Linux on amd64 and arm64 has")

func hostID() (id [16]byte, err error) { return id, errSharedSystem }

// openShared is an opener for connections that have no handover here.
func openShared(conn net.Conn, s *setup) (link, error) { return openTCP(conn, s) }
