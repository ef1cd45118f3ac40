//go:build amd64 || arm64

package iwarp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/shmring"
)

// These are the places of the words in a page, as package shmring has them.
const (
	wordTail    = 0
	wordOrigin  = 8
	wordEnd     = 24
	wordSendCPU = 28
	wordMove    = 32
	wordMoveLen = 36
	wordMoveAt  = 40
	wordStart   = 48
	wordHead    = 128
	wordMoved   = 136
	wordRecvCPU = 140
	wordGone    = 144
	wordRecvNap = 256
	wordSendNap = 384
	wordsEnd    = 512
	pageRing    = 2048
)

// A ringPeer is the far end of a queue pair that may go on in shared memory: free to break
// every rule.
type ringPeer struct {
	*rawPeer
	v   *victim
	mem *memory

	fd     int    // fd is the descriptor of page.
	page   []byte // page is this end's.
	theirs []byte // theirs is the device's.
	peerFD int    // peerFD is the descriptor of theirs.

	control *net.UnixConn
	bell    *doorbell

	out   *shmring.Writer
	moved bool // moved is set when this end has moved.
	sent  uint64

	in    *shmring.Reader
	ring  bool // ring is set when the device has moved.
	count uint64
	got   []byte
	rings [][]byte // rings are those of either end that this one has mapped.
	other []byte   // other is the ring that the device may move to, or nil.

	msn uint32
}

func (p *ringPeer) u32(off int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&p.page[off]))
}

func (p *ringPeer) u64(off int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&p.page[off]))
}

// use gives the peer its page and that of the device, and its doorbell.
func (p *ringPeer) use(conn *net.UnixConn, bell doorbellFDs, page []byte, fd, theirs int) {
	p.t.Helper()
	var err error
	p.control, p.page, p.fd, p.peerFD = conn, page, fd, theirs
	p.bell, err = newDoorbell(bell)
	require.NoError(p.t, err)
	require.NoError(p.t, p.bell.woken.SetDeadline(time.Now().Add(patience)))
	p.theirs, err = shmring.Map(theirs, shmring.PageSize)
	require.NoError(p.t, err)
	own, peer := shmring.NewPage(p.page), shmring.NewPage(p.theirs)
	p.out, p.in = shmring.NewWriter(own, peer), shmring.NewReader(own, peer)
	p.t.Cleanup(p.free)
}

// free gives back what the peer has.
func (p *ringPeer) free() {
	if p.page == nil {
		return
	}
	p.bell.close()
	p.control.Close()
	p.conn.Close()
	for _, mem := range append(p.rings, p.page, p.theirs) {
		shmring.Release(mem)
	}
	unix.Close(p.fd)
	unix.Close(p.peerFD)
	p.page, p.theirs, p.rings, p.other, p.out, p.in = nil, nil, nil, nil, nil, nil
}

// sharing makes a connection whose initiator is a ringPeer. Both ends have the other one's
// page, and neither has moved.
func (s *site) sharing(now bool) *ringPeer {
	s.t.Helper()
	p := &ringPeer{mem: newMemory(s.t, s.p)}
	var a iwarpwire.SameHostAnswer
	p.v, p.rawPeer, a = s.invite(p.mem, now, 1)
	p.visit(a)
	if !now {
		p.put(rtrFrame(false))
	}
	return p
}

// visit exchanges pages with the device at the Unix socket of its answer.
func (p *ringPeer) visit(a iwarpwire.SameHostAnswer) {
	p.t.Helper()
	p.visitWith(a, func(*net.UnixConn, doorbellFDs, doorbellFDs) {})
}

// visitWith is visit with something that is done to the sockets before the device has them.
func (p *ringPeer) visitWith(a iwarpwire.SameHostAnswer, do func(conn *net.UnixConn, ours, theirs doorbellFDs)) {
	p.t.Helper()
	fd, page, err := shmring.Create(shmring.PageSize)
	require.NoError(p.t, err)
	bell, theirBell, err := newDoorbells()
	require.NoError(p.t, err)
	defer theirBell.close()
	conn := dialMeeting(p.t, a)
	do(conn, bell, theirBell)
	require.NoError(p.t, writeHello(conn, helloOf(a.Token), fd, theirBell.woken, theirBell.wakes))
	theirs, err := readReply(conn)
	require.NoError(p.t, err)
	p.use(conn, bell, page, fd, theirs)
}

// hosting makes a connection whose responder is a ringPeer. The device has moved.
func (s *site) hosting(now bool) *ringPeer {
	s.t.Helper()
	h := newHost(s.t, now)
	p := &ringPeer{mem: newMemory(s.t, s.p)}
	var result chan error
	p.v, p.rawPeer, result = h.connect(s.p, p.mem, 1)
	if !now {
		require.NoError(s.t, <-result)
		p.frameOf(iwarpwire.Write) // the RTR
		for range moveAfterWrites {
			p.exchange()
		}
	}
	conn, theirs, bell := h.welcome()
	fd, page, err := shmring.Create(shmring.PageSize)
	require.NoError(s.t, err)
	require.NoError(s.t, writeHello(conn, []byte(helloMagic), fd))
	p.use(conn, bell, page, fd, theirs)
	if now {
		require.NoError(s.t, <-result)
	}
	h.unix.Close()
	h.tcp.Close()
	for !p.ring { // The device is ready for this end to move when it has moved itself.
		if now {
			p.readTCP()
			continue
		}
		p.say([]byte("x"))
		p.frameOf(iwarpwire.Send)
	}
	return p
}

// move has this end go on in the ring.
func (p *ringPeer) move() {
	p.t.Helper()
	shmring.NewPage(p.page).SetStart(p.sent + 1)
	p.send([]byte{0})
	p.moved = true
}

// await sleeps until ready returns true, which it looks at when the device rings.
func (p *ringPeer) await(ready func() bool) {
	p.t.Helper()
	require.NoError(p.t, p.bell.waiting.Read(func(uintptr) bool { return ready() }))
}

// offer offers a ring to the device, and reports whether the device has accepted it. It closes the
// descriptors.
func (p *ringPeer) offer(m controlMessage, fds ...int) bool {
	p.t.Helper()
	sendHello(p.t, p.control, []byte{byte(m)}, fds...)
	b := make([]byte, 1)
	_, err := io.ReadFull(p.control, b)
	require.NoError(p.t, err)
	require.Contains(p.t, []controlMessage{accepted, refused}, controlMessage(b[0]))
	return controlMessage(b[0]) == accepted
}

// hear accepts a ring, if the device offers one.
func (p *ringPeer) hear() {
	p.t.Helper()
	c := plainControl(p.t, p.control)
	m, ring, ok := c.receive()
	for m == refused { // what was offered in vain
		m, ring, ok = c.receive()
	}
	if !ok {
		return
	}
	require.GreaterOrEqual(p.t, ring, 0)
	var err error
	p.other, err = shmring.Map(ring, 1<<m)
	require.NoError(p.t, err)
	unix.Close(ring)
	p.rings = append(p.rings, p.other)
	require.NoError(p.t, c.send(accepted))
}

// deviceGone reports whether the device has closed its control socket.
func (p *ringPeer) deviceGone() (gone bool) {
	raw, err := p.control.SyscallConn()
	require.NoError(p.t, err)
	require.NoError(p.t, raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		unix.Poll(fds, 0)
		gone = fds[0].Revents&unix.POLLRDHUP != 0
	}))
	return gone
}

// put sends bytes of the stream: by TCP before move, and after it by the ring.
func (p *ringPeer) put(b []byte) {
	p.t.Helper()
	if !p.moved {
		p.sent += uint64(len(b))
		p.send(b)
		return
	}
	for len(b) > 0 {
		n, _, err := p.out.Write([][]byte{b})
		require.NoError(p.t, err)
		b = b[n:]
		p.bell.press()
		if len(b) > 0 {
			p.await(func() bool { return p.out.Sleep(len(b)) })
			p.out.Awake()
		}
	}
}

// next returns the next n bytes of the stream.
func (p *ringPeer) next(n int) []byte {
	p.t.Helper()
	for len(p.got) < n {
		if !p.ring {
			p.readTCP()
			continue
		}
		p.hear()
		next, err := p.in.Peek()
		require.NoError(p.t, err)
		switch next {
		case shmring.Bytes:
			b := make([]byte, 4096)
			k, wake, err := p.in.Read([][]byte{b})
			require.NoError(p.t, err)
			if wake {
				p.bell.press()
			}
			p.got = append(p.got, b[:k]...)
		case shmring.Moved:
			p.follow()
		case shmring.Ended:
			require.FailNow(p.t, "the device has ended its direction")
		default:
			p.await(p.in.Sleep)
			p.in.Awake()
		}
	}
	b := p.got[:n]
	p.got = p.got[n:]
	return b
}

// readTCP reads once, up to the mark.
func (p *ringPeer) readTCP() {
	p.t.Helper()
	b := make([]byte, 4096)
	k, err := p.conn.Read(b)
	require.NoError(p.t, err)
	p.count += uint64(k)
	if p.theirs != nil && shmring.NewPage(p.theirs).Start() == p.count {
		p.ring = true
		k--
	}
	p.got = append(p.got, b[:k]...)
}

// follow goes on to the device's next ring.
func (p *ringPeer) follow() {
	p.t.Helper()
	size, err := p.in.NextRing()
	require.NoError(p.t, err)
	if size == 0 {
		p.in.Follow(nil)
		return
	}
	require.Len(p.t, p.other, size)
	p.in.Follow(p.other)
	p.other = nil
}

// frameOf reads an FPDU, which must have the opcode.
func (p *ringPeer) frameOf(op iwarpwire.Opcode) (payload []byte) {
	p.t.Helper()
	got, payload := p.frame()
	require.Equal(p.t, op, got)
	return payload
}

// frame reads an FPDU.
func (p *ringPeer) frame() (op iwarpwire.Opcode, payload []byte) {
	p.t.Helper()
	ulen := int(binary.BigEndian.Uint16(p.next(iwarpwire.LengthLen)))
	ulpdu := p.next(iwarpwire.FPDULen(ulen) - iwarpwire.LengthLen)[:ulen]
	var h iwarpwire.Header
	n, term := h.Parse(ulpdu)
	require.Nil(p.t, term)
	return h.Op, ulpdu[n:]
}

// say has the device send a message.
func (p *ringPeer) say(msg []byte) {
	p.t.Helper()
	_, err := p.v.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: msg}}}})
	require.NoError(p.t, err)
}

// fill has the device send more than any ring has room for.
func (p *ringPeer) fill() {
	p.t.Helper()
	for range 40 {
		p.say(bytesOf(8 << 10))
	}
}

// tell sends the device a message.
func (p *ringPeer) tell(msg []byte) {
	p.t.Helper()
	p.msn++
	p.put(seal(false, sendOf(p.msn, 0, true, msg)))
}

// exchange passes a message each way.
func (p *ringPeer) exchange() {
	p.t.Helper()
	msg := []byte("a message")
	p.tell(msg)
	require.Equal(p.t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, p.v.completions(1))
	defect.Bytes(p.t, msg, p.mem.region(0)[:len(msg)])
	p.v.receive(0)
	p.say(msg)
	defect.Bytes(p.t, msg, p.frameOf(iwarpwire.Send))
}

// close ends the connection by the device's end.
func (p *ringPeer) close() {
	p.t.Helper()
	p.v.close()
	p.mem.touched()
	p.mem.close()
	p.free()
}

// eachRole runs a test with a hostile peer as the initiator and as the responder. Both ends
// have moved to shared memory.
func eachRole(t *testing.T, run func(t *testing.T, s *site, p *ringPeer)) {
	for _, role := range []string{"initiator", "responder"} {
		for _, now := range []bool{false, true} {
			name := role
			if now {
				name += " that requires it"
			}
			t.Run(name, func(t *testing.T) {
				nothingLeft(t)
				s := newSite(t, Config{SameHost: SameHostOn})
				good, beside := s.bystander(), s.sharing(false)
				beside.move()
				beside.exchange()
				var p *ringPeer
				if role == "initiator" {
					p = s.sharing(now)
				} else {
					p = s.hosting(now)
				}
				p.move()
				if role == "initiator" && now {
					p.put(rtrFrame(false))
				}
				if role == "responder" && now {
					p.frameOf(iwarpwire.Write)
				}
				p.exchange()
				p.exchange()
				link, reason := p.v.id.(ibv.Linker).Link()
				require.Equal(t, "shared memory", link, reason)
				require.True(t, p.ring, "the device has moved")
				run(t, s, p)
				good.check()
				beside.exchange()
				beside.close()
				good.close()
			})
		}
	}
}

// A trick is what a peer does in shared memory, and must not do.
type trick struct {
	name string
	do   func(p *ringPeer)
	want error // want is how the connection ends, nil if it goes on.
}

// ring makes memory with seals, and returns its descriptor.
func ringOf(t testing.TB, size int) (fd int) {
	t.Helper()
	fd, mem, err := shmring.Create(size)
	require.NoError(t, err)
	shmring.Release(mem)
	return fd
}

// announce says that the next bytes are in another ring.
func (p *ringPeer) announce(size uint32) {
	p.u32(wordMoveLen).Store(size)
	p.u64(wordMoveAt).Store(p.u64(wordTail).Load())
	p.u32(wordMove).Add(1)
	p.bell.press()
}

// These offer rings of firstRing bytes, and of shmring.MinRing.
const (
	offerOfFirst controlMessage = 16
	offerOfLeast controlMessage = 12
)

// useRing goes on to a ring, as an honest peer does.
func (p *ringPeer) useRing() {
	p.t.Helper()
	fd, mem, err := shmring.Create(firstRing)
	require.NoError(p.t, err)
	p.rings = append(p.rings, mem)
	require.True(p.t, p.offer(offerOfFirst, fd))
	p.out.Move(mem)
	p.exchange()
}

var (
	errEnd     = errors.New("none, as at the end of a process")
	errAny     = errors.New("any error")
	errNothing = errors.New("none, and the peer cannot go on")
)

func tricks() []trick {
	store32 := func(off int, n uint32) func(p *ringPeer) {
		return func(p *ringPeer) {
			p.u32(off).Store(n)
			p.bell.press()
		}
	}
	list := []trick{
		{"tail far ahead", func(p *ringPeer) {
			p.u64(wordTail).Add(pageRing + 1)
			p.bell.press()
		}, shmring.ErrCorrupt},
		{"tail goes back", func(p *ringPeer) {
			p.u64(wordTail).Add(^uint64(0))
			p.bell.press()
		}, shmring.ErrCorrupt},
		{"moves left out", store32(wordMove, 7), shmring.ErrCorrupt},
		{"move to a ring of no size that is allowed", func(p *ringPeer) { p.announce(5000) }, shmring.ErrCorrupt},
		{"move to a ring that is too large", func(p *ringPeer) { p.announce(2 * shmring.MaxRing) }, shmring.ErrCorrupt},
		{"move to a ring of 2^31 bytes", func(p *ringPeer) { p.announce(1 << 31) }, shmring.ErrCorrupt},
		{"move without a descriptor", func(p *ringPeer) { p.announce(firstRing) }, errSharedRing},
		{"move to a pipe", func(p *ringPeer) {
			sendHello(p.t, p.control, []byte{byte(offerOfFirst)}, badPages()["pipe"](p.t))
		}, errAny},
		{"move to a ring without seals", func(p *ringPeer) {
			sendHello(p.t, p.control, []byte{byte(offerOfLeast)}, badPages()["page without seals"](p.t))
		}, errAny},
		{"move to a ring of another size", func(p *ringPeer) {
			require.True(p.t, p.offer(offerOfFirst, ringOf(p.t, firstRing)))
			p.announce(secondRing)
		}, errSharedRing},
		{"end of no kind", store32(wordEnd, 77), errno.ECONNRESET},
		{"end inside a message", func(p *ringPeer) {
			p.put(seal(false, sendOf(p.msn+1, 0, true, bytesOf(20)))[:9])
			store32(wordEnd, uint32(shmring.Finished))(p)
		}, io.ErrUnexpectedEOF},
		{"head ahead of what was written", func(p *ringPeer) {
			p.u64(wordHead).Add(1)
			p.say(bytesOf(10))
		}, shmring.ErrCorrupt},
		{"head goes back", func(p *ringPeer) {
			p.u64(wordHead).Store(0)
			p.say(bytesOf(10))
		}, shmring.ErrCorrupt},
		{"head anywhere while the device waits for room", func(p *ringPeer) {
			p.fill()
			p.u64(wordHead).Store(1 << 60)
			p.bell.press()
		}, shmring.ErrCorrupt},
		{"control socket closed and TCP open", func(p *ringPeer) { p.control.Close() }, errEnd},
		{"control socket closed for writing and TCP open", func(p *ringPeer) { p.control.CloseWrite() }, errEnd},
		{"control socket closed while the device waits for room", func(p *ringPeer) {
			p.fill()
			p.control.Close()
		}, errno.ECONNRESET},
		{"offer before the last one is used", func(p *ringPeer) {
			require.True(p.t, p.offer(offerOfFirst, ringOf(p.t, firstRing)))
			sendHello(p.t, p.control, []byte{byte(offerOfLeast)}, ringOf(p.t, shmring.MinRing))
		}, errSharedOffer},
		{"offer, and the end at once", func(p *ringPeer) {
			sendHello(p.t, p.control, []byte{byte(offerOfFirst)}, ringOf(p.t, firstRing))
			p.control.Close()
			p.conn.Close()
		}, errEnd},
		{"offer of another size", func(p *ringPeer) {
			sendHello(p.t, p.control, []byte{byte(offerOfFirst)}, ringOf(p.t, secondRing))
		}, errAny},
		{"offer of a ring that is too small", func(p *ringPeer) {
			sendHello(p.t, p.control, []byte{byte(offerOfLeast - 1)}, ringOf(p.t, shmring.MinRing/2))
		}, errSharedOffer},
		{"offer of a ring that is too large", func(p *ringPeer) {
			sendHello(p.t, p.control, []byte{21}, ringOf(p.t, 2*shmring.MaxRing))
		}, errSharedOffer},
		{"message of no kind", func(p *ringPeer) {
			sendHello(p.t, p.control, []byte{255})
		}, errSharedOffer},
		{"answer to no offer", func(p *ringPeer) {
			sendHello(p.t, p.control, []byte{byte(refused)})
		}, errSharedOffer},
		{"two answers to an offer", func(p *ringPeer) {
			p.say(bytesOf(8 << 10))
			_, err := io.ReadFull(p.control, make([]byte, 1))
			require.NoError(p.t, err)
			sendHello(p.t, p.control, []byte{byte(refused), byte(accepted)})
		}, errSharedOffer},
		{"descriptors with an answer", func(p *ringPeer) {
			sendHello(p.t, p.control, []byte{byte(accepted)}, manyPipes(p.t)...)
		}, errSharedOffer},
		{"sockets that are slow to close, and its own, sent and closed", func(p *ringPeer) {
			for _, fd := range []int{slowToClose(p.t), copyOf(p.t, p.control), copyOf(p.t, p.conn)} {
				writeHello(p.control, []byte{byte(refused)}, fd) // The device may have gone.
				go unix.Close(fd)                                // This may be the last close.
			}
			p.control.Close()
			p.conn.Close()
		}, errSharedOffer},
		{"ring of garbage", func(p *ringPeer) { p.put(bytes.Repeat([]byte{0xff}, 1000)) }, errAny},
		{"origin changed", func(p *ringPeer) {
			p.u64(wordOrigin).Store(12345)
			p.u64(wordOrigin + 8).Store(54321)
			p.put(bytes.Repeat([]byte{0xff}, pageRing))
		}, errAny},

		// The connection goes on.
		{"processors that do not exist", func(p *ringPeer) {
			for _, n := range []uint32{0, 1, 1 << 31, 0xffffffff} {
				p.u32(wordSendCPU).Store(n)
				p.u32(wordRecvCPU).Store(n)
				p.exchange()
			}
		}, nil},
		{"sleep words of any value", func(p *ringPeer) {
			for range 100 {
				p.u32(wordRecvNap).Store(rand.Uint32())
				p.u32(wordSendNap).Store(rand.Uint32())
				p.tell(bytesOf(3))
				p.v.completions(1)
				p.v.receive(0)
			}
			// The next sleep of this end must be one that the device has not seen.
			p.u32(wordRecvNap).Store(0)
		}, nil},
		{"flood of the doorbell", func(p *ringPeer) {
			for range 5000 {
				p.bell.press()
			}
		}, nil},
		{"doorbell closed", func(p *ringPeer) {
			p.bell.close()
			p.say(bytesOf(10))
		}, errNothing},
		{"flood of the control socket", func(p *ringPeer) {
			p.control.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
			for err := error(nil); err == nil; {
				_, err = p.control.Write(bytes.Repeat([]byte{byte(offerOfFirst)}, 1000))
			}
		}, nil},
		{"offers without a descriptor", func(p *ringPeer) {
			require.False(p.t, p.offer(offerOfFirst))
			p.useRing()
		}, nil},
		{"an offer while the device has no descriptor left", func(p *ringPeer) {
			fd := ringOf(p.t, firstRing)
			done := useAllDescriptors(p.t)
			defer done()
			require.False(p.t, p.offer(offerOfFirst, fd))
			p.exchange()
			done()
			p.useRing()
		}, nil},
		{"offer refused", func(p *ringPeer) {
			p.say(bytesOf(8 << 10))
			_, err := io.ReadFull(p.control, make([]byte, 1))
			require.NoError(p.t, err)
			sendHello(p.t, p.control, []byte{byte(refused)})
			defect.Bytes(p.t, bytesOf(8<<10), p.frameOf(iwarpwire.Send))
		}, nil},
		{"offer not answered", func(p *ringPeer) {
			p.say(bytesOf(8 << 10))
			_, err := io.ReadFull(p.control, make([]byte, 1))
			require.NoError(p.t, err)
			defect.Bytes(p.t, bytesOf(8<<10), p.frameOf(iwarpwire.Send))
		}, nil},
		{"attempts to change memory that is mapped", func(p *ringPeer) {
			for _, fd := range []int{p.fd, p.peerFD} {
				require.ErrorIs(p.t, unix.Ftruncate(fd, 0), unix.EPERM)
				require.ErrorIs(p.t, unix.Ftruncate(fd, 1<<20), unix.EPERM)
				require.ErrorIs(p.t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, shmring.PageSize), unix.EPERM)
				_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
				require.ErrorIs(p.t, err, unix.EPERM)
				_, err = unix.Mmap(fd, 0, shmring.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
				require.ErrorIs(p.t, err, unix.EPERM)
			}
			require.ErrorIs(p.t, unix.Madvise(p.page, unix.MADV_REMOVE), unix.EPERM)
			require.Error(p.t, unix.Mprotect(p.theirs, unix.PROT_READ|unix.PROT_WRITE))
		}, nil},
		{"number of the mark changed afterwards", func(p *ringPeer) { p.u64(wordStart).Store(3) }, nil},
		{"bytes by TCP after the mark", func(p *ringPeer) { p.send(bytesOf(100)) }, nil},
		{"end of TCP", func(p *ringPeer) { require.NoError(p.t, p.conn.CloseWrite()) }, nil},
		{"move before it is followed, without a byte", func(p *ringPeer) {
			p.announce(0)
			p.put(nil)
		}, errNothing},
	}
	return list
}

// Whatever a peer does in shared memory, the device ends the connection with an error, or
// goes on. No other connection notices, no other memory is touched and nothing is left.
func TestTricks(t *testing.T) {
	for _, trick := range tricks() {
		t.Run(trick.name, func(t *testing.T) {
			eachRole(t, func(t *testing.T, s *site, p *ringPeer) {
				trick.do(p)
				if trick.want == nil || trick.want == errNothing {
					if trick.want == nil {
						p.exchange()
					}
					p.close()
					return
				}
				for _, status := range p.v.completions(1) {
					require.Equal(t, ibv.WCFlushErr, status)
				}
				requireEndAs(t, p, trick.want)
				p.close()
			})
		})
	}
}

// requireEndAs requires that the victim's connection ends as want says.
func requireEndAs(t *testing.T, p *ringPeer, want error) {
	t.Helper()
	err := p.v.event().Err
	switch want {
	case errEnd:
		require.NoError(t, err)
	case errAny:
		require.Error(t, err)
	default:
		require.ErrorIs(t, err, want)
	}
}

// A peer that says it neither reads nor writes, or that puts a message into the ring and
// never wakes, hangs its own connection only, and closing that works.
func TestSilentSharedPeer(t *testing.T) {
	for name, do := range map[string]func(p *ringPeer){
		"gone": func(p *ringPeer) {
			p.u32(wordGone).Store(1)
			p.say(bytesOf(10))
		},
		"no doorbell": func(p *ringPeer) {
			_, _, err := p.out.Write([][]byte{seal(false, sendOf(p.msn+1, 0, true, bytesOf(10)))})
			require.NoError(p.t, err)
		},
		"no room": func(p *ringPeer) {
			p.fill()
		},
		"doorbell closed": func(p *ringPeer) {
			p.bell.close()
			p.fill()
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachRole(t, func(t *testing.T, s *site, p *ringPeer) {
				do(p)
				require.NoError(t, soon(t, func() error {
					p.close()
					return nil
				}))
			})
		})
	}
}

// The peers of these tests have the pages, and break the rules before the device has moved or
// when they move themselves.
func TestTricksOfTheMark(t *testing.T) {
	for name, tt := range map[string]struct {
		do   func(p *ringPeer)
		want error
	}{
		"bytes behind the mark": {func(p *ringPeer) {
			shmring.NewPage(p.page).SetStart(p.sent + 1)
			p.send(append([]byte{0}, rtrFrame(false)...))
		}, errSharedMark},
		"place of the mark before what was sent": {func(p *ringPeer) {
			shmring.NewPage(p.page).SetStart(1)
			p.send(rtrFrame(false))
		}, errSharedMark},
		"place of the mark told and no byte": {func(p *ringPeer) {
			shmring.NewPage(p.page).SetStart(p.sent + 1)
		}, nil},
		"place of the mark far behind what is sent": {func(p *ringPeer) {
			shmring.NewPage(p.page).SetStart(1 << 40)
			p.exchange()
		}, nil},
		"mark inside an FPDU, and bytes behind it": {func(p *ringPeer) {
			shmring.NewPage(p.page).SetStart(p.sent + 8)
			p.send(seal(false, sendOf(p.msn+1, 0, true, bytesOf(10))))
		}, errSharedMark},
		"garbage in the ring at the time of the mark": {func(p *ringPeer) {
			for i := range p.page {
				p.page[i] = 0xff
			}
			shmring.NewPage(p.page).SetStart(p.sent + 1)
			p.send([]byte{0})
		}, shmring.ErrCorrupt},
		"control socket closed before the mark": {func(p *ringPeer) {
			p.control.Close()
			shmring.NewPage(p.page).SetStart(p.sent + 1)
			p.send([]byte{0})
		}, errEnd},
	} {
		t.Run(name, func(t *testing.T) {
			for _, role := range []string{"initiator", "responder"} {
				t.Run(role, func(t *testing.T) {
					nothingLeft(t)
					s := newSite(t, Config{SameHost: SameHostOn})
					good := s.bystander()
					var p *ringPeer
					if role == "initiator" {
						p = s.sharing(false)
					} else {
						p = s.hosting(false)
					}
					tt.do(p)
					if tt.want == nil {
						good.check()
					} else {
						requireEndAs(t, p, tt.want)
					}
					p.close()
					good.check()
					good.close()
				})
			}
		})
	}
}

// A reset that comes while the device moves to shared memory is found by its mark first, and TCP
// tells of it once. The connection ends with it all the same.
func TestResetBeforeMark(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	good := s.bystander()
	h := newHost(t, true)
	mem := newMemory(t, s.p)
	v, p, result := h.connect(s.p, mem, 1)
	conn, theirs, bell := h.welcome()
	require.NoError(t, p.conn.SetLinger(0))
	require.NoError(t, p.conn.Close())
	sendHello(t, conn, []byte(helloMagic), goodPage(t))
	require.NoError(t, <-result)
	require.ErrorIs(t, v.event().Err, errno.ECONNRESET)
	unix.Close(theirs)
	bell.close()
	conn.Close()
	v.close()
	require.Zero(t, mem.touched())
	mem.close()
	good.check()
	good.close()
}

// A peer that breaks the rules while a Flush waits for room learns why, and finds no end in the
// middle of a message.
func TestViolationDuringFlush(t *testing.T) {
	eachRole(t, func(t *testing.T, s *site, p *ringPeer) {
		p.v.post(make([]byte, 1<<20))
		flushed := make(chan error, 1)
		go func() {
			_, err := p.v.qp.(ibv.InPlaceQP).Flush()
			flushed <- err
		}()
		l := p.v.qp.(*qp).stream.Load().link.(*shared)
		require.Eventually(t, l.writerSleeps, patience, time.Millisecond)
		p.put(bytes.Repeat([]byte{0xff}, 200))
		p.bell.press()
		require.Error(t, p.v.event().Err)
		require.Error(t, <-flushed)
		op, _ := p.frame()
		for op == iwarpwire.Send {
			op, _ = p.frame()
		}
		require.Equal(t, iwarpwire.Terminate, op)
		p.close()
	})
}

// A byte that a peer sends as a mark before there is shared memory belongs to the stream.
func TestMarkWithoutHandover(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	good := s.bystander()
	mem := newMemory(t, s.p)
	v, p, _ := s.invite(mem, false, 1)
	p.send(rtrFrame(false), []byte{0}, rtrFrame(false))
	require.Error(t, v.event().Err)
	p.conn.Close()
	v.close()
	require.Zero(t, mem.touched())
	mem.close()
	good.check()
	good.close()
}

// A peer that has agreed on shared memory only, and sends by TCP, loses its connection.
func TestRequiredPeerSendsByTCP(t *testing.T) {
	for _, visits := range []bool{false, true} {
		nothingLeft(t)
		s := newSite(t, Config{SameHost: SameHostOn})
		good := s.bystander()
		if visits {
			p := s.sharing(true)
			p.send(rtrFrame(false))
			require.ErrorIs(t, p.v.event().Err, errSharedRequired)
			p.close()
			p = s.hosting(true)
			p.send(seal(false, sendOf(1, 0, true, bytesOf(3))))
			require.ErrorIs(t, p.v.event().Err, errSharedRequired)
			p.close()
		} else {
			mem := newMemory(t, s.p)
			v, p, _ := s.invite(mem, true, 1)
			_, err := v.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: []byte("x")}}}})
			require.NoError(t, err)
			p.send(rtrFrame(false))
			require.ErrorIs(t, v.event().Err, errSharedRequired)
			p.conn.Close()
			v.close()
			mem.close()
		}
		good.check()
		good.close()
	}
}

// A peer that closes its Unix socket when the device has its page, and that has moved by
// then, does not get at memory that the device has given back.
func TestVisitorGoneAndMoved(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	good := s.bystander()
	for range 200 {
		mem := newMemory(t, s.p)
		v, p, a := s.invite(mem, false, 1)
		rtr := rtrFrame(false)
		p.send(rtr)
		fd, page, err := shmring.Create(shmring.PageSize)
		require.NoError(t, err)
		shmring.NewPage(page).SetStart(uint64(len(rtr)) + 1)
		conn := dialMeeting(t, a)
		sendHello(t, conn, helloOf(a.Token), append([]int{fd}, goodBell(t)...)...)
		conn.Close()
		p.send([]byte{0})
		for range 3 {
			v.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: []byte("x")}}}})
		}
		p.conn.Close()
		v.event()
		v.close()
		mem.close()
		shmring.Release(page)
	}
	good.check()
	good.close()
}

// A peer may break the rules of the control socket before anybody has moved. It learns nothing, and
// the device says why.
func TestWrongBeforeMove(t *testing.T) {
	nothingLeft(t)
	s := newSite(t, Config{SameHost: SameHostOn})
	p := s.sharing(false)
	p.exchange()
	sendHello(t, p.control, []byte{255})
	require.ErrorIs(t, p.v.event().Err, errSharedOffer)
	p.close()
}

// The shared memory of a link may be given back, because the peer has gone, between two calls
// of an end that may move: those that follow fail.
func TestUseAfterRefusal(t *testing.T) {
	for _, on := range []bool{false, true} {
		nothingLeft(t)
		x, y := linkPair(t, (&sharedNet{}).open)
		l := y.(*shared)
		unixes, ours, theirs := unixPair(t), pageOf(t), pageOf(t)
		bell := goodBell(t)
		require.NoError(t, l.install(controlOf(t, unixes[0]), doorbellFDs{woken: bell[0], wakes: bell[1]}, ours, theirs))
		l.mayBegin()
		if on {
			require.NoError(t, writeTo(l, []byte("x")))
		}
		l.in.on.Store(on)
		l.refuse(errno.EPIPE)
		require.Error(t, writeTo(l, []byte("x")))
		l.trim()
		if on {
			_, err := readFrom(l, make([]byte, 1))
			require.Error(t, err)
			require.Error(t, l.closeWrite())
		}
		unixes[1].Close()
		x.close(false)
		y.close(false)
	}
}

// A peer may take bytes back between two looks of the device. Whatever the device reads then,
// the error has a text.
func TestTailUpAndDown(t *testing.T) {
	nothingLeft(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	p := newFuzzPeer(t, ln)
	over, stopped := make(chan struct{}), make(chan struct{})
	defer func() {
		close(over)
		<-stopped
		p.close()
	}()
	go func() {
		defer close(stopped)
		tail := (*atomic.Uint64)(unsafe.Pointer(&p.page[wordTail]))
		for i := uint64(0); ; i++ {
			select {
			case <-over:
				return
			default:
				tail.Store(i & 1)
			}
		}
	}()
	for range 200000 {
		n, wait, err := p.l.readv(0, [][]byte{p.buf[:1]})
		if err != nil {
			require.ErrorIs(t, err, shmring.ErrCorrupt)
		} else {
			require.NotEqual(t, wait, n > 0, "no bytes, and no reason to wait")
		}
		if n > 0 { // Begin again.
			p.l.in.ring = shmring.NewReader(p.l.out.page, p.l.in.page)
		}
	}
}

// unixPair returns two Unix sockets that are connected.
func unixPair(t testing.TB) (conns [2]*net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	require.NoError(t, err)
	for i, fd := range fds {
		conns[i] = connOf(t, fd).(*net.UnixConn)
	}
	return conns
}

func pageOf(t testing.TB) []byte {
	t.Helper()
	fd, mem, err := shmring.Create(shmring.PageSize)
	require.NoError(t, err)
	unix.Close(fd)
	return mem
}

// A scribbler is a peer that writes anything over all its memory, in turns with FPDUs.
type scribbler struct {
	p    *ringPeer
	rnd  *rand.Rand
	mode int
	ring []byte // ring is the memory outside the page, or nil.
}

// step does one thing, and reports whether the device has gone.
func (s *scribbler) step() (gone bool) {
	p, rnd := s.p, s.rnd
	switch {
	case s.mode == 0 && rnd.IntN(4) == 0: // anything anywhere
		p.u64(8 * rnd.IntN(shmring.PageSize/8)).Store(rnd.Uint64() >> rnd.IntN(64))
	case s.mode == 1 && rnd.IntN(2) == 0: // small changes of words
		words := []int{wordTail, wordOrigin, wordOrigin + 8, wordMoveAt, wordHead, wordStart}
		p.u64(words[rnd.IntN(len(words))]).Add(uint64(rnd.IntN(9) - 4))
	case s.mode == 2: // the bytes of the ring, what is said about processors and the sleep words
		p.u32([]int{wordSendCPU, wordRecvCPU, wordRecvNap, wordSendNap}[rnd.IntN(4)]).Store(rnd.Uint32())
		p.u64(shmring.PageSize - pageRing + 8*rnd.IntN(pageRing/8)).Store(rnd.Uint64())
	case s.mode == 3 && rnd.IntN(8) == 0: // moves
		p.u32(wordMoveLen).Store([]uint32{0, shmring.MinRing, firstRing, rnd.Uint32()}[rnd.IntN(4)])
		p.u64(wordMoveAt).Store(p.u64(wordTail).Load() + uint64(rnd.IntN(3)) - 1)
		p.u32(wordMove).Add(uint32(rnd.IntN(3)))
	}
	if s.ring != nil {
		(*atomic.Uint64)(unsafe.Pointer(&s.ring[8*rnd.IntN(len(s.ring)/8)])).Store(rnd.Uint64())
	}
	switch rnd.IntN(8) {
	case 0:
		p.msn++
		p.out.Write([][]byte{seal(false, sendOf(p.msn, 0, true, bytesOf(rnd.IntN(recvLen))))})
	case 1:
		p.out.Write([][]byte{seal(false, writeOf(pinnedSTag+1, pinnedBase, bytesOf(rnd.IntN(regionLen))))})
	case 2:
		p.out.Write([][]byte{seal(false, readOf(1, iwarpwire.ReadReq{SinkSTag: 1, Size: regionLen, SrcSTag: pinnedSTag + 1, SrcTO: pinnedBase}))})
	case 3:
		if p.out.CanMove() {
			power := int(offerOfLeast) + rnd.IntN(3)
			fd, mem, err := shmring.Create(1 << power)
			if err != nil {
				break
			}
			c := plainControl(p.t, p.control)
			err = c.send(controlMessage(power), fd)
			unix.Close(fd)
			if err != nil {
				shmring.Release(mem)
				break
			}
			p.rings = append(p.rings, mem)
			// Mostly it waits for the answer.
			answer, _, ok := c.receive()
			for range 1000 {
				if ok || rnd.IntN(5000) == 0 {
					break
				}
				time.Sleep(10 * time.Microsecond)
				answer, _, ok = c.receive()
			}
			if !ok || answer == accepted {
				p.out.Move(mem)
				s.ring = mem
			}
		}
	}
	p.bell.press()
	return p.deviceGone()
}

// scribble goes on until the device has gone, or for a number of steps.
func (s *scribbler) scribble(steps int) {
	for range steps {
		if s.step() {
			return
		}
	}
}

// Peers that write anything over their memory while the device uses it end their connections
// only.
func TestScribbling(t *testing.T) {
	for mode, name := range []string{"anywhere", "the words", "the ring", "the moves"} {
		t.Run(name, func(t *testing.T) {
			eachRole(t, func(t *testing.T, s *site, p *ringPeer) {
				p.mem.pin()
				for range 10 {
					p.say(bytesOf(recvLen))
				}
				(&scribbler{p: p, rnd: rand.New(rand.NewPCG(uint64(mode), 2)), mode: mode}).scribble(3000)
				p.close()
			})
		})
	}
}

// fuzzPeer has what one input of FuzzSharedPeer is fed to.
type fuzzPeer struct {
	l       *shared
	page    []byte // page is that of the peer, mapped for writing.
	control *net.UnixConn
	bell    doorbellFDs
	tcp     net.Conn
	buf     []byte
}

func newFuzzPeer(t testing.TB, ln net.Listener) *fuzzPeer {
	t.Helper()
	return newFuzzPeerAt(t, ln, new(meeting))
}

// newFuzzPeerAt is the same for a link of the device with the meeting.
func newFuzzPeerAt(t testing.TB, ln net.Listener, m *meeting) *fuzzPeer {
	t.Helper()
	x, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	y, err := ln.Accept()
	require.NoError(t, err)
	x.(*net.TCPConn).SetLinger(0) // No port is kept for a while.
	l := &shared{meeting: m, why: errSharedEarly}
	l.agreed.passive = true
	require.NoError(t, l.tcp.init(y))
	fd, page, err := shmring.Create(shmring.PageSize)
	require.NoError(t, err)
	theirs, err := shmring.Map(fd, shmring.PageSize)
	require.NoError(t, err)
	unix.Close(fd)
	controls := unixPair(t)
	bell, theirBell, err := newDoorbells()
	require.NoError(t, err)
	require.NoError(t, l.install(controlOf(t, controls[0]), theirBell, pageOf(t), theirs))
	l.mayBegin()
	l.out.on.Store(true)
	l.in.on.Store(true)
	return &fuzzPeer{l: l, page: page, control: controls[1], bell: bell, tcp: x, buf: make([]byte, 256*256)}
}

func (f *fuzzPeer) close() {
	f.tcp.Close()
	f.l.close(true)
	f.control.Close()
	f.bell.close()
	shmring.Release(f.page)
	f.page = nil
}

// step does what two bytes of the input say. Nothing waits.
func (f *fuzzPeer) step(t testing.TB, op, arg byte) {
	l := f.l
	switch op % 16 {
	case 0, 1, 2: // the words
		f.page[(int(arg)*2+int(op>>4)&1)%wordsEnd] = op >> 4
	case 3:
		off := []int{wordTail, wordOrigin, wordMoveAt, wordHead, wordStart}[int(op>>4)%5]
		(*atomic.Uint64)(unsafe.Pointer(&f.page[off])).Add(uint64(arg))
	case 4:
		(*atomic.Uint32)(unsafe.Pointer(&f.page[wordMove])).Add(uint32(arg) & 1)
		(*atomic.Uint64)(unsafe.Pointer(&f.page[wordMoveAt])).Store((*atomic.Uint64)(unsafe.Pointer(&f.page[wordTail])).Load())
		binary.LittleEndian.PutUint32(f.page[wordMoveLen:], uint32(op>>4)<<10)
	case 5: // the ring
		f.page[shmring.PageSize-pageRing+int(arg)*8] = op
	case 6: // the doorbell
		if arg&1 == 0 {
			f.send(make([]byte, int(arg)))
		} else {
			shutdownToRing(uintptr(f.bell.wakes))
		}
	case 7: // a descriptor
		size := shmring.PageSize << (arg % 4)
		if arg&0x80 != 0 {
			f.send([]byte{byte(offerOfLeast)}, badPages()["page without seals"](t))
		} else {
			f.send([]byte{byte(int(offerOfLeast) + int(arg)%4)}, ringOf(t, size))
		}
		l.hear(l.watched) // which does not wait for the watch
	case 8, 9:
		n, err := pollFrom(l, f.buf[:int(arg)*16+1])
		f.check(t, n, int(arg)*16+1, err)
	case 10, 11:
		n := int(arg) * int(op)
		l.write(func(at uintptr) bool {
			k, _, err := l.writev(at, [][]byte{f.buf[:n/2], f.buf[n/2 : n]})
			f.check(t, k, n, err)
			return true
		})
	case 12:
		l.trim()
	case 13: // a read that does not wait, as the deadline has passed or the interrupt came
		if arg&1 == 0 {
			l.interrupt()
		} else {
			l.setReadDeadline(time.Unix(1, 0))
		}
		n, err := readFrom(l, f.buf[:int(arg)+1])
		f.check(t, n, int(arg)+1, err)
	case 14: // what a read and a write do before they wait
		l.nothingToWaitFor(0)
		l.noNeedToWait(0)
	case 15:
		switch arg % 16 {
		case 0:
			l.closeWrite()
		case 1:
			f.control.CloseWrite()
		case 2:
			l.refuse(errno.EPIPE)
		}
	}
}

// send sends bytes by the control socket, if there is room for them, with descriptors, which it
// closes.
func (f *fuzzPeer) send(b []byte, fds ...int) {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	raw, _ := f.control.SyscallConn()
	raw.Control(func(fd uintptr) {
		unix.Sendmsg(int(fd), b, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func (f *fuzzPeer) check(t testing.TB, n, most int, err error) {
	if n < 0 || n > most {
		t.Fatalf("%d of %d bytes: %v", n, most, err)
	}
}

// FuzzSharedPeer has a peer store anything into its memory, ring and send descriptors, between
// the calls of a link, which finds an error or goes on.
func FuzzSharedPeer(f *testing.F) {
	f.Add([]byte{10, 100, 8, 10, 3, 16, 8, 200, 6, 1, 14, 0, 13, 0, 13, 1})
	f.Add([]byte{7, 2, 0x44, 1, 8, 1, 8, 1, 12, 0, 15, 0})
	f.Add([]byte{11, 255, 11, 255, 0x33, 255, 10, 30, 12, 1, 15, 1, 14, 1, 8, 1})
	f.Add([]byte{15, 2, 10, 10, 8, 1, 12, 0, 15, 0, 14, 0})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(f, err)
	f.Cleanup(func() { ln.Close() })
	f.Fuzz(func(t *testing.T, program []byte) {
		before := sharedMappings(t)
		p := newFuzzPeer(t, ln)
		for ; len(program) >= 2; program = program[2:] {
			p.step(t, program[0], program[1])
		}
		p.close()
		requireMappings(t, before)
	})
}

// connOf returns the connection of a descriptor, which it closes.
func connOf(t testing.TB, fd int) net.Conn {
	t.Helper()
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	conn, err := net.FileConn(f)
	require.NoError(t, err)
	return conn
}

// A responder closes its control socket and leaves TCP open, after the initiator has moved and before
// it has moved itself. The initiator finds that out when it waits for room.
func TestUnmovedResponderGone(t *testing.T) {
	for _, fill := range []bool{false, true} {
		nothingLeft(t)
		s := newSite(t, Config{SameHost: SameHostOn})
		good := s.bystander()
		p := s.hosting(false)
		p.tell([]byte("by TCP")) // What has come before is not lost.
		if fill {
			p.fill()
		}
		p.control.Close()
		p.say([]byte("x"))
		if fill {
			p.v.event()
		} else {
			p.v.completions(1)
		}
		require.Equal(t, "by TCP", string(p.mem.region(0)[:6]))
		p.close()
		good.check()
		good.close()
	}
}
