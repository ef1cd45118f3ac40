//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sockaddr is a struct sockaddr_storage. Family and scope are in the machine's
// order, the rest in the network's.
type sockaddr [128]byte

func (s *sockaddr) pointer() unsafe.Pointer { return unsafe.Pointer(s) }

func toSockaddr(ap netip.AddrPort) (s sockaddr) {
	a := ap.Addr()
	family := uint16(unix.AF_INET)
	if a.Is4() || a.Is4In6() {
		b := a.As4()
		copy(s[4:], b[:])
	} else {
		family = unix.AF_INET6
		b := a.As16()
		copy(s[8:], b[:])
		binary.NativeEndian.PutUint32(s[24:], scope(a.Zone()))
	}
	binary.NativeEndian.PutUint16(s[0:], family)
	binary.BigEndian.PutUint16(s[2:], ap.Port())
	return s
}

func fromSockaddr(b *[128]C.uint8_t) netip.AddrPort {
	s := (*sockaddr)(unsafe.Pointer(b))
	port := binary.BigEndian.Uint16(s[2:])
	switch binary.NativeEndian.Uint16(s[0:]) {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(s[4:8])), port)
	case unix.AF_INET6:
		a := netip.AddrFrom16([16]byte(s[8:24]))
		if n := binary.NativeEndian.Uint32(s[24:]); n != 0 && a.IsLinkLocalUnicast() {
			a = a.WithZone(zone(n))
		}
		return netip.AddrPortFrom(a.Unmap(), port)
	}
	return netip.AddrPort{}
}

// scope and zone are the two names of an interface, as package net has them.
func scope(zone string) uint32 {
	if ifi, err := net.InterfaceByName(zone); err == nil {
		return uint32(ifi.Index)
	}
	n, _ := strconv.ParseUint(zone, 10, 32)
	return uint32(n)
}

func zone(scope uint32) string {
	if ifi, err := net.InterfaceByIndex(int(scope)); err == nil {
		return ifi.Name
	}
	return strconv.FormatUint(uint64(scope), 10)
}
