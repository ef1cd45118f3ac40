//go:build amd64 || arm64

package iwarp

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/shmring"
)

// This file has the way of a connection to shared memory, which begins in both processes:
//
//  1. The initiator connects to the Unix socket that the answer names. It sends the token,
//     and its page.
//  2. The responder finds the connection by the token. It sends its page. From now on it
//     understands when the initiator moves to the ring.
//  3. The initiator moves to the ring (see shared.begin). The responder, which reads that it
//     has, may move too.
//
// Whatever fails before step 3 leaves the connection with TCP. The initiator decides that
// alone, so the two ends never disagree.

// handoverTimeout bounds steps 1 and 2. It is a variable for tests.
var handoverTimeout = 5 * time.Second

const (
	// maxVisitors bounds how many peers are in step 1 at a time. Others wait.
	maxVisitors = 64

	helloMagic = "rdmanet shared 1"
	helloLen   = len(helloMagic) + 16
)

// hostID returns a number that processes have in common if they run on one kernel, in one
// network namespace, and as one user.
var hostID = sync.OnceValues(func() (id [16]byte, err error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return id, fmt.Errorf("the identity of the host is not known: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &st); err != nil {
		return id, fmt.Errorf("the network namespace is not known: %w", os.NewSyscallError("stat", err))
	}
	b := append([]byte(helloMagic), boot...)
	b = binary.BigEndian.AppendUint64(b, st.Dev)
	b = binary.BigEndian.AppendUint64(b, st.Ino)
	b = binary.BigEndian.AppendUint64(b, uint64(os.Geteuid()))
	sum := sha256.Sum256(b)
	return [16]byte(sum[:16]), nil
})

// A meeting is where the initiators of a device's connections come: a Unix socket with a
// random abstract name, which exists in this network namespace only, and in no file system.
// It is open while there are listeners, or connections for which somebody may come.
type meeting struct {
	mu      sync.Mutex
	users   int // users are the listeners and the connections.
	ln      *net.UnixListener
	name    [16]byte
	waiting map[[16]byte]*shared // waiting has the connections by their tokens.
	slots   chan struct{}        // slots has a token for each visitor.

	watch goneWatch

	thirdRings atomic.Int32 // thirdRings counts the rings of the largest size of this device's ends.
}

func (m *meeting) hold() {
	m.mu.Lock()
	m.users++
	m.mu.Unlock()
}

func (m *meeting) release() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users--; m.users == 0 && m.ln != nil {
		m.ln.Close()
		m.ln = nil
	}
}

// prepare opens the socket if it is not open, and fills in the answer. The socket stays open for
// the connection: expect takes that over, and if it is not called, release must be.
func (m *meeting) prepare(a *iwarpwire.SameHostAnswer) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ln == nil {
		rand.Read(m.name[:])
		ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: socketName(m.name)})
		if err != nil {
			return err
		}
		m.ln = ln
		m.slots = make(chan struct{}, maxVisitors)
		go m.serve(ln, m.slots)
	}
	m.users++
	a.Name = m.name
	rand.Read(a.Token[:])
	return nil
}

func socketName(name [16]byte) string { return "@rdmanet-" + hex.EncodeToString(name[:]) }

// expect has a connection wait for the peer with its token, after prepare.
func (m *meeting) expect(l *shared) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.waiting == nil {
		m.waiting = make(map[[16]byte]*shared)
	}
	m.waiting[l.agreed.Token] = l
}

// forget ends the wait of a connection. It does nothing if the peer has come.
func (m *meeting) forget(token [16]byte) { m.find(token) }

// find returns the connection with the token, once.
func (m *meeting) find(token [16]byte) *shared {
	m.mu.Lock()
	l := m.waiting[token]
	delete(m.waiting, token)
	m.mu.Unlock()
	if l != nil {
		m.release()
	}
	return l
}

// serve accepts visitors. Those that find no slot wait in the socket's backlog.
func (m *meeting) serve(ln *net.UnixListener, slots chan struct{}) {
	for {
		slots <- struct{}{}
		conn, err := ln.AcceptUnix()
		if err == nil {
			go m.welcome(conn, slots)
			continue
		}
		<-slots
		if errors.Is(err, net.ErrClosed) {
			return
		}
		time.Sleep(10 * time.Millisecond) // There are no descriptors, most likely.
	}
}

// welcome is the responder's side of the way.
func (m *meeting) welcome(conn *net.UnixConn, slots chan struct{}) {
	l, theirs, err := m.recognise(conn)
	<-slots
	if err != nil {
		conn.Close()
		return
	}
	if err := l.admit(conn, theirs); err != nil {
		l.refuse(err)
	}
}

// recognise returns the connection that a visitor has come for, and its page.
func (m *meeting) recognise(conn *net.UnixConn) (l *shared, theirs []byte, err error) {
	conn.SetDeadline(time.Now().Add(handoverTimeout))
	if err := sameUser(conn); err != nil {
		return nil, nil, err
	}
	var hello [helloLen]byte
	fd, err := receivePage(conn, hello[:])
	if err != nil {
		return nil, nil, err
	}
	defer unix.Close(fd)
	if string(hello[:len(helloMagic)]) != helloMagic {
		return nil, nil, errors.New("no hello")
	}
	if theirs, err = shmring.Map(fd, shmring.PageSize); err != nil {
		return nil, nil, err
	}
	if l = m.find([16]byte(hello[len(helloMagic):])); l == nil {
		shmring.Release(theirs)
		return nil, nil, errors.New("nobody waits for the token")
	}
	return l, theirs, nil
}

// admit sends the responder's page to the initiator. If the initiator does not use it, it is
// given back when the connection is closed.
func (l *shared) admit(conn *net.UnixConn, theirs []byte) error {
	fd, ours, err := shmring.Create(shmring.PageSize)
	if err != nil {
		shmring.Release(theirs)
		conn.Close()
		return err
	}
	defer unix.Close(fd)
	conn.SetDeadline(time.Time{}) // A page always fits into the socket's buffer.
	if err := l.install(conn, ours, theirs); err != nil {
		return err
	}
	return sendPage(conn, []byte(helloMagic), fd)
}

// move is the initiator's side of the way.
func (l *shared) move() error {
	deadline := time.Now().Add(handoverTimeout)
	d := net.Dialer{Deadline: deadline}
	c, err := d.Dial("unix", socketName(l.agreed.Name))
	if err != nil {
		return err
	}
	conn := c.(*net.UnixConn)
	conn.SetDeadline(deadline)
	if !l.visit(conn) {
		return net.ErrClosed
	}
	if err := sameUser(conn); err != nil {
		return err
	}
	fd, ours, err := shmring.Create(shmring.PageSize)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	fail := func(err error) error {
		shmring.Release(ours)
		return err
	}
	if err := sendPage(conn, append([]byte(helloMagic), l.agreed.Token[:]...), fd); err != nil {
		return fail(err)
	}
	var hello [len(helloMagic)]byte
	peer, err := receivePage(conn, hello[:])
	if err != nil {
		return fail(err)
	}
	defer unix.Close(peer)
	if string(hello[:]) != helloMagic {
		return fail(errors.New("no hello"))
	}
	theirs, err := shmring.Map(peer, shmring.PageSize)
	if err != nil {
		return fail(err)
	}
	conn.SetDeadline(time.Time{})
	if err := l.install(conn, ours, theirs); err != nil {
		return err
	}
	l.mayBegin()
	// The responder moves only after this side has. If the socket is full, what is written
	// next moves.
	return l.raw.Control(func(fd uintptr) {
		l.out.Lock()
		defer l.out.Unlock()
		if !l.out.on.Load() && !l.out.ended && !l.out.closed {
			_, l.out.lost = l.begin(fd)
		}
	})
}

// sameUser returns an error unless the peer of a Unix socket runs as the same user.
func sameUser(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		return cerr
	}
	if err != nil {
		return os.NewSyscallError("getsockopt", err)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("the peer runs as another user: %w", syscall.EPERM)
	}
	return nil
}

// sendPage sends b with the descriptor of a page.
func sendPage(conn *net.UnixConn, b []byte, fd int) error {
	_, _, err := conn.WriteMsgUnix(b, unix.UnixRights(fd), nil)
	return err
}

// receivePage reads as many bytes as b has, and the descriptor that comes with the first
// ones. The caller closes it.
func receivePage(conn *net.UnixConn, b []byte) (fd int, err error) {
	fd = -1
	oob := make([]byte, unix.SizeofCmsghdr+4) // The kernel drops further descriptors.
	for n := 0; n < len(b); {
		k, oobn, _, _, err := conn.ReadMsgUnix(b[n:], oob)
		if oobn > 0 {
			if got := rightsIn(oob[:oobn]); fd < 0 {
				fd = got
			} else if got >= 0 {
				unix.Close(got)
			}
		}
		if errors.Is(err, io.EOF) {
			err = errors.New("the peer has given up")
		}
		if err != nil {
			if fd >= 0 {
				unix.Close(fd)
			}
			return -1, err
		}
		n += k
	}
	if fd < 0 {
		return -1, errors.New("the peer has sent no shared memory")
	}
	return fd, nil
}

// rightsIn returns the descriptor in a control message, or -1.
func rightsIn(oob []byte) int {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return -1
	}
	fd := -1
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue
		}
		for _, got := range fds {
			if fd < 0 {
				fd = got
			} else {
				unix.Close(got)
			}
		}
	}
	return fd
}
