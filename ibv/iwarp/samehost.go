package iwarp

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// This file decides whether a connection may go on through shared memory. Each connection
// begins with MPA over TCP. The initiator's Request has an offer if the peer has an address
// of this host, and the responder's Reply has an answer if both may share memory. Then
// shared.go has a link that begins with TCP, and moves to shared memory when that is
// likely to pay.

// SameHost says whether connections between two processes of a host use shared memory in
// place of TCP. They do unless one end has it off. Linux on amd64 and arm64 has it.
type SameHost uint8

const (
	// SameHostDefault is what the environment variable RDMANET_SAMEHOST says: on, off or
	// require. Without it, it is SameHostOn.
	SameHostDefault SameHost = iota

	// SameHostOn makes a connection use shared memory after its first messages, if both
	// ends have it. Otherwise the connection stays with TCP.
	SameHostOn

	// SameHostOff makes all connections stay with TCP.
	SameHostOff

	// SameHostRequire makes a connection use shared memory from its first message, and
	// fail if that cannot be done. It leaves programs some bytes less for private data,
	// as DeviceAttr.MaxPrivateData reports. It is for tests.
	SameHostRequire
)

// SameHostEnv is the environment variable that SameHostDefault stands for.
const SameHostEnv = "RDMANET_SAMEHOST"

// ParseSameHost returns the value that is written as on, off or require. An empty string is
// SameHostDefault.
func ParseSameHost(s string) (SameHost, error) {
	switch s {
	case "":
		return SameHostDefault, nil
	case "on":
		return SameHostOn, nil
	case "off":
		return SameHostOff, nil
	case "require":
		return SameHostRequire, nil
	}
	return SameHostDefault, fmt.Errorf("must be on, off or require, and is %q", s)
}

// String returns what ParseSameHost reads.
func (s SameHost) String() string {
	switch s {
	case SameHostOn:
		return "on"
	case SameHostOff:
		return "off"
	case SameHostRequire:
		return "require"
	}
	return ""
}

// resolve replaces SameHostDefault. An environment variable that cannot be read counts as
// off, as New has no error; package rdmanet reports it.
func (s SameHost) resolve() SameHost {
	if s == SameHostDefault {
		var err error
		s, err = ParseSameHost(os.Getenv(SameHostEnv))
		switch {
		case err != nil:
			s = SameHostOff
		case s == SameHostDefault:
			s = SameHostOn
		}
	}
	if s > SameHostRequire {
		s = SameHostOff
	}
	return s
}

// A handover is what the two ends have agreed on for their way to shared memory.
type handover struct {
	iwarpwire.SameHostAnswer
	passive  bool
	required bool // this end requires shared memory
}

// These are the reasons for which connections stay with TCP.
var (
	errSharedOff     = errors.New("switched off on this side")
	errSharedRemote  = errors.New("the peer has an address of another host")
	errSharedPrivate = errors.New("the program's private data leaves no room for the offer")
	errSharedOffered = errors.New("the peer does not offer it")
	errSharedAnswer  = errors.New("the peer has not accepted it: it is on another host, in another network namespace, of another user, behind a proxy, or has it switched off")
	errSharedHost    = errors.New("the peer is on another host, in another network namespace, of another user or behind a proxy")
	errSharedEarly   = errors.New("too little has been exchanged so far")
	errSharedGivenUp = errors.New("the peer could not use it")
)

// requireShared returns an error if shared memory is required and why is a reason against
// it.
func (d *device) requireShared(why error) error {
	if why == nil || d.cfg.SameHost != SameHostRequire {
		return nil
	}
	return fmt.Errorf("shared memory is required, but %w", why)
}

// sharedHost returns what both ends of a connection have in common if they may share
// memory, or the reason for which this end may not. That is a digest of the identity of the
// host, and of the addresses of the TCP connection: if there is a proxy between the two
// ends, they do not have the same, and nothing goes past the proxy.
func (d *device) sharedHost(conn net.Conn, passive bool) (digest [16]byte, err error) {
	host, err := d.mayShare(conn)
	if err != nil {
		return digest, err
	}
	ends := [2]netip.AddrPort{unmapped(conn.LocalAddr()), unmapped(conn.RemoteAddr())}
	if passive {
		ends[0], ends[1] = ends[1], ends[0]
	}
	b := append(make([]byte, 0, 64), host[:]...)
	for _, end := range ends {
		addr := end.Addr().As16()
		b = binary.BigEndian.AppendUint16(append(b, addr[:]...), end.Port())
	}
	sum := sha256.Sum256(b)
	return [16]byte(sum[:16]), nil
}

func (d *device) mayShare(conn net.Conn) (host [16]byte, err error) {
	if d.cfg.SameHost == SameHostOff {
		return host, errSharedOff
	}
	if host, err = hostID(); err != nil {
		return host, err
	}
	if d.cfg.portable {
		return host, errSharedOff
	}
	if !sameAddress(unmapped(conn.LocalAddr()).Addr(), unmapped(conn.RemoteAddr()).Addr()) {
		return host, errSharedRemote
	}
	return host, nil
}

// sameAddress reports whether a connection between two addresses may be one inside a host.
// It spares other peers the offer.
func sameAddress(a, b netip.Addr) bool {
	return a == b || a.IsLoopback() && b.IsLoopback()
}

// privateLimit returns the most bytes of private data that a Request or a Reply carries. A
// device that requires the shared link keeps room for the longer trailer of the two.
func (d *device) privateLimit() int {
	if d.cfg.SameHost == SameHostRequire {
		return maxPrivateData - iwarpwire.SameHostAnswerLen
	}
	return maxPrivateData
}

// offerShared appends an offer to the private data of a Request, or returns the reason
// against it.
func (d *device) offerShared(conn net.Conn, private []byte) ([]byte, error) {
	host, err := d.sharedHost(conn, false)
	if err == nil && len(private) > maxPrivateData-iwarpwire.SameHostOfferLen {
		err = errSharedPrivate
	}
	if err != nil {
		return private, err
	}
	o := iwarpwire.SameHostOffer{Host: host, Now: d.cfg.SameHost == SameHostRequire}
	return o.Append(private[:len(private):len(private)]), nil
}

// matchShared returns the reason against an offer, nil if there is none.
func (d *device) matchShared(conn net.Conn, offer *iwarpwire.SameHostOffer) error {
	host, err := d.sharedHost(conn, true)
	switch {
	case err != nil:
		return err
	case offer == nil:
		return errSharedOffered
	case offer.Host != host:
		return errSharedHost
	}
	return nil
}

// acceptShared returns the answer to an offer as a handover, or the reason for which the
// connection must stay with TCP. private is the private data of the Reply.
func (d *device) acceptShared(conn net.Conn, offer *iwarpwire.SameHostOffer, private []byte) (*handover, error) {
	if err := d.matchShared(conn, offer); err != nil {
		return nil, err
	}
	if len(private) > maxPrivateData-iwarpwire.SameHostAnswerLen {
		return nil, errSharedPrivate
	}
	h := &handover{passive: true, required: d.cfg.SameHost == SameHostRequire}
	h.Now = offer.Now || h.required
	if err := d.meeting.prepare(&h.SameHostAnswer); err != nil {
		return nil, err
	}
	return h, nil
}
