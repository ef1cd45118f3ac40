package rdmanet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// A movement is large data both ways at once on one connection, by all calls
// that send and receive it, on a device that may fail.
type movement struct {
	cfg  Config
	data [2][]byte

	early atomic.Bool // an end has closed because it could not read

	mu   sync.Mutex
	errs []error // what went wrong
	bad  []error // what must never be
}

func newMovement(noRead bool) *movement {
	return &movement{
		cfg:  Config{TransferSize: minTransfer, NoRDMARead: noRead, MaxReceiveSize: 16 << 10, LingerTimeout: patience},
		data: [2][]byte{pattern(1, heavy(1<<20)), pattern(2, heavy(1<<20))},
	}
}

func (m *movement) note(list *[]error, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	*list = append(*list, err)
}

func (m *movement) failed(what string, err error) {
	if err == nil {
		return
	}
	m.note(&m.errs, fmt.Errorf("%s: %w", what, err))
	var op *net.OpError
	if !errors.As(err, &op) && err != io.ErrUnexpectedEOF {
		m.note(&m.bad, fmt.Errorf("%s: not an OpError: %w", what, err))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		m.note(&m.bad, fmt.Errorf("%s hung: %w", what, err))
	}
}

// send sends p in parts, from ordinary memory, from a Buffer, by QueueMsg and by
// ReadFrom, and ends the stream.
func (m *movement) send(c *Conn, p []byte) {
	buf, err := Alloc(len(p))
	if err != nil {
		m.note(&m.bad, err)
		return
	}
	defer buf.Free()
	copy(buf.Bytes(), p)
	fourth := len(p) / 4
	for _, part := range [][]byte{p[:fourth], buf.Bytes()[fourth : 2*fourth]} {
		n, err := c.Write(part)
		m.failed("write", err)
		if n > len(part) || err == nil && n < len(part) {
			m.note(&m.bad, fmt.Errorf("wrote %d of %d bytes: %w", n, len(part), err))
		}
		if err != nil {
			return
		}
	}
	if !m.queue(c, buf.Bytes()[2*fourth:3*fourth]) {
		return
	}
	n, err := c.ReadFrom(bytes.NewReader(p[3*fourth:]))
	m.failed("read from", err)
	if err == nil && int(n) != len(p)-3*fourth {
		m.note(&m.bad, fmt.Errorf("read %d bytes from %d without an error", n, len(p)-3*fourth))
	}
	if err == nil {
		m.failed("close write", c.CloseWrite())
	}
}

// queue sends p by more queued sends than go at a time.
func (m *movement) queue(c *Conn, p []byte) bool {
	var sends []*PendingMessage
	var parts [][]byte
	for part := range slices.Chunk(p, max(minTransfer, len(p)/(2*maxBounceBuffers))) {
		parts = append(parts, part)
		sends = append(sends, c.QueueMsg(part))
	}
	ok := true
	for i, q := range sends {
		n, err := q.Result()
		m.failed("queued send", err)
		if n > len(parts[i]) || err == nil && n < len(parts[i]) {
			m.note(&m.bad, fmt.Errorf("sent %d of %d bytes: %w", n, len(parts[i]), err))
		}
		ok = ok && err == nil
	}
	return ok
}

// receive expects p: some of it into ordinary memory, into a Buffer, in small
// pieces and by WriteTo. It reports whether nothing failed.
func (m *movement) receive(c *Conn, p []byte) bool {
	buf, err := Alloc(len(p))
	if err != nil {
		m.note(&m.bad, err)
		return false
	}
	defer buf.Free()
	fourth := len(p) / 4
	check := func(b, want []byte, err error) bool {
		if err == io.EOF && m.early.Load() {
			err = io.ErrUnexpectedEOF
		}
		m.failed("read", err)
		if wrong := defect.Differ(want[:min(len(b), len(want))], b); wrong != nil {
			m.note(&m.bad, wrong)
		}
		return err == nil
	}
	for i, into := range [][]byte{make([]byte, fourth), buf.Bytes()[:fourth]} {
		n, err := io.ReadFull(c, into)
		if !check(into[:n], p[i*fourth:], err) {
			return false
		}
	}
	var small bytes.Buffer
	_, err = io.CopyBuffer(&small, struct{ io.Reader }{io.LimitReader(c, int64(fourth))}, make([]byte, 1000))
	if !check(small.Bytes(), p[2*fourth:], err) || small.Len() < fourth {
		return false
	}
	var rest bytes.Buffer
	_, err = c.WriteTo(&rest)
	if !check(rest.Bytes(), p[3*fourth:], err) {
		return false
	}
	if rest.Len() == len(p)-3*fourth {
		return true
	}
	if m.early.Load() {
		m.failed("write to", io.ErrUnexpectedEOF)
	} else {
		m.note(&m.bad, defect.Lost("%d bytes and the end, not %d", rest.Len(), len(p)-3*fourth))
	}
	return false
}

// run moves the data over a pair and closes it. An end that cannot read closes at once:
// neither could send while the other waits for memory that its own sends hold.
func (m *movement) run(a, b *Conn) {
	var wg sync.WaitGroup
	for i, c := range []*Conn{a, b} {
		c.SetDeadline(time.Now().Add(patience))
		var end sync.WaitGroup
		end.Go(func() { m.send(c, m.data[i]) })
		end.Go(func() {
			if !m.receive(c, m.data[1-i]) {
				m.early.Store(true)
				m.failed("close", c.Close())
			}
		})
		wg.Go(func() {
			end.Wait()
			m.failed("close", c.Close())
		})
	}
	wg.Wait()
}

// transferFaults moves data again and again, each time with one fault that set
// sets, the n-th of its kind, until there is no n-th. It returns in how many runs
// it was felt.
func transferFaults(t *testing.T, noRead bool, set func(s *verbstest.Switch, n int) *verbstest.Fault) (felt int) {
	m := newMovement(noRead)
	for n := 1; ; n += faultStep(4 * n) {
		s := verbstest.NewSwitch(newProvider(t))
		m.cfg.Provider = s
		m.errs, m.bad = nil, nil
		m.early.Store(false)
		a, b := pipeOn(t, m.cfg)
		fault := set(s, n)
		within(t, fmt.Sprintf("fault %d", n), func() { m.run(a, b) })
		require.Empty(t, m.bad, "fault %d", n)
		requireReleased(t, s)
		if len(m.errs) > 0 {
			felt++
		}
		if !fault.Fired() {
			require.Empty(t, m.errs, "without a fault")
			return felt
		}
		require.Less(t, n, 10000, "there is no end of calls")
	}
}

// Every call that moves data fails once in the middle of transfers. It is an error
// of that connection, or passes unnoticed as with memory that is not
// registered; nothing hangs, leaks, or gets its data wrong.
func TestTransferFaults(t *testing.T) {
	checkLeaks(t)
	setDomainIdle(t, 0)
	setScratchIdle(t, 0)
	for _, m := range transferPeers {
		for _, k := range []verbstest.Kind{verbstest.RegMR, verbstest.PostSend, verbstest.PostRecv, verbstest.Poll, verbstest.Arm, verbstest.Wait} {
			t.Run(m.name+"/"+k.String(), func(t *testing.T) {
				felt := transferFaults(t, !m.reads, func(s *verbstest.Switch, n int) *verbstest.Fault {
					return s.FailNth(n, syscall.ENOMEM, k)
				})
				if k == verbstest.RegMR {
					require.Zero(t, felt, "they go on without")
				} else {
					require.NotZero(t, felt, "no fault was felt")
				}
			})
		}
		t.Run(m.name+"/chain", func(t *testing.T) {
			transferFaults(t, !m.reads, func(s *verbstest.Switch, n int) *verbstest.Fault {
				return s.FailPost(n, verbstest.PostSend, 1, nil)
			})
		})
		for _, op := range []ibv.WCOpcode{ibv.WCRead, ibv.WCWrite, ibv.WCSend, ibv.WCRecv} {
			t.Run(m.name+"/completion of "+op.String(), func(t *testing.T) {
				felt := transferFaults(t, !m.reads, func(s *verbstest.Switch, n int) *verbstest.Fault {
					return s.FailCompletion(n, ibv.WCGeneralErr, op)
				})
				if op == ibv.WCRecv || (op == ibv.WCRead) == m.reads && op != ibv.WCSend {
					require.NotZero(t, felt, "no fault was felt")
				}
			})
		}
	}
}

// Where less and less memory can be registered data goes in more and more pieces,
// and in the end not at all, with an error that says what to do.
func TestTransferMemoryLimit(t *testing.T) {
	checkLeaks(t)
	for _, m := range transferPeers {
		for _, more := range []int64{0, 4 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20} {
			t.Run(fmt.Sprintf("%s/%d KiB", m.name, more>>10), func(t *testing.T) {
				sw := newSwitch(t, nil)
				mv := newMovement(!m.reads)
				mv.cfg.Provider = sw
				a, b := pipeOn(t, mv.cfg)
				sw.LimitMemory(sw.RegisteredBytes() + more)
				within(t, "the movement", func() { mv.run(a, b) })
				require.Empty(t, mv.bad)
				told := false
				for _, err := range mv.errs {
					if errors.Is(err, syscall.ENOBUFS) {
						told = true
						require.ErrorContains(t, err, "ulimit -l")
						require.ErrorContains(t, err, "Config.")
						continue
					}
					// One end has closed then.
					require.True(t, slices.ContainsFunc([]error{syscall.EPIPE, syscall.ECONNRESET, net.ErrClosed, io.ErrUnexpectedEOF},
						func(is error) bool { return errors.Is(err, is) }), "%v", err)
				}
				require.True(t, told || len(mv.errs) == 0, "%v", mv.errs)
			})
		}
	}
}

// A queue pair that fails in the middle of a transfer, and does not say so, leaves
// its connection to deadlines and Close.
func TestTransferSilentFailure(t *testing.T) {
	setWithdrawWithin(t, 100*time.Millisecond)
	for _, size := range []int{1 << 20, 1000} { // of a Read
		checkLeaks(t)
		m := newModest(t, 1<<20, 1<<14, false)
		m.mute = true
		a, b := pipeOn(t, Config{Provider: m, TransferSize: 64 << 10, LingerTimeout: 50 * time.Millisecond})
		b.SetWriteDeadline(time.Now().Add(patience))
		wrote := writing(b, alloc(t, 8<<20).Bytes())
		require.True(t, eventually(func() bool { return a.Stats().TransfersReceived > 0 }))
		e := m.end(a)
		var failed atomic.Bool
		e.OnPolled(func(wcs []ibv.WC) {
			if slices.ContainsFunc(wcs, func(wc ibv.WC) bool { return wc.Status != ibv.WCSuccess }) {
				failed.Store(true)
			}
		})
		require.NoError(t, e.Break())
		require.True(t, eventually(failed.Load), "no completion has failed")
		read := make(chan error, 1)
		go func() { read <- drainBy(a, size) }()
		time.AfterFunc(20*time.Millisecond, func() { a.SetReadDeadline(time.Now()) })
		within(t, "Read", func() { requireTimeout(t, <-read) })
		within(t, "Close", func() {
			a.Close()
			b.Close()
			<-wrote
		})
	}
}

// drainBy reads up to n bytes at a time until an error.
func drainBy(c *Conn, n int) error {
	for p := make([]byte, n); ; {
		if _, err := c.Read(p); err != nil {
			return err
		}
	}
}

// Where memory is pinned a connection has some of its own, with which it reads what
// is offered when no more can be registered.
func TestTransferWithoutMemory(t *testing.T) {
	checkLeaks(t)
	for _, m := range transferPeers {
		t.Run(m.name, func(t *testing.T) {
			sw := newSwitch(t, newModest(t, 1<<20, 1<<14, true))
			a, b := pipe(t, "rdma4", local4, &ListenConfig{Config: Config{Provider: sw, NoRDMARead: !m.reads}}, &Dialer{Config: Config{Provider: newProvider(t), TransferSize: minTransfer}})
			a.SetDeadline(time.Now().Add(patience))
			sw.LimitMemory(1)
			from := alloc(t, 300000)
			copy(from.Bytes(), pattern(1, 300000))
			for _, size := range []int{300000, 1000} { // of a Read
				wrote := writing(a, from.Bytes())
				got := make([]byte, 300000)
				for n := 0; n < len(got); {
					k, err := b.Read(got[n:min(n+size, len(got))])
					require.NoError(t, err)
					n += k
				}
				defect.Bytes(t, from.Bytes(), got)
				require.Equal(t, result{300000, nil}, <-wrote)
			}
			require.EqualValues(t, 2, b.Stats().TransfersReceived)
			sw.LimitMemory(0)
			require.NoError(t, a.Close())
			require.NoError(t, b.Close())
			requireReleased(t, sw)
		})
	}
}

// A Read that finds no memory for a transfer is tried again when there is some,
// and has lost nothing.
func TestTransferWaitsForMemory(t *testing.T) {
	if regmem.PinsMemory(testDevice(t)) {
		return // a connection has memory of its own for that: TestTransferWithoutMemory
	}
	const n = 100000
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		s.device.LimitMemory(1)
		held := takeFree(c.pool)
		want := pattern(1, n)
		addr, key := p.Register(want)
		p.Begin(reads, 1, n, addr, key)
		b := make([]byte, n)
		for _, size := range []int{n, 10} {
			k, err := c.Read(b[:size])
			require.Zero(t, k)
			require.ErrorIs(t, err, syscall.ENOBUFS)
			require.ErrorContains(t, err, "ulimit -l")
			require.ErrorContains(t, err, "Config.")
		}
		s.device.LimitMemory(0)
		for _, buf := range held {
			buf.Release()
		}
		read := reading(c, b)
		if !reads {
			g := p.ExpectTransfer(smbdpeer.Grant)
			require.EqualValues(t, n, g.Length)
			require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want, g.Addr, g.Key))
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: n})
		}
		require.Equal(t, result{n, nil}, s.await(read))
		defect.Bytes(t, want, b)
		require.NotZero(t, c.Stats().TransfersRefused)
	})
}

// Where no memory can be registered for what waits for the reader, that makes room for
// what the peer may have to tell meanwhile.
func TestReceivesWithoutMemory(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			s.cfg.MaxReceiveCredits = 16
			c, p := s.transferConns(side.active, true)
			s.device.LimitMemory(1)
			held := takeFree(c.pool)
			sends := 0
			for err := error(nil); err == nil; sends++ { // all credits but those that are kept
				_, err = c.WriteMsg([]byte{1}, NonBlocking)
				require.True(t, err == nil || errors.Is(err, syscall.EAGAIN), "%v", err)
			}
			require.Greater(t, sends, 1)
			size := c.Info().MaxReceiveSize - smbdpeer.PayloadOffset
			var want []byte
			left := receiveAll(t, c, p)
			for n := range s.cfg.MaxReceiveCredits - minCredits {
				// A message with payload leaves the peer a credit that it may use, besides
				// that for FIN. The answers take c's last credit and all that it has to grant.
				for asked := 0; p.Credits < 3; asked++ {
					require.Less(t, asked, 3, "the peer gets no second credit after %d messages", n)
					p.RequestResponse(2 - min(left, 2))
					_, _, ok := p.ReceiveData()
					require.True(t, ok)
					left = receiveAll(t, c, p)
				}
				b := smbdpeer.DataTransfer{CreditsRequested: 16, DataOffset: smbdpeer.PayloadOffset, DataLength: uint32(size)}.Message(smbdpeer.PayloadOffset + size)
				copy(b[smbdpeer.PayloadOffset:], pattern(uint64(n), size))
				want = append(want, b[smbdpeer.PayloadOffset:]...)
				p.SendData(b)
				left = receiveAll(t, c, p)
			}
			s.device.LimitMemory(0)
			got := make([]byte, len(want))
			require.Equal(t, result{len(want), nil}, s.await(reading(c, got)))
			defect.Bytes(t, want, got)
			for _, buf := range held {
				buf.Release()
			}
			require.NoError(t, c.Close())
		})
	}
}

// What was asked for and could not be posted is given back with what was posted
// before it and never came.
func TestTransferReadNotPosted(t *testing.T) {
	checkLeaks(t)
	m := newModest(t, 1<<20, 1<<14, false)
	m.stuck = true
	sw := newSwitch(t, m)
	a, b := pipeOn(t, Config{Provider: sw, TransferSize: 64 << 10, LingerTimeout: -1})
	wrote := writing(b, alloc(t, 8<<20).Bytes())
	_, err := a.Read(make([]byte, 1000))
	require.ErrorIs(t, err, ibv.ErrState)
	require.NoError(t, a.Close())
	require.Error(t, (<-wrote).err)
	b.Close()
}

// Nothing is said to be written of what the device has refused.
func TestTransferOfferNotPosted(t *testing.T) {
	for _, m := range transferPeers {
		for name, write := range map[string]func(c *Conn) (int64, error){
			"Write": func(c *Conn) (int64, error) { n, err := c.Write(make([]byte, 100000)); return int64(n), err },
			"QueueMsg": func(c *Conn) (int64, error) {
				n, err := c.QueueMsg(make([]byte, 100000)).Result()
				return int64(n), err
			},
			"ReadFrom": func(c *Conn) (int64, error) { return c.ReadFrom(bytes.NewReader(make([]byte, 100000))) },
		} {
			t.Run(m.name+"/"+name, func(t *testing.T) {
				s := newScene(t)
				c, _ := s.transferConns(true, m.reads)
				// What is written while a grant is posted would wait, and count as taken.
				require.True(t, eventually(func() bool {
					posts := c.Stats().Posts
					time.Sleep(2 * time.Millisecond)
					return c.Stats().Posts == posts
				}))
				s.device.FailNth(1, nil, verbstest.PostSend)
				n, err := write(c)
				require.ErrorIs(t, err, verbstest.ErrInjected)
				require.Zero(t, n)
			})
		}
	}
}

// tactless panics when it is asked to read or to write, or says that it has read
// more than there was room for.
type tactless struct{ lies bool }

func (r tactless) Read(p []byte) (int, error) {
	if r.lies {
		return len(p) + 1, nil
	}
	panic("read")
}

func (tactless) Write([]byte) (int, error) { panic("write") }

// A program's reader or writer that panics in the middle of ReadFrom or WriteTo
// leaves no memory behind.
func TestTransferPanics(t *testing.T) {
	cfg := Config{Provider: newSwitch(t, nil), TransferSize: minTransfer, LingerTimeout: -1}
	eachMode(t, cfg, func(t *testing.T, a, b *Conn) {
		before := countScratch()
		for _, lies := range []bool{false, true} {
			require.Panics(t, func() { a.ReadFrom(tactless{lies}) })
			require.Equal(t, before, countScratch())
		}
		sent := make(chan error, 1)
		go func() {
			a.Write(make([]byte, 10))
			a.Write(make([]byte, 100000))
			sent <- a.CloseWrite()
		}()
		for range 2 {
			require.Panics(t, func() { b.WriteTo(tactless{}) })
		}
		_, err := io.Copy(io.Discard, b)
		require.NoError(t, err)
		require.NoError(t, <-sent)
		require.Equal(t, before, countScratch())
		// No receive is kept for the reader: all are posted again, with the one for messages
		// about transfers.
		require.True(t, eventually(func() bool { s := b.Stats(); return s.ReceiveCredits == s.ReceiveWindow+1 }), "%+v", b.Stats())
	})
}
