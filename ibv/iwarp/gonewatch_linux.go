//go:build amd64 || arm64

package iwarp

import (
	"cmp"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A goneWatch tells the shared links of a device when their peers have gone, whatever the links
// are doing: nobody may be waiting for the doorbell, and a ring does not tell of the end of a
// process. It tells them also of what comes by their control sockets. It has one descriptor of
// epoll, and one goroutine, while there are such links.
type goneWatch struct {
	mu    sync.Mutex
	epoll *os.File // nil while links is empty
	raw   syscall.RawConn
	last  uint64
	links map[uint64]*shared // by their numbers
}

// add watches the control socket of a link. It returns the number for remove, which must be
// called also after an error.
func (w *goneWatch) add(l *shared, c *controlSocket) (id uint64, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.epoll == nil {
		if err := w.open(); err != nil {
			return 0, err
		}
	}
	w.last++
	id = w.last
	w.links[id] = l
	return id, w.arm(unix.EPOLL_CTL_ADD, c, id, anything)
}

// These are what the watch tells of besides the end of the peer.
const (
	nothingElse = 0
	anything    = unix.EPOLLIN
)

// arm has the watch tell of one event more: the peer's end, or what. The caller holds mu.
func (w *goneWatch) arm(op int, c *controlSocket, id uint64, what uint32) (err error) {
	e := unix.EpollEvent{Events: what | unix.EPOLLRDHUP | unix.EPOLLONESHOT, Fd: int32(id), Pad: int32(id >> 32)}
	cerr := c.raw.Control(func(fd uintptr) {
		w.raw.Control(func(epoll uintptr) { err = unix.EpollCtl(int(epoll), op, int(fd), &e) })
	})
	return cmp.Or(os.NewSyscallError("epoll_ctl", err), cerr)
}

// again has the watch go on to tell a link of its peer's end, and of what.
func (w *goneWatch) again(c *controlSocket, id uint64, what uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.links[id] != nil {
		w.arm(unix.EPOLL_CTL_MOD, c, id, what) // It fails after close, when there is nothing to tell.
	}
}

// open begins to watch. The caller holds mu.
func (w *goneWatch) open() error {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("epoll_create1", err)
	}
	// The runtime's poller waits for a file that does not block.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return os.NewSyscallError("fcntl", err)
	}
	f := os.NewFile(uintptr(fd), "epoll")
	raw, err := f.SyscallConn()
	if err == nil {
		err = f.SetReadDeadline(time.Time{}) // an error where the poller has not taken the file
	}
	if err != nil {
		f.Close()
		return fmt.Errorf("watch for the end of peers: %w", err)
	}
	w.epoll, w.raw, w.links = f, raw, make(map[uint64]*shared)
	go w.run(raw)
	return nil
}

// remove ends the watch of a control socket, which the caller closes.
func (w *goneWatch) remove(id uint64) {
	w.mu.Lock()
	delete(w.links, id)
	var unused *os.File
	if len(w.links) == 0 {
		unused, w.epoll, w.raw, w.links = w.epoll, nil, nil, nil
	}
	w.mu.Unlock()
	if unused != nil {
		unused.Close() // This waits for tell.
	}
}

// run tells links until the descriptor is closed.
func (w *goneWatch) run(raw syscall.RawConn) {
	var events [16]unix.EpollEvent
	raw.Read(func(epoll uintptr) bool {
		for {
			n, err := unix.EpollWait(int(epoll), events[:], 0)
			if err == unix.EINTR {
				continue
			}
			for _, e := range events[:max(n, 0)] {
				w.tell(uint64(uint32(e.Fd))|uint64(uint32(e.Pad))<<32, e.Events&^unix.EPOLLIN != 0)
			}
			if n < len(events) {
				return false
			}
		}
	})
}

// tell tells a link that its peer has gone, or that something has come by its control socket.
func (w *goneWatch) tell(id uint64, gone bool) {
	w.mu.Lock()
	l := w.links[id]
	w.mu.Unlock()
	switch {
	case l == nil:
	case gone:
		go l.peerGone() // It takes locks of the link.
	default:
		w.again(l.control, id, nothingElse)
		aside(func() { l.hear(id) })
	}
}
