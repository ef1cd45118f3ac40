//go:build amd64 || arm64

package iwarp

import (
	"bytes"
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
//     its page, and the responder's doorbell.
//  2. The responder finds the connection by the token. It sends its page. From now on it
//     understands when the initiator moves to the ring.
//  3. The initiator moves to the ring with what it writes next (see shared.begin). The
//     responder, which reads that it has, may move too.
//
// The mark goes ahead of bytes of the program and never alone: a process that has ended answers
// any byte with a reset, and its kernel drops what it has not sent yet.
//
// Whatever fails before step 3 leaves the connection with TCP. The initiator decides that
// alone, so the two ends never disagree.

// handoverLimit bounds steps 1 and 2, in nanoseconds. It is a variable for tests.
var handoverLimit atomic.Int64

func init() { handoverLimit.Store(int64(5 * time.Second)) }

func handoverTimeout() time.Duration { return time.Duration(handoverLimit.Load()) }

const (
	// maxVisitors bounds how many peers are in steps 1 and 2 at a time, and how many connections
	// of which this process is the initiator. Others wait. A peer can have this process wait
	// when it closes the descriptors that have come, and then has a thread of the system.
	maxVisitors = 64

	helloMagic = "rdmanet shared 4"
	helloLen   = len(helloMagic) + 16
)

// hostID returns a number that processes have in common if they run on one kernel, in one
// network namespace, and as one user, or the reason for which this process cannot share memory.
func hostID() (id [16]byte, err error) {
	if id := knownHost.Load(); id != nil {
		return *id, nil
	}
	if err := doorbellsRing(); err != nil {
		return id, err
	}
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
	id = [16]byte(sum[:16])
	knownHost.Store(&id)
	return id, nil
}

// knownHost is what hostID has found. Errors may be of the moment, such as too few descriptors.
var knownHost atomic.Pointer[[16]byte]

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
		ln := m.ln
		m.ln = nil
		if raw, err := ln.SyscallConn(); err == nil {
			raw.Control(func(fd uintptr) { unix.Shutdown(int(fd), unix.SHUT_RDWR) }) // This ends serve.
		}
		aside(func() { ln.Close() }) // Visitors that were not accepted may have sent descriptors.
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
		if m.slots == nil {
			m.slots = make(chan struct{}, maxVisitors)
		}
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
		if errors.Is(err, net.ErrClosed) || errors.Is(err, unix.EINVAL) { // after release
			return
		}
		time.Sleep(10 * time.Millisecond) // There are no descriptors, most likely.
	}
}

// welcome is the responder's side of the way.
func (m *meeting) welcome(conn *net.UnixConn, slots chan struct{}) {
	defer func() { <-slots }()
	l, bell, theirs, err := m.recognise(conn)
	if err != nil {
		conn.Close()
		return
	}
	if err := l.admit(conn, bell, theirs); err != nil {
		l.refuse(err)
	}
}

// recognise returns the connection that a visitor has come for, its doorbell, and the visitor's
// page.
func (m *meeting) recognise(conn *net.UnixConn) (l *shared, bell doorbellFDs, theirs []byte, err error) {
	conn.SetDeadline(time.Now().Add(handoverTimeout()))
	if err := sameUser(conn); err != nil {
		return nil, bell, nil, err
	}
	var hello [helloLen]byte
	var fds [3]int
	if err := readHello(conn, hello[:], fds[:]); err != nil {
		return nil, bell, nil, err
	}
	page, bell := fds[0], doorbellFDs{woken: fds[1], wakes: fds[2]}
	defer unix.Close(page)
	if theirs, err = shmring.Map(page, shmring.PageSize); err == nil {
		if l = m.find([16]byte(hello[len(helloMagic):])); l != nil {
			return l, bell, theirs, nil
		}
		shmring.Release(theirs)
		err = errors.New("nobody waits for the token")
	}
	bell.close()
	return nil, bell, nil, err
}

// admit sends the responder's page to the initiator. If the initiator does not use it, it is
// given back when the connection is closed.
func (l *shared) admit(conn *net.UnixConn, bell doorbellFDs, theirs []byte) error {
	control, err := newControlSocket(conn, l.agreed.required)
	if err != nil {
		bell.close()
		shmring.Release(theirs)
		conn.Close()
		return err
	}
	fd, ours, err := shmring.Create(shmring.PageSize)
	if err != nil {
		bell.close()
		shmring.Release(theirs)
		control.close()
		return err
	}
	defer unix.Close(fd)
	conn.SetDeadline(time.Time{}) // A page always fits into the socket's buffer.
	if err := l.install(control, bell, ours, theirs); err != nil {
		return err
	}
	return writeHello(conn, []byte(helloMagic), fd)
}

// move is the initiator's side of the way.
func (l *shared) move() error {
	select {
	case moving <- struct{}{}:
		defer func() { <-moving }()
	case <-time.After(handoverTimeout()):
		return errSharedBusy
	}
	if l.closed.Load() {
		return net.ErrClosed
	}
	deadline := time.Now().Add(handoverTimeout())
	d := net.Dialer{Deadline: deadline}
	c, err := d.Dial("unix", socketName(l.agreed.Name))
	if err != nil {
		return err
	}
	conn := c.(*net.UnixConn)
	conn.SetDeadline(deadline)
	control, err := newControlSocket(conn, l.agreed.required)
	if err != nil {
		conn.Close()
		return err
	}
	if !l.visit(control) {
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
	bell, theirs, err := l.introduce(conn, fd)
	if err != nil {
		shmring.Release(ours)
		return err
	}
	conn.SetDeadline(time.Time{})
	if err := l.install(control, bell, ours, theirs); err != nil {
		return err
	}
	l.mayBegin()
	return nil
}

// moveNow is move for a caller that waits for it. A peer can have move wait for longer.
func (l *shared) moveNow() error {
	moved := make(chan error, 1)
	go func() { moved <- l.move() }()
	select {
	case err := <-moved:
		return err
	case <-time.After(2 * handoverTimeout()):
		return os.ErrDeadlineExceeded
	}
}

// moving has a token for each connection that is in move.
var moving = make(chan struct{}, maxVisitors)

var errSharedBusy = errors.New("too many connections were on their way there")

// introduce sends the token, the initiator's page and the responder's doorbell. It returns the
// initiator's doorbell, and the responder's page.
func (l *shared) introduce(conn *net.UnixConn, page int) (bell doorbellFDs, theirs []byte, err error) {
	bell, peer, err := newDoorbells()
	if err != nil {
		return bell, nil, err
	}
	defer peer.close()
	var hello [len(helloMagic)]byte
	var fds [1]int
	err = writeHello(conn, append([]byte(helloMagic), l.agreed.Token[:]...), page, peer.woken, peer.wakes)
	if err == nil {
		err = readHello(conn, hello[:], fds[:])
	}
	if err == nil {
		defer unix.Close(fds[0])
		theirs, err = shmring.Map(fds[0], shmring.PageSize)
	}
	if err != nil {
		bell.close()
	}
	return bell, theirs, err
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

// writeHello sends b with descriptors.
func writeHello(conn *net.UnixConn, b []byte, fds ...int) error {
	_, _, err := conn.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	return err
}

// readHello reads as many bytes as b has, which begin with helloMagic, and the descriptors that
// come with them, as many as fds has. The caller closes these.
func readHello(conn *net.UnixConn, b []byte, fds []int) (err error) {
	var got []int
	defer func() {
		if err != nil {
			drop(got)
		}
	}()
	oob := make([]byte, unix.SizeofCmsghdr+4*len(fds)) // The kernel drops further descriptors.
	for n := 0; n < len(b); {
		k, oobn, _, _, err := conn.ReadMsgUnix(b[n:], oob)
		got = append(got, rightsIn(oob[:oobn])...)
		switch {
		case errors.Is(err, io.EOF):
			return errors.New("the peer has given up")
		case err != nil:
			return err
		case len(got) > len(fds): // They must not pile up.
			return fmt.Errorf("the peer has sent more than %d descriptors", len(fds))
		}
		n += k
	}
	switch {
	case !bytes.HasPrefix(b, []byte(helloMagic)):
		return errors.New("no hello")
	case len(got) != len(fds):
		return fmt.Errorf("the peer has sent %d descriptors and not %d", len(got), len(fds))
	}
	copy(fds, got)
	return nil
}

// rightsIn returns the descriptors in control messages.
func rightsIn(oob []byte) (fds []int) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range msgs {
		got, _ := unix.ParseUnixRights(&msgs[i])
		fds = append(fds, got...)
	}
	return fds
}

// drop closes descriptors of a peer, which can take as long as the peer likes. If its own sockets are
// among them, they end before.
func drop(fds []int) {
	for _, fd := range fds {
		unix.Shutdown(fd, unix.SHUT_RDWR)
	}
	closeAll(fds)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
