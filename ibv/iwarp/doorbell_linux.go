//go:build amd64 || arm64

package iwarp

import (
	"net"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A doorbell is a Unix socket between the two ends of a shared link. A byte in it wakes the
// peer, which sleeps in the runtime's poller until then. The bytes mean nothing. The end of
// the socket's stream means that the peer has gone, for whatever reason. New rings come by
// the socket as descriptors.
//
// Reader and writer of an end wait for the same socket at the same time, the reader for the
// event that it can be read, and the writer for the event that it can be written. The
// socket is registered for edges of both. At each byte that comes, epoll reports all that is
// true of the socket then: that it can be read, if the byte has not been taken meanwhile,
// and that it can be written. So each byte wakes both.
type doorbell struct {
	conn *net.UnixConn
	raw  syscall.RawConn
	byte func(fd uintptr) // byte sends one.

	// waitRead and waitWrite are for raw.
	waitRead, waitWrite func(fd uintptr) bool

	mu      sync.Mutex // mu guards what follows.
	sleeps  int        // sleeps is how often this end has slept since the socket was empty.
	buf     [256]byte
	control [unix.SizeofCmsghdr + 4]byte // control has room for one descriptor, so the kernel drops others.
	ring    int                          // ring is a descriptor from the peer that nobody has taken, or -1.
}

func newDoorbell(conn *net.UnixConn) (*doorbell, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	d := &doorbell{conn: conn, raw: raw, ring: -1}
	d.byte = func(fd uintptr) {
		one := [1]byte{}
		// An error is of no use here. If the peer has gone, the end of the stream says so.
		// If the socket is full, then of bytes that have not woken the peer yet.
		syscall.RawSyscall6(unix.SYS_SENDTO, fd, uintptr(unsafe.Pointer(&one)), 1, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	}
	return d, nil
}

// press wakes the peer.
func (d *doorbell) press() { d.raw.Control(d.byte) }

// give sends a descriptor. It does not wait.
func (d *doorbell) give(ring int) (err error) {
	if cerr := d.raw.Control(func(fd uintptr) {
		err = unix.Sendmsg(int(fd), []byte{0}, unix.UnixRights(ring), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}); err == nil {
		err = cerr
	}
	return err
}

// drainEvery is how many sleeps a drain is for. The peer sends a byte for a sleep at most.
// A socket that holds some seventy bytes for the peer counts as full, and does not report
// any more that it can be written.
const drainEvery = 32

// rest prepares a sleep. Now and then it takes the bytes out of the socket, and reports whether
// there were any. It does not do that before each sleep, because the peer's process is woken each
// time to hear that its socket has room.
func (d *doorbell) rest(fd uintptr) (taken bool) {
	d.mu.Lock()
	d.sleeps++
	due := d.sleeps >= drainEvery
	d.mu.Unlock()
	return due && d.drain(fd)
}

// drain takes all bytes out of the socket, but at most those of some calls, and reports
// whether there were any.
func (d *doorbell) drain(fd uintptr) (some bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sleeps = 0
	iov := unix.Iovec{Base: &d.buf[0]}
	iov.SetLen(len(d.buf))
	for range 16 {
		msg := unix.Msghdr{Iov: &iov, Iovlen: 1, Control: &d.control[0]}
		msg.SetControllen(len(d.control))
		n, _, errno := syscall.RawSyscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&msg)), unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		switch {
		case errno == unix.EINTR:
			continue
		case errno != 0 || n == 0:
			return some // What ends the stream is for the watch.
		}
		some = true
		if int(msg.Controllen) == len(d.control) {
			d.keep()
		}
		if int(n) < len(d.buf) && msg.Controllen == 0 {
			return some // A byte that comes from now on wakes.
		}
	}
	return some
}

// keep notes the descriptor in control. A peer that sends another one before the first is
// needed breaks the rules, and finds out when the second is missing.
func (d *doorbell) keep() {
	h := (*unix.Cmsghdr)(unsafe.Pointer(&d.control[0]))
	if h.Level != unix.SOL_SOCKET || h.Type != unix.SCM_RIGHTS {
		return
	}
	ring := int(*(*int32)(unsafe.Pointer(&d.control[unix.SizeofCmsghdr])))
	if d.ring >= 0 {
		unix.Close(ring)
		return
	}
	d.ring = ring
}

// take returns the descriptor that the peer has sent, or -1. The caller closes it.
func (d *doorbell) take() int {
	d.mu.Lock()
	ring := d.ring
	d.ring = -1
	d.mu.Unlock()
	if ring >= 0 {
		return ring
	}
	d.raw.Control(func(fd uintptr) { d.drain(fd) })
	d.mu.Lock()
	defer d.mu.Unlock()
	ring = d.ring
	d.ring = -1
	return ring
}

func (d *doorbell) close() {
	d.conn.Close()
	if ring := d.take(); ring >= 0 {
		unix.Close(ring)
	}
}
