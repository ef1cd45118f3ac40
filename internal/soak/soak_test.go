//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet"
)

// TestMain makes the test's program a peer where soak starts it as one.
func TestMain(m *testing.M) {
	if device, _, _ := strings.Cut(os.Getenv(peerEnv), " "); badPeers[device] != nil {
		fmt.Println("stream packet")
		badPeers[device]()
		select {}
	}
	if beAPeer() {
		return
	}
	os.Exit(m.Run())
}

// badPeers are peers that end by themselves when they have started, by what is said to be
// their device.
var badPeers = map[string]func(){
	"panics": func() { panic("as the test wants") },
	"races": func() {
		n := 0
		go func() { n++ }()
		n++
		time.Sleep(time.Minute)
	},
	"exits": func() { os.Exit(0) },
}

// A peer that ends before it is killed fails the soak.
func TestKill(t *testing.T) {
	for device := range badPeers {
		t.Run(device, func(t *testing.T) {
			if device == "races" && !shadowed {
				t.Skip("there is no race detector")
			}
			// A child's output would pass for a panic, or a race, of this process.
			printed, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
			require.NoError(t, err)
			defer printed.Close()
			old := os.Stderr
			os.Stderr = printed
			defer func() { os.Stderr = old }()
			c := new(child)
			require.NoError(t, c.start(options{device: device}, "home"))
			// It has ended, and is not waited for.
			require.NoError(t, unix.Waitid(unix.P_PID, c.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil))
			require.ErrorIs(t, c.kill(), errPeer)
		})
	}
	t.Run("lives", func(t *testing.T) {
		c := new(child)
		require.NoError(t, c.start(options{device: "iwarp", addr: "127.0.0.1"}, "127.0.0.1:1"))
		require.NoError(t, c.kill())
	})
	t.Run("no address", func(t *testing.T) {
		err := new(child).start(options{device: "iwarp", addr: "192.0.2.1"}, "127.0.0.1:1")
		require.ErrorContains(t, err, "did not start")
		require.NotErrorIs(t, err, errPeer)
	})
}

func TestSoak(t *testing.T) {
	plot := filepath.Join(t.TempDir(), "soak.svg")
	o, err := parse([]string{"-duration", "20s", "-conns", "200", "-o", plot})
	require.NoError(t, err)
	if shadowed {
		o.rss = 4 << 30
	}
	require.NoError(t, soak(o, os.Stdout))
	b, err := os.ReadFile(plot)
	require.NoError(t, err)
	assert.Contains(t, string(b), "resident memory")
}

func TestFill(t *testing.T) {
	whole := make([]byte, 1000)
	fill(whole, 7, 0)
	part := make([]byte, 100)
	fill(part, 7, 333)
	assert.Equal(t, whole[333:433], part)
	c := &check{seed: 7}
	_, err := c.Write(whole[:500])
	require.NoError(t, err)
	_, err = c.Write(whole[501:])
	assert.ErrorIs(t, err, errWrong)
}

// A stream is whole, or it ends with an error, unless its process may be killed.
func TestReceive(t *testing.T) {
	for _, tt := range []struct {
		name    string
		written int
		cut     bool
		mortal  bool
		ok      bool
		wrong   bool
	}{
		{"whole", 1000, false, false, true, false},
		{"too short", 999, false, false, false, true},
		{"too short, from a process that may be killed", 999, false, true, false, false},
		{"too long", 1001, false, true, false, true},
		{"cut", 999, true, false, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e, cfg := newTestEnd(t)
			h := header{Kind: closed, Seed: 7, N: 1000, Mortal: tt.mortal}
			arrived := e.arrivals.expect(h.Seed)
			c, err := (&rdmanet.Dialer{Config: cfg}).Dial("rdma", e.ln.Addr().String())
			require.NoError(t, err)
			_, err = c.Write(h.encode())
			require.NoError(t, err)
			p := make([]byte, tt.written)
			fill(p, h.Seed, 0)
			var flags rdmanet.MsgFlags
			if tt.cut {
				flags = rdmanet.Partial // of a message that has no end
			}
			_, err = c.(*rdmanet.Conn).WriteMsg(p, flags)
			require.NoError(t, err)
			require.NoError(t, c.Close())
			err = <-arrived
			assert.Equal(t, tt.ok, err == nil, "%v", err)
			assert.Equal(t, tt.wrong, errors.Is(err, errWrong), "%v", err)
			require.NoError(t, e.close()) // who serves has ended, too
			assert.Equal(t, tt.wrong, len(e.wrong) > 0)
		})
	}
}

// A stream that was written and closed is judged by the bytes that arrived.
func TestWriteAndClose(t *testing.T) {
	lost := errors.New("lost")
	for _, tt := range []struct {
		name  string
		to    target
		sure  bool
		noisy bool
		ok    bool
		wrong bool
	}{
		{"Close", target{own: true}, false, false, false, false},
		{"CloseContext", target{own: true}, true, false, false, true},
		{"CloseContext while memory is refused", target{own: true}, true, true, false, false},
		{"CloseContext over a link that is cut", target{own: true, killed: true}, true, false, false, true},
		{"Close over a link that is cut", target{own: true, killed: true}, false, false, true, false},
		{"another process", target{killed: true}, true, false, true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			far, cfg := newTestEnd(t)
			near, _ := newTestEnd(t)
			if tt.noisy {
				near.disturbance.Add(1)
			}
			nc, err := (&rdmanet.Dialer{Config: cfg}).Dial("rdma", far.ln.Addr().String())
			require.NoError(t, err)
			c := nc.(*rdmanet.Conn)
			h := header{Kind: closed, Seed: 7, N: 1000}
			_, err = c.Write(h.encode())
			require.NoError(t, err)
			whole := far.arrivals.expect(h.Seed)
			told := make(chan error, 1)
			go func() {
				told <- <-whole
				near.arrivals.tell(h.Seed, lost)
			}()
			err = near.writeAndClose(c, tt.to, h, tt.sure)
			require.NoError(t, <-told)
			assert.Equal(t, tt.ok, err == nil, "%v", err)
			assert.Equal(t, !tt.ok, errors.Is(err, lost), "%v", err)
			assert.Equal(t, tt.wrong, errors.Is(err, errWrong), "%v", err)
			require.NoError(t, errors.Join(far.close(), near.close()))
		})
	}
}

// A connection that was given up after Close excuses one stream that was lost, which may be
// its own.
func TestExcused(t *testing.T) {
	lost := errors.New("lost")
	for name, tt := range map[string]struct {
		sure   bool // the connection that is given up has a stream of its own
		excuse int  // how many others it excuses
	}{
		"Close":        {false, 1},
		"CloseContext": {true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			far, cfg := newTestEnd(t)
			near, _ := newTestEnd(t)
			dial := func(cfg rdmanet.Config, addr string, h header) *rdmanet.Conn {
				c, err := (&rdmanet.Dialer{Config: cfg}).Dial("rdma", addr)
				require.NoError(t, err)
				_, err = c.Write(h.encode())
				require.NoError(t, err)
				return c.(*rdmanet.Conn)
			}
			begun := givenUp()
			var streams []header
			ended := make(chan error, 2)
			for i := range 2 {
				h := header{Kind: closed, Seed: uint64(i), N: 1000}
				streams = append(streams, h)
				c := dial(cfg, far.ln.Addr().String(), h)
				whole := far.arrivals.expect(h.Seed)
				go func() { ended <- near.writeAndClose(c, target{own: true}, h, false) }()
				require.NoError(t, <-whole) // so it has begun
			}

			peer := new(child)
			require.NoError(t, peer.start(options{device: "iwarp", addr: "127.0.0.1"}, "127.0.0.1:1"))
			short := cfg
			short.LingerTimeout = 20 * time.Millisecond
			short.TransferSize = 1 << 20 // so that the peer's process has to answer
			h := header{Kind: closed, Seed: 7, N: 1000}
			c := dial(short, peer.stream, h)
			require.NoError(t, peer.cmd.Process.Signal(syscall.SIGSTOP))
			require.NoError(t, unix.Waitid(unix.P_PID, peer.cmd.Process.Pid, nil, unix.WSTOPPED|unix.WNOWAIT, nil))
			before := rdmanet.Lingering().Expired
			if tt.sure {
				require.NoError(t, near.writeAndClose(c, target{}, h, true))
			} else {
				require.NoError(t, c.Close())
			}
			require.Eventually(t, func() bool { return rdmanet.Lingering().Expired == before+1 }, time.Minute, time.Millisecond)

			excused := 0
			for _, h := range streams {
				near.arrivals.tell(h.Seed, lost)
				err := <-ended
				require.ErrorIs(t, err, lost)
				if near.forgives(closed, err, begun) {
					excused++
				}
			}
			require.Equal(t, tt.excuse, excused)
			require.NoError(t, errors.Join(peer.kill(), far.close(), near.close()))
		})
	}
}

// Connections to a peer that is gone are not counted, of whatever kind.
func TestFailuresAreNotCounted(t *testing.T) {
	e, _ := newTestEnd(t)
	gone, _ := newTestEnd(t)
	at := target{stream: gone.ln.Addr().String(), packet: gone.packetAddr(), killed: true}
	require.NoError(t, gone.close())
	ctx, cancel := context.WithCancel(t.Context())
	var dialing sync.WaitGroup
	for range 20 {
		dialing.Go(func() { e.dialOn(ctx, func() target { return at }) })
	}
	require.Eventually(t, func() bool { return e.failures.Load() > 500 }, time.Minute, time.Millisecond)
	cancel()
	dialing.Wait()
	require.Zero(t, e.made.Load())
	require.Len(t, e.missing(), int(numKinds))
	e.byKind[echo].Add(1)
	require.NotContains(t, e.missing(), kindNames[echo])
	require.Empty(t, e.wrong)
	require.NoError(t, e.close())
}

func newTestEnd(t *testing.T) (*end, rdmanet.Config) {
	p, err := provider("iwarp")
	require.NoError(t, err)
	cfg := rdmanet.Config{Provider: p}
	e, err := newEnd(cfg, "127.0.0.1", 1)
	require.NoError(t, err)
	return e, cfg
}

func TestPlot(t *testing.T) {
	var p plot
	for i := range 3 * maxSamples {
		p.add(time.Duration(i)*time.Second, float64(i), 1, 0)
	}
	assert.Less(t, len(p.points), maxSamples)
	assert.Contains(t, string(p.svg("x")), "min</text>")
	assert.Equal(t, 5000.0, ceiling(2001))
	assert.Equal(t, 1.0, ceiling(0))
}
