//go:build amd64 || arm64

package iwarp

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A doorbell wakes the peer, which sleeps in the runtime's poller until then. The two ends have two
// pairs of Unix sockets for that, one for each way: an end rings by one socket, and is woken by
// another.
//
// Nothing is ever sent. An end rings by shutdown(2) of its sending side, any number of times. The
// kernel reports a change to the other socket each time, although only the first one changes
// something. So ringing needs no memory in the kernel, nothing has to be taken out, and neither end
// can make the other one wait. It costs half of what a byte costs.
//
// The kernel reports the change to the socket itself as well. One pair for both ways would wake the
// end that rings too.
//
// Reader and writer of an end wait for the same socket at the same time, the reader for the event
// that it can be read, and the writer for the event that it can be written. It is registered for
// edges of both, and epoll reports all that is true of it each time. So each ring wakes both.
type doorbell struct {
	woken   *os.File // the poller waits for it
	wakes   *os.File // this end rings by it
	waiting syscall.RawConn
	ringing syscall.RawConn

	// waitRead and waitWrite are for waiting.
	waitRead, waitWrite func(uintptr) bool
}

// doorbellFDs are the descriptors of which an end makes its doorbell.
type doorbellFDs struct{ woken, wakes int }

// newDoorbells returns the descriptors for both ends.
func newDoorbells() (ours, theirs doorbellFDs, err error) {
	const flags = unix.SOCK_STREAM | unix.SOCK_CLOEXEC
	there, err := unix.Socketpair(unix.AF_UNIX, flags, 0)
	if err != nil {
		return ours, theirs, os.NewSyscallError("socketpair", err)
	}
	back, err := unix.Socketpair(unix.AF_UNIX, flags, 0)
	if err != nil {
		closeAll(there[:])
		return ours, theirs, os.NewSyscallError("socketpair", err)
	}
	return doorbellFDs{woken: back[0], wakes: there[0]}, doorbellFDs{woken: there[1], wakes: back[1]}, nil
}

func (fds doorbellFDs) close() { closeAll([]int{fds.woken, fds.wakes}) }

// newDoorbell makes a doorbell of descriptors that may come from the peer, and takes them over.
func newDoorbell(fds doorbellFDs) (*doorbell, error) {
	err := cmp.Or(checkDoorbell(fds.woken), checkDoorbell(fds.wakes))
	if err == nil {
		// The runtime's poller waits for a socket that does not block. It does not take the other
		// one, for which nobody waits.
		err = cmp.Or(unix.SetNonblock(fds.woken, true), unix.SetNonblock(fds.wakes, false))
		err = os.NewSyscallError("fcntl", err)
	}
	if err != nil {
		fds.close()
		return nil, err
	}
	d := &doorbell{woken: os.NewFile(uintptr(fds.woken), "doorbell"), wakes: os.NewFile(uintptr(fds.wakes), "doorbell")}
	d.waiting, err = d.woken.SyscallConn()
	if err == nil {
		d.ringing, err = d.wakes.SyscallConn()
	}
	if err == nil {
		err = d.woken.SetDeadline(time.Time{}) // an error where the poller has not taken the file
	}
	if err != nil {
		d.close()
		return nil, fmt.Errorf("doorbell: %w", err)
	}
	return d, nil
}

// checkDoorbell returns an error for what is no Unix socket of a stream. To shut down other sockets
// might take long.
func checkDoorbell(fd int) error {
	for _, want := range []struct{ option, value int }{
		{unix.SO_DOMAIN, unix.AF_UNIX},
		{unix.SO_TYPE, unix.SOCK_STREAM},
	} {
		got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, want.option)
		if err != nil {
			return fmt.Errorf("the peer's doorbell is no socket: %w", os.NewSyscallError("getsockopt", err))
		}
		if got != want.value {
			return errors.New("the peer's doorbell is a socket of another kind")
		}
	}
	// A peer that has given its own sockets to this process could end without a sign. Its end of
	// the control socket is connected to one with a name (package unix writes none as "@"). What it
	// has sent by the doorbell would stay there, and nothing can come after this shutdown. A byte
	// out of band that it has taken back leaves its descriptors behind, and is dropped here.
	if addr, err := unix.Getpeername(fd); err != nil || len(addr.(*unix.SockaddrUnix).Name) > 1 {
		return errors.New("the peer's doorbell is not of a pair of sockets")
	}
	shutdownToWake(uintptr(fd))
	if n, _, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_DONTWAIT); err != nil || n > 0 {
		return errors.New("the peer has sent something by its doorbell")
	}
	return nil
}

// An error of these is of no use. If the peer has gone, its control socket says so.
func shutdownToRing(fd uintptr) { syscall.RawSyscall(unix.SYS_SHUTDOWN, fd, unix.SHUT_WR, 0) }
func shutdownToWake(fd uintptr) { syscall.RawSyscall(unix.SYS_SHUTDOWN, fd, unix.SHUT_RDWR, 0) }

// awaitRead sleeps until waitRead returns true, which is called when the peer rings.
func (d *doorbell) awaitRead() error { return closedAsNet(d.waiting.Read(d.waitRead)) }

// awaitWrite is the same for waitWrite.
func (d *doorbell) awaitWrite() error { return closedAsNet(d.waiting.Write(d.waitWrite)) }

// closedAsNet returns net.ErrClosed for the error after close, which package os does not name.
func closedAsNet(err error) error {
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return net.ErrClosed
}

// press wakes the peer.
func (d *doorbell) press() { d.ringing.Control(shutdownToRing) }

// wake wakes this end itself. The kernel reports a shutdown also to the socket that was shut down, and
// one of both directions also to a writer, though a peer may have filled the socket.
func (d *doorbell) wake() { d.waiting.Control(shutdownToWake) }

func (d *doorbell) close() {
	d.woken.Close()
	d.wakes.Close()
}

// doorbellsRing returns an error if this kernel reports a shutdown that changes nothing only once.
// Linux has always reported each, but no manual promises that.
func doorbellsRing() error {
	ours, theirs, err := newDoorbells()
	if err != nil {
		return err
	}
	defer ours.close()
	defer theirs.close()
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("epoll_create1", err)
	}
	defer unix.Close(epoll)
	e := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET}
	if err := unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, theirs.woken, &e); err != nil {
		return os.NewSyscallError("epoll_ctl", err)
	}
	shutdownToWake(uintptr(ours.wakes)) // See checkDoorbell.
	for i := range 6 {                  // The first one finds that the socket can be written.
		if i%2 == 0 {
			shutdownToRing(uintptr(ours.wakes))
		} else {
			shutdownToWake(uintptr(theirs.woken))
		}
		events := make([]unix.EpollEvent, 2)
		n, err := unix.EpollWait(epoll, events, 0)
		const both = unix.EPOLLIN | unix.EPOLLOUT
		if err != nil || n != 1 || events[0].Events&both != both {
			return errors.New("the kernel does not report each shutdown of a Unix socket")
		}
	}
	return nil
}
