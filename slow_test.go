package rdmanet

import (
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Large transfers over a slow link: how long calls with a deadline wait for what is under
// way, and that keep-alive does not take bytes that come slowly for silence.

// slowLink forwards what the client sends at one rate, and what the server sends at another,
// or at once if that is 0. It holds some 64 KiB a direction at a time.
type slowLink struct {
	ln         *net.TCPListener
	target     string
	rate, back int64
	passed     atomic.Int64 // bytes from the client
	returned   atomic.Int64 // bytes to it

	mu    sync.Mutex
	conns []net.Conn
	done  sync.WaitGroup
}

func newSlowLink(t testing.TB, target string, rate, back int64) *slowLink {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	l := &slowLink{ln: ln.(*net.TCPListener), target: target, rate: rate, back: back}
	l.done.Go(l.serve)
	t.Cleanup(func() {
		ln.Close()
		l.mu.Lock()
		for _, c := range l.conns {
			c.Close()
		}
		l.mu.Unlock()
		l.done.Wait()
	})
	return l
}

func (l *slowLink) serve() {
	for {
		a, err := l.ln.AcceptTCP()
		if err != nil {
			return
		}
		b, err := net.Dial("tcp4", l.target)
		if err != nil {
			a.Close()
			continue
		}
		for _, c := range []*net.TCPConn{a, b.(*net.TCPConn)} {
			c.SetReadBuffer(64 << 10) // TCP waits for its timers with less than the longest segment of the loopback interface.
		}
		l.mu.Lock()
		l.conns = append(l.conns, a, b)
		l.mu.Unlock()
		l.done.Go(func() { forward(b, a, l.rate, &l.passed) })
		l.done.Go(func() { forward(a, b, l.back, &l.returned) })
	}
}

// forward makes up for no more than slowCatchUp that it comes late, so that the rate is an
// upper bound at any time.
func forward(to, from net.Conn, rate int64, passed *atomic.Int64) {
	defer to.Close()
	p := make([]byte, 4<<10)
	var due time.Time
	for {
		n, err := from.Read(p)
		if err != nil {
			return
		}
		if now := time.Now(); due.Before(now.Add(-slowCatchUp)) {
			due = now.Add(-slowCatchUp)
		}
		if rate > 0 {
			due = due.Add(time.Duration(n) * time.Second / time.Duration(rate))
			time.Sleep(time.Until(due))
		}
		if _, err := to.Write(p[:n]); err != nil {
			return
		}
		passed.Add(int64(n))
	}
}

const slowCatchUp = 5 * time.Millisecond

// slowConns is a connection over a slow link from the first to the second, and back.
func slowConns(t testing.TB, cfg Config, rate, back int64) (from, to *Conn, l *slowLink) {
	t.Helper()
	return slowConnsOf(t, cfg, cfg, rate, back)
}

// slowConnsOf is the same with a Config for each end.
func slowConnsOf(t testing.TB, cfg, listener Config, rate, back int64) (from, to *Conn, l *slowLink) {
	t.Helper()
	cfg.Provider, listener.Provider = overTCP(), overTCP()
	ln, err := (&ListenConfig{Config: listener}).Listen(tctx, "rdma4", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	l = newSlowLink(t, ln.Addr().String(), rate, back)
	c, err := (&Dialer{Config: cfg}).Dial("rdma4", l.ln.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	a, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { a.Close() })
	return c.(*Conn), a.(*Conn), l
}

// repeat calls Read or Write with n bytes until it fails.
func repeat(wg *sync.WaitGroup, call func([]byte) (int, error), n int) {
	wg.Go(func() {
		p := make([]byte, n)
		for err := error(nil); err == nil; _, err = call(p) {
		}
	})
}

const slowRate = 1e6 // bytes a second

// A call that has to end in the middle of a transfer waits for no more bytes than a link of
// a megabyte a second carries in 250 ms. The bytes are counted, so that it does not matter
// how busy the machine is.
func TestSlowDeadline(t *testing.T) {
	const bound = int64(slowRate * deadlineBound / time.Second)
	for _, tt := range []struct {
		name string
		end  func(from, to *Conn) error
		read bool // it ends Read
	}{
		{"read deadline", func(_, to *Conn) error { return to.SetReadDeadline(past) }, true},
		{"write deadline", func(from, _ *Conn) error { return from.SetWriteDeadline(past) }, false},
		{"Close of the reader", func(_, to *Conn) error { return to.Close() }, true},
		{"Close of the writer", func(from, _ *Conn) error { return from.Close() }, false},
	} {
		for name, noRead := range map[string]bool{"read": false, "write": true} {
			for when, after := range map[string]int64{"at the beginning": 20 << 10, "later": 600 << 10} {
				t.Run(tt.name+"/"+name+"/"+when, func(t *testing.T) {
					checkLeaks(t)
					from, to, link := slowConns(t, Config{TransferSize: minTransfer, NoRDMARead: noRead}, slowRate, 0)
					p := alloc(t, 4<<20).Bytes()
					read := make(chan result, 1)
					parked(t, func() {
						n, err := to.Read(make([]byte, len(p)))
						read <- result{n, err}
					})
					wrote := writing(from, p)
					require.True(t, eventually(func() bool { return link.passed.Load() >= after }))
					before := link.passed.Load()
					ended := make(chan error, 1)
					go func() { ended <- tt.end(from, to) }()
					var r result
					within(t, tt.name, func() {
						if tt.read {
							r = <-read
						} else {
							r = <-wrote
						}
					})
					more := link.passed.Load() - before
					t.Logf("%d bytes, %v, %d of them after the call was to end", r.n, r.err, more)
					require.Less(t, more, bound)
					require.Less(t, r.n, len(p))
					require.NoError(t, <-ended)
					from.Close() // whatever still waits
					to.Close()
				})
			}
		}
	}
}

// Where the peer writes as well its answer comes behind that, once or, by RDMA Read, twice:
// no more than what this end has receives for.
func TestSlowDeadlineBothWays(t *testing.T) {
	for name, noRead := range map[string]bool{"read": false, "write": true} {
		for what, load := range map[string]struct {
			size    int // of the peer's messages
			credits int
			least   int64 // of a transfer so much may have been asked for, whatever the window
		}{
			"segments":       {1000, 64, 0},
			"segments, more": {1000, 250, 0},
			"transfers":      {1 << 20, 64, 128 << 10},
		} {
			t.Run(name+"/"+what, func(t *testing.T) {
				checkLeaks(t)
				cfg := Config{TransferSize: minTransfer, MaxReceiveSize: 1024, MaxReceiveCredits: load.credits, NoRDMARead: noRead}
				window := int64(cfg.MaxReceiveCredits * (cfg.MaxReceiveSize + 100)) // with the headers below
				times := int64(2)
				if noRead {
					times = 1
				}
				bound := int64(slowRate*deadlineBound/time.Second) + times*max(window, load.least)
				size := load.size
				from, to, link := slowConns(t, cfg, slowRate, slowRate)
				var wg sync.WaitGroup
				defer wg.Wait()
				defer to.Close()
				defer from.Close()
				repeat(&wg, from.Read, 64<<10)
				repeat(&wg, to.Read, 64<<10)
				repeat(&wg, to.Write, size)
				wrote := writing(from, make([]byte, 16<<20))
				require.True(t, eventually(func() bool { return min(link.passed.Load(), link.returned.Load()) >= 300<<10 }))
				before := link.returned.Load()
				require.NoError(t, from.SetWriteDeadline(past))
				var r result
				within(t, "Write", func() { r = <-wrote })
				more := link.returned.Load() - before
				t.Logf("%d bytes, %v, %d came back after the call was to end", r.n, r.err, more)
				requireTimeout(t, r.err)
				require.Less(t, more, bound)
			})
		}
	}
}

// A program that begins to write while its peer does, on a link that the peer has filled, gets
// through. With few credits it is slow, as each comes back behind all that is on its way.
func TestSlowSecondWriter(t *testing.T) {
	for name, tt := range map[string]struct {
		credits [2]int // of the second writer, and of the first
		enough  uint64 // bytes each way
	}{
		"many credits":              {[2]int{250, 250}, 64 << 10},
		"few credits of the second": {[2]int{4, 250}, 10000},
		"few credits of the first":  {[2]int{250, 4}, 5000},
	} {
		for _, size := range []int{1000, 1 << 20} {
			for what, transfers := range map[string]int{"segments": -1, "transfers": minTransfer} {
				t.Run(fmt.Sprintf("%s/%s of %d", name, what, size), func(t *testing.T) {
					checkLeaks(t)
					var cfg [2]Config
					for i := range cfg {
						cfg[i] = Config{TransferSize: transfers, MaxReceiveSize: 1024, MaxReceiveCredits: tt.credits[i]}
					}
					second, first, _ := slowConnsOf(t, cfg[0], cfg[1], slowRate, slowRate)
					var wg sync.WaitGroup
					defer wg.Wait()
					defer first.Close()
					defer second.Close()
					repeat(&wg, second.Read, 64<<10)
					repeat(&wg, first.Read, 64<<10)
					arrived := func(c *Conn) uint64 { return c.Stats().BytesReceived }
					repeat(&wg, first.Write, 1000)
					require.True(t, eventually(func() bool { return arrived(second) >= 100<<10 }))
					repeat(&wg, second.Write, size)
					before := arrived(second)
					got := eventually(func() bool { return min(arrived(first), arrived(second)-before) >= tt.enough })
					require.True(t, got, "%d bytes, and %d of the one who had begun", arrived(first), arrived(second)-before)
				})
			}
		}
	}
}

// Keep-alive is content with bytes that come slowly: neither end hears a message for
// longer than it would bear, were it not for them.
func TestSlowKeepAlive(t *testing.T) {
	const n = 4 << 20
	for _, tt := range []struct {
		name string
		cfg  Config
	}{
		{"read", Config{TransferSize: minTransfer}},
		{"write", Config{TransferSize: minTransfer, NoRDMARead: true}},
		{"segments", Config{TransferSize: -1, InitialReceiveCredits: 64}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inTime(t, 500*time.Millisecond, func(d time.Duration) bool {
				checkLeaks(t)
				cfg := tt.cfg
				cfg.KeepAlive, cfg.LingerTimeout = d, -1
				from, to, _ := slowConns(t, cfg, int64(n/(5*d).Seconds()), 0)
				p := alloc(t, n).Bytes()
				copy(p, pattern(1, n))
				wrote := writing(from, p)
				got := make([]byte, n)
				var r, w result
				within(t, "the transfer", func() { r = <-reading(to, got) })
				if r.err == nil {
					require.Equal(t, p, got)
					within(t, "Write", func() { w = <-wrote })
				}
				from.Close()
				to.Close()
				return r.err == nil && w.err == nil
			})
		})
	}
}

// The same deadline by the clock.
func BenchmarkSlowDeadline(b *testing.B) {
	var over [2]time.Duration
	for range b.N {
		for i := range over {
			from, to, link := slowConns(b, Config{TransferSize: minTransfer}, slowRate, 0)
			p, err := Alloc(4 << 20)
			require.NoError(b, err)
			read, wrote := reading(to, make([]byte, 4<<20)), writing(from, p.Bytes())
			for link.passed.Load() < 600<<10 {
				time.Sleep(time.Millisecond)
			}
			start := time.Now()
			if i == 0 {
				to.SetReadDeadline(past)
				require.ErrorIs(b, (<-read).err, os.ErrDeadlineExceeded)
			} else {
				from.SetWriteDeadline(past)
				require.ErrorIs(b, (<-wrote).err, os.ErrDeadlineExceeded)
			}
			over[i] += time.Since(start)
			from.Close()
			to.Close()
			if i == 0 {
				<-wrote
			} else {
				<-read
			}
			p.Free()
		}
	}
	b.ReportMetric(over[0].Seconds()*1e3/float64(b.N), "ms-read-late")
	b.ReportMetric(over[1].Seconds()*1e3/float64(b.N), "ms-write-late")
}
