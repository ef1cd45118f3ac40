package rdmanet

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

var closes = flag.Int("closes", 400, "how many connections TestCloseDelivers closes, and `a tenth` as many processes TestExitDelivers ends")

// endless is a linger time that no test waits for: a call that does hangs.
const endless = time.Hour

// frozenLink is a TCP proxy that stops to forward on demand, one way or both, as when a
// cable is pulled or a host hangs: nothing gets through, and nobody is told.
type frozenLink struct {
	ln     net.Listener
	target string
	over   chan struct{}
	wg     sync.WaitGroup

	gates  [2]sync.Mutex // held while nothing goes to the listener, and from it
	frozen [2]bool
}

const (
	toListener = iota
	fromListener
)

func newFrozenLink(t testing.TB, target net.Addr) *frozenLink {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	l := &frozenLink{ln: ln, target: target.String(), over: make(chan struct{})}
	l.wg.Go(l.run)
	t.Cleanup(l.close)
	return l
}

func (l *frozenLink) run() {
	for {
		client, err := l.ln.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp4", l.target)
		if err != nil {
			client.Close()
			continue
		}
		l.wg.Go(func() { l.forward(server, client, &l.gates[toListener]) })
		l.wg.Go(func() { l.forward(client, server, &l.gates[fromListener]) })
		l.wg.Go(func() {
			<-l.over
			client.Close()
			server.Close()
		})
	}
}

func (l *frozenLink) forward(to, from net.Conn, gate *sync.Mutex) {
	for p := make([]byte, 16<<10); ; {
		n, err := from.Read(p)
		gate.Lock()
		gate.Unlock() //lint:ignore SA2001 it only waits
		if _, werr := to.Write(p[:n]); err != nil || werr != nil {
			to.(*net.TCPConn).CloseWrite()
			return
		}
	}
}

// freeze stops a way, for good or until thaw. Not for several goroutines at once.
func (l *frozenLink) freeze(ways ...int) {
	for _, way := range ways {
		l.gates[way].Lock()
		l.frozen[way] = true
	}
}

func (l *frozenLink) thaw() {
	for way, frozen := range l.frozen {
		if frozen {
			l.gates[way].Unlock()
			l.frozen[way] = false
		}
	}
}

func (l *frozenLink) close() {
	l.ln.Close()
	close(l.over)
	l.thaw()
	l.wg.Wait()
}

// frozenPair is a connection of the software device over a link that is to be frozen.
func frozenPair(t *testing.T, cfg, peer Config) (client, server *Conn, link *frozenLink) {
	t.Helper()
	if cfg.Provider == nil {
		cfg.Provider = overTCP()
	}
	peer.Provider = overTCP()
	ln, err := (&ListenConfig{Config: peer}).Listen(tctx, "rdma4", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	link = newFrozenLink(t, ln.Addr())
	c, err := (&Dialer{Config: cfg}).Dial("rdma4", link.ln.Addr().String())
	require.NoError(t, err)
	s, err := ln.Accept()
	require.NoError(t, err)
	exchange(t, c, s, 10<<10)
	return c.(*Conn), s.(*Conn), link
}

// silentPair is a connection of the software device over a link that does not forward any
// more.
func silentPair(t *testing.T, cfg Config) (client, server *Conn) {
	t.Helper()
	client, server, link := frozenPair(t, cfg, cfg)
	link.freeze(toListener, fromListener)
	return client, server
}

// Everything that Write took before Close arrives, however long it is, however slowly the
// peer reads, and also while the peer writes as fast as it can.
func TestCloseDelivers(t *testing.T) {
	checkLeaks(t)
	for _, pace := range []struct {
		name  string
		chunk int
		pause time.Duration
	}{{"fast", 1 << 20, 0}, {"even", 64 << 10, 50 * time.Microsecond}, {"slow", 16 << 10, time.Millisecond}} {
		t.Run(pace.name, func(t *testing.T) {
			ln, err := Listen("rdma4", local4)
			require.NoError(t, err)
			defer ln.Close()
			rnd := rand.New(rand.NewPCG(1, uint64(pace.chunk)))
			lengths := make(chan int)
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					for n := range lengths {
						busy := n%2 == 0
						if err := closeDelivers(ln, patternOf(n), busy, pace.chunk, pace.pause); err != nil {
							t.Errorf("%d bytes, both directions busy %v: %v", n, busy, err)
						}
					}
				})
			}
			for range repeats(*closes) / 3 {
				n := 1 + rnd.IntN(1<<(1+rnd.IntN(21)))
				within(t, "all that are closed", func() { lengths <- n })
			}
			close(lengths)
			within(t, "connections that are closed", wg.Wait)
		})
	}
}

// closeDelivers dials, writes and closes, and compares what the other end reads.
func closeDelivers(ln net.Listener, data []byte, busy bool, chunk int, pause time.Duration) error {
	c, err := Dial("rdma4", ln.Addr().String())
	if err != nil {
		return err
	}
	defer c.Close()
	s, err := ln.Accept() // of one of those that dial at the same time: all write the same
	if err != nil {
		return err
	}
	defer s.Close()
	errs := make(chan error, 1)
	go func() {
		var head [4]byte
		head[0], head[1], head[2], head[3] = byte(len(data)), byte(len(data)>>8), byte(len(data)>>16), 1
		if !busy {
			head[3] = 0
		}
		_, err := c.Write(head[:])
		if err == nil {
			_, err = c.Write(data)
		}
		errs <- errors.Join(err, c.Close())
	}()
	err = readPaced(s, chunk, pause)
	return errors.Join(err, <-errs)
}

// readPaced reads what closeDelivers writes.
func readPaced(s net.Conn, chunk int, pause time.Duration) error {
	var head [4]byte
	if _, err := io.ReadFull(s, head[:]); err != nil {
		return fmt.Errorf("the header: %w", err)
	}
	if head[3] == 1 {
		go func() {
			for p := make([]byte, 32<<10); ; {
				if _, err := s.Write(p); err != nil {
					return
				}
			}
		}()
	}
	want := int(head[0]) | int(head[1])<<8 | int(head[2])<<16
	all := patternOf(want)
	got := 0
	for p := make([]byte, chunk); ; time.Sleep(pause) {
		n, err := s.Read(p)
		if wrong := defect.Differ(all[got:min(got+n, want)], p[:n]); wrong != nil {
			return fmt.Errorf("from %d to %d of %d: %w", got, got+n, want, wrong)
		}
		got += n
		switch {
		case err == io.EOF && got == want:
			return nil
		case err == io.EOF:
			return defect.Lost("%d of %d came", got, want)
		case err != nil:
			return fmt.Errorf("%d of %d bytes, then %w", got, want, err)
		}
	}
}

var closeData = sync.OnceValue(func() []byte { return pattern(7, 2<<20) })

func patternOf(n int) []byte { return closeData()[:n] }

// An answer with "Connection: close" is whole, whatever its length.
func TestCloseAfterAnswer(t *testing.T) {
	checkLeaks(t)
	ln, err := Listen("rdma4", local4)
	require.NoError(t, err)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var n int
		fmt.Sscan(r.URL.Query().Get("n"), &n)
		w.Header().Set("Connection", "close")
		w.Write(patternOf(n))
	})}
	go srv.Serve(ln)
	defer srv.Close()
	tr := &http.Transport{DialContext: DialContext}
	defer tr.CloseIdleConnections()
	cl := &http.Client{Transport: tr}
	var wg sync.WaitGroup
	jobs := make(chan int)
	for range 8 {
		wg.Go(func() {
			for n := range jobs {
				resp, err := cl.Get(fmt.Sprintf("http://%s/?n=%d", ln.Addr(), n))
				if err != nil {
					t.Error(n, err)
					continue
				}
				b, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err == nil {
					err = defect.Differ(patternOf(n), b)
				}
				if err != nil {
					t.Errorf("%d of %d bytes, %v", len(b), n, err)
				}
			}
		})
	}
	rnd := rand.New(rand.NewPCG(2, 2))
	for range repeats(*closes) / 4 {
		jobs <- rnd.IntN(1 << (1 + rnd.IntN(21)))
	}
	close(jobs)
	within(t, "answers", wg.Wait)
}

// exitEnv makes the test binary write to an address, close and exit at once.
const exitEnv = "RDMANET_EXIT"

const exitBytes = 64 << 10

func TestMainExit(t *testing.T) {
	addr := os.Getenv(exitEnv)
	if addr == "" {
		return // the child of TestExitDelivers
	}
	c, err := Dial("rdma4", addr)
	if err == nil {
		_, err = c.Write(patternOf(exitBytes))
	}
	if err == nil {
		err = c.Close()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// A process that writes, closes and exits at once loses nothing while the peer reads.
func TestExitDelivers(t *testing.T) {
	checkLeaks(t)
	ln, err := Listen("rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	exe, err := os.Executable()
	require.NoError(t, err)
	for i := range max(repeats(*closes)/10, 1) {
		cmd := exec.Command(exe, "-test.run=^TestMainExit$")
		// The race detector would have each process wait for a second at its end.
		cmd.Env = append(os.Environ(), exitEnv+"="+ln.Addr().String(), "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
		cmd.Stderr = os.Stderr
		require.NoError(t, cmd.Start())
		s, err := ln.Accept()
		require.NoError(t, err)
		var got []byte
		within(t, "the reader", func() { got, err = io.ReadAll(s) })
		require.NoError(t, err, "process %d: after %d of %d bytes", i, len(got), exitBytes)
		defect.Bytes(t, patternOf(exitBytes), got, "process %d", i)
		s.Close()
		require.NoError(t, cmd.Wait())
	}
}

// Nobody waits for a peer that is silent: not Close, nor a Read that is called while the
// connection lingers, nor what net/http closes under its locks.
func TestCloseOfSilentPeer(t *testing.T) {
	checkLeaks(t)
	c, s := silentPair(t, Config{LingerTimeout: endless})
	now := Lingering().Now
	within(t, "Close", func() { require.NoError(t, c.Close()) })
	require.Equal(t, now+1, Lingering().Now)
	within(t, "Read", func() {
		_, err := c.Read(make([]byte, 1))
		require.ErrorIs(t, err, net.ErrClosed)
	})
	within(t, "Write", func() {
		_, err := c.Write(make([]byte, 1))
		require.ErrorIs(t, err, net.ErrClosed)
	})
	require.ErrorIs(t, c.Close(), net.ErrClosed)
	require.ErrorIs(t, c.CloseContext(tctx), net.ErrClosed)
	within(t, "Close", func() { require.NoError(t, s.Close()) })
}

// The same where the peer's window and the socket are full.
func TestCloseOfSilentPeerFull(t *testing.T) {
	checkLeaks(t)
	c, s := silentPair(t, Config{LingerTimeout: endless})
	for _, x := range []*Conn{c, s} {
		x.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
		for p, err := make([]byte, 1<<20), error(nil); err == nil; {
			_, err = x.Write(p)
		}
	}
	within(t, "Close", func() {
		require.NoError(t, c.Close())
		require.NoError(t, s.Close())
	})
}

// Connections that nobody has accepted are reset by Listener.Close, which waits for none.
func TestListenerCloseResets(t *testing.T) {
	checkLeaks(t)
	ln, err := (&ListenConfig{Config: Config{LingerTimeout: endless}}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	var conns []net.Conn
	for range 5 {
		c, err := Dial("rdma4", ln.Addr().String())
		require.NoError(t, err)
		conns = append(conns, c)
	}
	within(t, "Listener.Close", func() { require.NoError(t, ln.Close()) })
	for _, c := range conns {
		within(t, "Read", func() {
			_, err := c.Read(make([]byte, 1))
			require.ErrorIs(t, err, syscall.ECONNRESET)
		})
		require.NoError(t, c.Close())
	}
}

// Connections over the backlog are refused, and none of them is kept.
func TestBacklogRefuses(t *testing.T) {
	checkLeaks(t)
	const backlog = 4
	ln, err := (&ListenConfig{Backlog: backlog}).Listen(tctx, "rdma4", local4)
	require.NoError(t, err)
	defer ln.Close()
	l := ln.(*Listener)
	var kept []net.Conn
	refused := 0
	for range 6 * backlog {
		c, err := (&Dialer{Timeout: patience}).Dial("rdma4", ln.Addr().String())
		if err == nil {
			_, err = c.Write([]byte("x"))
		}
		if err == nil && !eventually(func() bool { return len(l.ready) == len(kept)+1 || len(kept) == backlog }) {
			t.Fatal("the connection never waits for Accept")
		}
		switch {
		case err != nil:
			refused++
		case len(kept) < backlog:
			kept = append(kept, c)
		default: // set up before it was refused
			within(t, "Read", func() { _, err = c.Read(make([]byte, 1)) })
			require.ErrorIs(t, err, syscall.ECONNRESET)
			refused++
			c.Close()
		}
	}
	require.Len(t, kept, backlog)
	require.Equal(t, 5*backlog, refused)
	for _, c := range kept {
		s, err := ln.Accept()
		require.NoError(t, err)
		b := make([]byte, 1)
		_, err = io.ReadFull(s, b)
		require.NoError(t, err)
		s.Close()
		c.Close()
	}
}

// Of too many connections that linger the oldest is given up.
func TestLingeringIsBounded(t *testing.T) {
	checkLeaks(t)
	before := Lingering()
	old := maxLingering
	maxLingering = before.Now + 2
	defer func() { maxLingering = old }()
	cfg := Config{LingerTimeout: endless, Provider: overTCP()}
	ln, err := (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	link := newFrozenLink(t, ln.Addr())
	var conns []net.Conn
	for range 5 {
		c, err := (&Dialer{Config: cfg}).Dial("rdma4", link.ln.Addr().String())
		require.NoError(t, err)
		conns = append(conns, c)
	}
	link.freeze(toListener, fromListener)
	for _, c := range conns {
		require.NoError(t, c.Close())
	}
	require.True(t, eventually(func() bool { return Lingering().Now <= before.Now+2 }))
	require.Equal(t, before.Evicted+3, Lingering().Evicted)
	require.Equal(t, before.Total+5, Lingering().Total)
}

// Nothing behind a message that breaks the protocol reaches the reader, nor does what
// comes with it.
func TestNothingBehindViolation(t *testing.T) {
	bad := []struct {
		name string
		wire func() []byte
	}{
		{"no credits wanted", func() []byte {
			h := smbdpeer.DataTransfer{CreditsGranted: 10, DataOffset: smbdpeer.PayloadOffset, DataLength: 8}
			return segmentOf(h, "bad,bad,")
		}},
		{"payload beyond the end", func() []byte {
			h := smbdpeer.DataTransfer{CreditsRequested: 10, DataOffset: smbdpeer.PayloadOffset, DataLength: 80}
			return segmentOf(h, "bad,bad,")
		}},
		{"rest of nothing", func() []byte {
			h := smbdpeer.DataTransfer{CreditsRequested: 10, DataOffset: smbdpeer.PayloadOffset, DataLength: 8, RemainingDataLength: 1 << 30}
			return segmentOf(h, "bad,bad,")
		}},
	}
	for _, tt := range bad {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t)
			ln := s.listen()
			p := dialRaw(t, ln.Addr(), nil)
			p.Send(goodRequest.Append(nil))
			p.Receive()
			nc, err := ln.Accept()
			require.NoError(t, err)
			c := s.owned(nc)
			good := func(text string) []byte {
				return segmentOf(smbdpeer.DataTransfer{CreditsRequested: 10, CreditsGranted: 10, DataOffset: smbdpeer.PayloadOffset, DataLength: uint32(len(text))}, text)
			}
			p.SendTogether(good("first,"), tt.wire(), good("third,"))
			var got []byte
			within(t, "the reader", func() { got, err = io.ReadAll(c) })
			require.ErrorIs(t, err, syscall.ECONNRESET)
			defect.Bytes(t, "first,"[:min(6, len(got))], got)
		})
	}
}

func segmentOf(h smbdpeer.DataTransfer, text string) []byte { return append(h.Append(nil), text...) }
