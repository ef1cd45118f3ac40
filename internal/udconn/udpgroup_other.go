//go:build !linux && !darwin

package udconn

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
)

var errNoGroupOptions = fmt.Errorf("multicast groups on %s: %w", runtime.GOOS, errors.ErrUnsupported)

func groupMember(int, *net.Interface, netip.Addr, bool) error { return errNoGroupOptions }
func groupInterface(int, bool, *net.Interface) error          { return errNoGroupOptions }
func groupLoopback(int, bool, bool) error                     { return errNoGroupOptions }
